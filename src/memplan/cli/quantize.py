"""`memplan explain --infer --weights int8`: inference of the model beside quantized inference."""

from __future__ import annotations

from memplan.cli.files import ResultFiles, is_trace
from memplan.cli.options import StepArguments, advised, describe
from memplan.cli.progress import progress
from memplan.errors import InputError, StepError
from memplan.trace.naming.targets import contained


def quantize(
    given: StepArguments,
    weights: str | None,
    activations: str | None,
    results: ResultFiles,
    top: int,
    others: tuple[str | None, ...] = (),
) -> int:
    """Run the what-if and return the exit code.

    Args:
        given: the step.
        weights, activations: what they are to be held in.
        results: where to write the result, too.
        top: how many layers to list; 0 for all.
        others: files of other outputs that were asked for.

    Raises:
        InputError: options that do not go with it.
    """
    _check(given, weights, activations, others)
    from memplan.reports.quantize import dumps, print_quantized
    from memplan.studies.quantization.quantize import quantize_step

    with progress(f"quantizing and running {given.target}"), contained(given.target):
        described = describe(given)
        try:
            found = quantize_step(described.what, described.options, weights, activations)
        except StepError as error:
            raise advised(error, given) from error.__cause__
    results.write(lambda: dumps(given.target, found))
    if not results.takes_stdout:
        print_quantized(given.target, found, top=top)
    return 0


def _check(given: StepArguments, weights: str | None, activations: str | None, others: tuple[str | None, ...]) -> None:
    asked = f"--weights {weights}" if weights else f"--activations {activations}"
    if weights is None:
        raise InputError(
            asked, expected="--weights beside it: torchao quantizes activations together with weights",
            do="Add --weights int8",
        )  # fmt: skip
    if not given.infer:
        raise InputError(
            f"{asked} for a training step",
            expected="--infer: trained weights stay in their precision, and so do gradients and optimizer state",
            do="Add --infer; for training, look at memplan fit --allow lossy",
        )
    if is_trace(given.target):
        raise InputError(
            f"{asked} for a trace", expected="a model, which is quantized and run", do="Name the callable that makes it"
        )
    if given.settings or (given.device or "cpu").lower() != "cpu":
        raise InputError(
            f"{asked} on {given.device or 'a card'}",
            expected="the CPU: both forms of the model really run, here",
            do="Leave --device and --settings out; weights in int8 take the same on a card",
        )
    if any(path is not None for path in others):
        raise InputError(
            f"{asked} with --trace or --snapshot, or a file for a viewer", expected="--json for its result",
            do="Leave these out",
        )  # fmt: skip
