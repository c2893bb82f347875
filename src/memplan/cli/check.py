"""`memplan check`: where a step wastes memory, or saves it the wrong way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from memplan.cli.ci_options import CiOutputs, ci_options
from memplan.cli.files import ResultFiles, is_trace
from memplan.cli.options import (
    StepArguments,
    Whole,
    describe,
    input_advice,
    load_trace,
    rank_options,
    remove_parameters,
    result_options,
    step_options,
    top_option,
)
from memplan.cli.progress import progress
from memplan.cli.run import run
from memplan.cli.script_options import script_option, target_or_script
from memplan.errors import InputError
from memplan.trace.naming.targets import contained

if TYPE_CHECKING:
    from memplan.checks.finding import Finding
    from memplan.checks.ignores import Ignore
    from memplan.integrations.scripts.request import Request
    from memplan.trace.trace import Trace

HELP = """Find where a step wastes memory, or saves it the wrong way, before it runs.

TARGET and its options are those of memplan explain. --script takes a training script as it is instead.

\b
  memplan check examples/resnet18.py:make --input 32x3x224x224 \\
      --target "32:int64<1000" --loss cross_entropy --optimizer adamw
  memplan check mymodels.py:unet --input 1x1x572x572 --context 92
  memplan check mymodels.py:unet --input 1x1x572x572 --ignore "border-erosion:encoder.*"
  memplan check mymodels.py:unet --input 1x1x576x576 --fix
  memplan check --script examples/train.py -- --batch-size 64

A comment "# memplan: ignore[ID]" on the line that makes or calls a layer does as --ignore does.

\b
Exit code: 0 nothing found that --fail-on names; 1 something found; 2 bad
usage, or a step that cannot be recorded.
"""


@click.command("check", help=HELP)
@step_options
@rank_options
@click.option(
    "--fail-on", type=click.Choice(("info", "warning", "never")), default="warning", show_default=True,
    help="Lowest severity that makes the exit code 1.",
)  # fmt: skip
@click.option(
    "--ignore", "ignored", multiple=True, metavar="ID[:LAYERS]",
    help="Leave out the findings of a check, or those of these layers: border-erosion:encoder.*",
)  # fmt: skip
@click.option(
    "--context", type=Whole(min=0), default=0, metavar="N",
    help="Pixels that the input brings along on each side: a border lost up to that is no finding.",
)  # fmt: skip
@click.option("--fix", is_flag=True, help="Print the change of the source that keeps the border, or a wrapper.")
@top_option(12, "Layers")
@result_options("the findings")
@ci_options
def command(
    fail_on: str, ignored: tuple[str, ...], context: int, fix: bool, top: int, results: ResultFiles, sarif: str | None,
    github: bool, junit: str | None, **values: Any,
) -> int:  # fmt: skip
    """Check a step, print the findings, and return the exit code: 1 if one is at least as severe as ``fail_on``.
    ``values`` are the options of the step and of ``--script``; the others are as `HELP` describes them."""
    from memplan.checks.finding import SEVERITIES, Findings
    from memplan.checks.ignores import parse_ignore
    from memplan.checks.registry import IDS
    from memplan.reports.check import fixes, report
    from memplan.reports.ci.annotations import annotations_of_findings
    from memplan.reports.terminal import show

    request = target_or_script(values)
    arguments, outputs = StepArguments(**values), CiOutputs(sarif, github, junit)
    outputs.check(results)
    ignores = [parse_ignore(text, IDS) for text in ignored]
    if fix and (results.takes_stdout or outputs.to_stdout or is_trace(arguments.target)):
        raise InputError(
            "--fix for a trace, or with --json -",
            expected="a callable as the target, and stdout for the change",
            do="Leave one out",
        )
    trace, findings = _findings(arguments, request, context, ignores)
    results.write(Findings(arguments.target, tuple(findings)).to_json)
    if not results.takes_stdout and not outputs.to_stdout:
        show(report(arguments.target, findings, top))
    # severities are in ascending order
    failing = SEVERITIES[SEVERITIES.index(fail_on) :] if fail_on in SEVERITIES else ()  # pyright: ignore[reportArgumentType]  # "never" is none
    outputs.write(arguments.target, IDS, annotations_of_findings(arguments.target, findings, failing))
    if fix:
        click.echo(fixes(trace, findings))
    return int(any(finding.severity in failing for finding in findings))


def _findings(
    arguments: StepArguments, request: Request | None, context: int, ignores: list[Ignore]
) -> tuple[Trace, list[Finding]]:
    """Return the step of a target, a script or a trace file, and its findings."""
    from memplan.checks.check import check_trace, record_again
    from memplan.checks.mended.changed_step import StepRecorder

    if request is not None or is_trace(arguments.target):
        trace = load_trace(arguments) if request is None else run(request).trace
        return trace, check_trace(trace, context=context, ignores=ignores)
    with progress(f"recording {arguments.target}"), contained(arguments.target), input_advice(arguments):
        described = describe(arguments)
        recorder = StepRecorder(described.what, described.options, arguments.recorded_for())
        trace = record_again(recorder)
        return trace, check_trace(trace, recorder=recorder, context=context, ignores=ignores)


remove_parameters(command, "settings")  # findings do not depend on the allocator
script_option(command)
