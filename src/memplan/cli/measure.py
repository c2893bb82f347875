"""`memplan measure`: run a step, here or on an emulated card, and report what it allocated."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from memplan.cli.files import OUTPUT
from memplan.cli.options import (
    StepArguments,
    Whole,
    describe,
    input_advice,
    remove_parameters,
    step_options,
    top_option,
)
from memplan.cli.outputs import Outputs, check_contribute, contribute_option, output_options
from memplan.cli.progress import progress
from memplan.errors import InputError
from memplan.trace.naming.targets import contained

if TYPE_CHECKING:
    from memplan.explanation.model import Explanation
    from memplan.studies.comparisons.measured import MeasuredComparison
    from memplan.trace.recording.session import Step
    from memplan.trace.trace import Trace

HOST = "cpu"
HELP = """Really run a step, and say what it allocated.

TARGET is path/to/file.py:callable or package.module:callable, as for memplan explain. Without --dry the step
runs here, on the CPU, or with --device cuda on this machine's GPU: then its peaks stand beside the prediction, and
what differs is listed by cause and layer.

\b
  memplan measure examples/gpt2.py:build
  memplan measure --device cuda examples/gpt2.py:build
  memplan measure --device cuda --contribute step.json.gz examples/gpt2.py:build
  memplan measure --dry --device h100 examples/unet3d.py:build
  memplan measure --dry --device a100 --environment ~/cuda-env --snapshot step.pickle examples/resnet18.py:build

With --dry it runs on the CUDA build of torch in a process that sees an emulated card: torch's own code chooses
kernels and workspaces and allocates as on a real one, and kernels do nothing. So losses are zeros, and a value
that decides a branch is named. It needs Linux on x86-64 and a C compiler, but no GPU.

--contribute writes what the GPU's allocator did, with shapes and sizes and without any name of yours: a file that
memplan's predictions can be held against. memplan run --measure --device cuda does the same of a script.

\b
Exit code: 0 done; 2 bad usage, a step that does not run, no GPU, no CUDA build of torch, or no compiler.
"""


@click.command("measure", help=HELP)
@step_options
@click.option(
    "--device",
    "place",
    metavar="NAME",
    help="cpu, or cuda for this machine's GPU; with --dry the card: h100, a100, rtx4090, t4. Default: cpu.",
)
@click.option("--dry", is_flag=True, help="Run it on the card of --device, emulated.")
@click.option(
    "--environment", metavar="PATH", help="With --dry: environment with the CUDA build of torch. Default: this."
)
@click.option("--steps", type=Whole(min=1), default=2, show_default=True, metavar="N", help="How often it runs.")
@click.option(
    "--snapshot", type=OUTPUT, metavar="FILE",
    help="On a card: write torch's own snapshot of its memory history, a pickle.",
)  # fmt: skip
@contribute_option
@top_option(12, "Layers")
@output_options
def command(
    place: str | None, dry: bool, environment: str | None, steps: int, snapshot: str | None, contribute: str | None,
    top: int, outputs: Outputs, **values: Any,
) -> int:  # fmt: skip
    """Run a step, print what it allocated, and return the exit code. ``place`` is the value of ``--device``, ``values``
    are the other options of the step; the others are as `HELP` and the options describe them."""
    if environment is not None and not dry:
        raise InputError("--environment without --dry", expected="a dry run", do="Add --dry, or leave it out")
    if dry and place is None:
        raise InputError("--dry without --device", expected="the card to emulate", do="Add --device h100, say")
    check_contribute(contribute, place)
    if snapshot is not None and place is None:
        raise InputError(
            "--snapshot without a card", expected="--device cuda, or --dry --device h100", do="Add one of them"
        )
    arguments = StepArguments(**values)
    measurement = _Measurement(place, dry, environment, steps, snapshot, contribute)
    trace, explanation = _measure(arguments, measurement)
    comparison = None if trace.device == HOST or dry else _compare_with_prediction(arguments, trace, steps)
    from memplan.reports.compare import measured_report
    from memplan.reports.explain import dumps, report
    from memplan.reports.terminal import show

    outputs.write(trace, explanation, partial(dumps, explanation, beside=comparison), _settings(trace))
    if not outputs.takes_stdout:
        step = report(explanation, top)
        show(step if comparison is None else step + measured_report(comparison, top))
    return 0


remove_parameters(command, "device", "assume", "settings", "cudnn", "snapshot_file")


@dataclass(frozen=True)
class _Measurement:
    """Options of where and how to run a step, as typed."""

    place: str | None
    dry: bool
    environment: str | None
    steps: int
    snapshot: str | None
    contribute: str | None

    def run(self, arguments: StepArguments) -> Trace:
        """Run the step and return its trace."""
        from memplan.trace.measure import is_cuda, measure, own_gpu

        if self.dry:
            return measure(
                StepOfOptions(arguments), device=self.place, steps=self.steps, dry=True, environment=self.environment,
                snapshot=self.snapshot,
            )  # fmt: skip
        on_card = is_cuda(self.place)
        if on_card:
            own_gpu()  # fails before the target is imported
        return measure(
            describe(arguments).build(on_card=on_card), device=self.place, steps=self.steps, snapshot=self.snapshot,
            contribute=self.contribute,
        )  # fmt: skip


def _measure(arguments: StepArguments, measurement: _Measurement) -> tuple[Trace, Explanation]:
    """Run the step and explain its trace."""
    from memplan.devices import find
    from memplan.explanation.explain import explain_trace

    card = find(measurement.place) if measurement.dry and measurement.place is not None else None
    with progress(f"running {arguments.target}"), contained(arguments.target), input_advice(arguments):
        trace = measurement.run(arguments)
    trains = None if arguments.train else False
    return trace, explain_trace(trace, title=arguments.target, train=trains, card=card, settings=_settings(trace))


def _settings(trace: Trace) -> str | None:
    """Return this process's settings of the CUDA allocator; None for a step on the CPU."""
    from memplan.trace.dry_run.process import allocator_settings

    return None if trace.device == HOST else allocator_settings()


def _compare_with_prediction(arguments: StepArguments, measured: Trace, steps: int) -> MeasuredComparison:
    """Record the measured step for the same card, and compare the peaks."""
    from memplan.studies.comparisons.measured import compare_with_prediction
    from memplan.trace.dry_run.process import allocator_settings
    from memplan.trace.record import record

    with progress(f"recording {arguments.target}"), contained(arguments.target):
        predicted = record(describe(arguments).build(on_card=True), device="cuda", steps=steps)
    return compare_with_prediction(predicted, measured, arguments.target, settings=allocator_settings())


class StepOfOptions:
    """The ``build`` of a target and its options, pickled as their text, for another process."""

    def __init__(self, arguments: StepArguments) -> None:
        self._arguments = arguments
        self._build = describe(arguments).build()
        """Builds the step that the arguments describe."""

    def __call__(self) -> Step:
        """Build the step."""
        return self._build()

    def __reduce__(self) -> tuple[type[StepOfOptions], tuple[StepArguments]]:
        return StepOfOptions, (self._arguments,)
