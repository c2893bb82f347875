"""`memplan guard`: a step beside a baseline in version control."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from memplan.cli.ci_options import CiOutputs, ci_options
from memplan.cli.files import ResultFiles, is_trace, writable, write
from memplan.cli.options import (
    StepArguments,
    advised,
    describe,
    recorded,
    result_options,
    step_options,
    top_option,
    without,
)
from memplan.cli.progress import progress
from memplan.cli.run import run
from memplan.cli.script_options import script_option, target_or_script
from memplan.errors import InputError, StepError
from memplan.trace.naming.targets import contained, short

if TYPE_CHECKING:
    from memplan.integrations.scripts.request import Request
    from memplan.studies.guarding.taken import Taken
    from memplan.trace.trace import Trace

HELP = """Fail where a step takes more memory than its baseline says.

TARGET and its options are those of memplan explain; --script takes a training script
as it is instead. The baseline is a file that --update writes, to be kept in version
control: one file holds any number of targets, options and devices. Name a device, so
that each machine finds the same.

\b
  memplan guard train.py:build --device h100 --baseline memory.json --update
  memplan guard train.py:build --device h100 --baseline memory.json
  memplan guard nets.py:unet --input 1x1x64x64x64 --device rtx4090 \\
      --baseline memory.json --tolerance 1% --github
  memplan guard --script train.py --device h100 --baseline memory.json -- --batch-size 64

\b
Exit code: 0 no more than the baseline and its tolerance; 1 more; 2 bad usage, a
step that cannot be recorded, no baseline of it, or one of another torch.
"""


@click.command("guard", help=HELP)
@step_options
@click.option("--baseline", "baseline_file", metavar="FILE", required=True, help="The baseline, as --update writes it.")
@click.option(
    "--tolerance", default="1%", show_default=True, metavar="SIZE",
    help="How much higher the peaks may be: a share of the baseline's, or bytes: 64MiB.",
)  # fmt: skip
@click.option(
    "--cudnn", "named_cudnn", metavar="PATH",
    help="Environment whose cuDNN is asked for workspaces on a card. Default: none, they take their least.",
)  # fmt: skip
@click.option("--update", is_flag=True, help="Write what the step takes now into the baseline.")
@top_option(12, "Changes")
@result_options("the outcome")
@ci_options
def command(
    baseline_file: str,
    tolerance: str,
    named_cudnn: str | None,
    update: bool,
    top: int,
    results: ResultFiles,
    sarif: str | None,
    github: bool,
    junit: str | None,
    **given: Any,
) -> int:
    """Run the command and return its exit code."""
    given["cudnn"] = named_cudnn
    request = target_or_script(given)
    arguments, outputs = StepArguments(**given), CiOutputs(sarif, github, junit)
    outputs.check(results)
    from memplan.reports.ci.annotations import GROWTH, of_outcome
    from memplan.reports.guard import dumps, print_outcome
    from memplan.studies.guarding.baseline_file import read
    from memplan.studies.guarding.outcome import allowance, baseline_of, compare_with

    allowance(tolerance, 0)
    if update:
        _check_update(baseline_file, results, outputs)
        return _update(arguments, request, baseline_file)
    baseline = read(baseline_file)
    now = _taken(arguments, request)
    before = baseline_of(baseline, now.figures, baseline_file)
    outcome = compare_with(before, now, tolerance)
    results.write(lambda: dumps(outcome))
    if not results.takes_stdout and not outputs.to_stdout:
        print_outcome(outcome, top=top)
    outputs.write(f"{now.figures.title} on {now.figures.device}", [GROWTH], of_outcome(outcome))
    return int(outcome.grew)


without(command, "cudnn")
script_option(command)


def _check_update(path: str, results: ResultFiles, outputs: CiOutputs) -> None:
    if path == "-":
        raise InputError("--baseline -", expected="a file to update", do="Name one")
    if results != ResultFiles() or outputs != CiOutputs(None, False, None):
        raise InputError(
            "--update with --json, --sarif, --github or --junit",
            expected="it alone: nothing is compared",
            do="Run once with --update, and once without",
        )


def _update(given: StepArguments, request: Request | None, path: str) -> int:
    from memplan._bytes import format_bytes
    from memplan._text import printable
    from memplan.studies.comparisons.comparison import changed
    from memplan.studies.guarding.baseline import Baseline
    from memplan.studies.guarding.baseline_file import dumps, read

    file = writable(path, "--baseline")
    old = read(path) if os.path.exists(path) else Baseline()
    now = _taken(given, request).figures
    before = old.find(now.target, now.options, now.device)
    write(file, dumps(old.updated(now)))
    said = f"{now.title} on {now.device}: {format_bytes(now.peak)} peak"
    said += f", was {format_bytes(before.peak)} ({changed(before.peak, now.peak)})" if before is not None else ", new"
    click.echo(printable(f"{path}: {said}"))
    return 0


def _taken(given: StepArguments, request: Request | None) -> Taken:
    """Record the step of a target, load the trace that it names, or run the script."""
    from memplan.studies.guarding.taken import taken

    target, options = _name(given.target), typed(given)
    trains = False if given.infer else None  # a step of the user's own may run no backward pass
    if request is not None:
        options = " ".join(filter(None, (options, *(("--", *own) if (own := request.command.arguments) else ()))))
        trace = run(replace(request, cudnn=_named_cudnn(given))).trace
    elif is_trace(given.target):
        trace, trains = recorded(given), None
    else:
        trace = _recorded(given)
    return taken(trace, target=target, options=options, train=trains, settings=given.settings)


def _recorded(given: StepArguments) -> Trace:
    from memplan.trace.record import record_for
    from memplan.trace.recording.session import choose_target

    with progress(f"recording {given.target}"), contained(given.target):
        described = describe(given)
        place = choose_target(given.device, given.assumed, _named_cudnn(given))
        try:
            return record_for(described.build(on_card=place.card is not None), place)
        except StepError as error:
            raise advised(error, given) from error.__cause__


def _named_cudnn(given: StepArguments) -> str | bool:
    """Return the environment that was named: an installed cuDNN differs from machine to machine, and is not asked."""
    return given.environment or False


def _name(target: str) -> str:
    """Return a target as each system and each checkout writes it: relative, with forward slashes."""
    from memplan.studies.guarding.taken import slashed

    place, colon, name = target.rpartition(":")
    if not colon:
        place, name = name, ""
    is_path = place.endswith(".py") or not colon
    return (slashed(short(os.path.abspath(place))) if is_path else place) + colon + name


def typed(given: StepArguments) -> str:
    """Return the options of a step as text, in one order; not the device, which a baseline has by itself."""
    found = []
    for field, option in _NAMES.items():
        value = getattr(given, field)
        texts = value if isinstance(value, tuple) else () if value in (None, False) else (value,)
        found += [f"--{option}" if text is True else f"--{option} {text}" for text in texts]
    return " ".join(text for text in found if text != "--precision fp32")


_NAMES = {
    "args": "arg", "inputs": "input", "kwargs": "kwarg", "targets": "target", "loss": "loss", "optimizer": "optimizer",
    "precision": "precision", "infer": "infer", "batch": "batch", "settings": "settings", "assume": "assume",
}  # fmt: skip
