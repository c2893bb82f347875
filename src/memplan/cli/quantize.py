"""`memplan explain --no-train --weights int8`: compare inference of a model with that of its quantized copy."""

from __future__ import annotations

from dataclasses import replace

from memplan.cli.files import is_trace
from memplan.cli.options import StepArguments, describe, input_advice
from memplan.cli.outputs import Outputs
from memplan.cli.progress import progress
from memplan.errors import InputError
from memplan.trace.naming.targets import contained


def quantize(arguments: StepArguments, weights: str | None, activations: str | None, outputs: Outputs, top: int) -> int:
    """Compare inference of a model with its quantized copy, print the comparison, and return the exit code.

    Raises:
        InputError: an option does not go with these.
    """
    _check(arguments, weights, activations, outputs)
    results = outputs.results
    from memplan.reports.quantize import report
    from memplan.studies.quantization.quantize import quantize_step

    with progress(f"quantizing and running {arguments.target}"), contained(arguments.target), input_advice(arguments):
        described = describe(arguments)
        quantized = quantize_step(described.what, described.options, weights, activations)
        quantized = replace(quantized, title=arguments.target)
    results.write_and_show(quantized.to_json, lambda: report(quantized, top))
    return 0


def _check(arguments: StepArguments, weights: str | None, activations: str | None, outputs: Outputs) -> None:
    """Raise InputError for options that cannot be combined with quantization."""
    option = f"--weights {weights}" if weights else f"--activations {activations}"
    if weights is None:
        raise InputError(
            option, expected="--weights beside it: torchao quantizes activations together with weights",
            do="Add --weights int8",
        )  # fmt: skip
    if arguments.train:
        raise InputError(
            f"{option} for a training step",
            expected="--no-train: trained weights stay in their precision, and so do gradients and optimizer state",
            do="Add --no-train; for training, look at memplan fit --allow lossy",
        )
    if is_trace(arguments.target):
        raise InputError(
            f"{option} for a trace",
            expected="a model, which is quantized and run",
            do="Name the callable that makes it",
        )
    if arguments.settings or (arguments.device or "cpu").lower() != "cpu":
        raise InputError(
            f"{option} on {arguments.device or 'a card'}",
            expected="the CPU: both forms of the model really run, here",
            do="Leave --device and --settings out; weights in int8 take the same on a card",
        )
    if (outputs.trace, outputs.snapshot, outputs.perfetto) != (None, None, None):
        raise InputError(
            f"{option} with --trace, --snapshot or --perfetto", expected="--json for its result", do="Leave these out"
        )
