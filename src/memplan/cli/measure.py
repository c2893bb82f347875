"""`memplan measure`: run a step and say what it allocated, here or on an emulated card."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from memplan.cli.files import check_writable, write
from memplan.cli.options import (
    StepArguments,
    advised,
    describe,
    json_option,
    step_options,
    top_option,
    without,
)
from memplan.cli.progress import progress
from memplan.cli.targets import contained
from memplan.errors import InputError, StepError

if TYPE_CHECKING:
    from memplan.explanation.model import Explanation
    from memplan.trace.recording.session import Step
    from memplan.trace.trace import Trace

HELP = """Really run a step, and say what it allocated.

TARGET is path/to/file.py:callable or package.module:callable, as for memplan explain. Without --dry the step
runs here, on the CPU.

\b
  memplan measure examples/gpt2.py:build
  memplan measure --dry h100 examples/unet3d.py:build
  memplan measure --dry a100 --torch ~/cuda-env --snapshot step.pickle examples/resnet18.py:build

With --dry it runs on the CUDA build of torch in a process that sees an emulated card: torch's own code chooses
kernels and workspaces and allocates as on a real one, and kernels do nothing. So losses are zeros, and a value
that decides a branch is named. It needs Linux on x86-64 and a C compiler, but no GPU.

\b
Exit code: 0 done; 2 bad usage, a step that does not run, no CUDA build of torch, or no compiler.
"""


@click.command("measure", help=HELP)
@step_options
@click.option("--dry", metavar="CARD", help="Run it on this card, emulated: h100, a100, rtx4090, t4.")
@click.option(
    "--torch",
    "environment",
    metavar="PATH",
    help="With --dry: environment with the CUDA build of torch. Default: this.",
)
@click.option(
    "--steps", type=click.IntRange(min=1), default=2, show_default=True, metavar="N", help="How often it runs."
)
@click.option(
    "--snapshot", metavar="FILE", help="With --dry: write torch's own snapshot of its memory history, a pickle."
)
@top_option(12, "Layers")
@json_option("the explanation")
@click.option("--trace", "trace_file", metavar="FILE", help="Write the measured step, to explain it again later.")
def command(
    dry: str | None,
    environment: str | None,
    steps: int,
    snapshot: str | None,
    top: int,
    json_file: str | None,
    trace_file: str | None,
    **given: Any,
) -> int:
    """Run the command and return its exit code."""
    if dry is None and (environment is not None or snapshot is not None):
        option = "--torch" if environment is not None else "--snapshot"
        raise InputError(
            f"{option} without --dry", expected="the card to emulate", do="Add --dry h100, or leave it out"
        )
    if json_file == trace_file == "-":
        raise InputError("--json - and --trace -", expected="stdout for one of them", do="Name a file for the other")
    for option, path in (("--json", json_file), ("--trace", trace_file), ("--snapshot", snapshot)):
        check_writable(path, option)
    trace, explanation = _measured(StepArguments(**given), dry, environment, steps, snapshot)
    from memplan.reports.explain import dumps, print_explanation

    if trace_file is not None:
        write(trace_file, trace.to_json())
    if json_file is not None:
        write(json_file, dumps(explanation))
    if "-" not in (json_file, trace_file):
        print_explanation(explanation, top=top)
    return 0


without(command, "device", "assume", "settings", "cudnn")


def _measured(
    given: StepArguments, dry: str | None, environment: str | None, steps: int, snapshot: str | None
) -> tuple[Trace, Explanation]:
    from memplan.devices import find
    from memplan.explanation.explain import explain_trace
    from memplan.trace.dry_run.process import allocator_settings
    from memplan.trace.measure import measure

    card = None if dry is None else find(dry)
    with progress(f"running {given.target}"), contained(given.target):
        try:
            if card is None:
                trace = measure(describe(given).build(), steps=steps)
            else:
                build = StepOfOptions(given)
                trace = measure(
                    build, device=card.name, steps=steps, dry=True, environment=environment, snapshot=snapshot
                )
        except StepError as error:
            raise advised(error, given) from error.__cause__
    trains = False if given.infer else None
    settings = None if card is None else allocator_settings()
    return trace, explain_trace(trace, title=given.target, train=trains, card=card, settings=settings)


class StepOfOptions:
    """The build that a target and options describe, for another process: what is sent is their text."""

    def __init__(self, given: StepArguments) -> None:
        self._given = given
        self._build = describe(given).build()

    def __call__(self) -> Step:
        """Return the step."""
        return self._build()

    def __reduce__(self) -> tuple[type[StepOfOptions], tuple[StepArguments]]:
        return StepOfOptions, (self._given,)
