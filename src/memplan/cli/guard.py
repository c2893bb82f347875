"""`memplan guard`: compare a step's memory with a baseline in version control."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from memplan.cli.ci_options import CiOutputs, ci_options
from memplan.cli.files import ResultFiles, is_trace, writable, write
from memplan.cli.options import (
    StepArguments,
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
from memplan.cli.renamed_options import current_spelling
from memplan.cli.run import run
from memplan.cli.script_options import script_option, target_or_script
from memplan.errors import InputError
from memplan.trace.naming.targets import contained, short

if TYPE_CHECKING:
    from memplan.integrations.scripts.request import Request
    from memplan.studies.guarding.baseline import Baseline
    from memplan.studies.guarding.recorded_figures import RecordedFigures
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
@rank_options
@click.option("--baseline", "baseline_file", metavar="FILE", required=True, help="The baseline, as --update writes it.")
@click.option(
    "--tolerance", default="1%", show_default=True, metavar="SIZE",
    help="How much higher the peaks may be: a share of the baseline's, or bytes: 64MiB.",
)  # fmt: skip
@click.option(
    "--cudnn", "named_cudnn", metavar="PATH",
    help="Environment whose cuDNN is asked for workspaces on a card, or a version such as 9.19.0: stored answers, else "
    "expected workspaces. off: their least. Default: the version of torch's CUDA build, installed or not.",
)  # fmt: skip
@click.option("--update", is_flag=True, help="Write what the step takes now into the baseline.")
@top_option(12, "Changes")
@result_options("the outcome")
@ci_options
def command(
    baseline_file: str, tolerance: str, named_cudnn: str | None, update: bool, top: int, results: ResultFiles,
    sarif: str | None, github: bool, junit: str | None, **values: Any,
) -> int:  # fmt: skip
    """Compare a step's memory with its baseline, print the outcome, and return the exit code: 1 if it takes more.

    With ``update``, write the baseline instead. ``values`` are the options of the step and of ``--script``; the others
    are as `HELP` and the options describe them.
    """
    values["cudnn"] = named_cudnn
    request = target_or_script(values)
    arguments, outputs = StepArguments(**values), CiOutputs(sarif, github, junit)
    outputs.check(results)
    from memplan.reports.ci.annotations import GROWTH, annotations_of_outcome
    from memplan.reports.guard import report
    from memplan.reports.terminal import show
    from memplan.studies.guarding.outcome import allowance, baseline_of, compare_with

    allowance(tolerance, size=0)  # raises UsageError for a wrong tolerance before the step is recorded
    if update:
        _check_update(baseline_file, results, outputs)
        return _update(arguments, request, baseline_file)
    baseline = _read(baseline_file)
    now = _snapshot(arguments, request)
    before = baseline_of(baseline, now.figures, baseline_file)
    outcome = compare_with(before, now, tolerance)
    results.write(outcome.to_json)
    if not results.takes_stdout and not outputs.to_stdout:
        show(report(outcome, top))
    outputs.write(f"{now.figures.title} on {now.figures.device}", [GROWTH], annotations_of_outcome(outcome))
    return int(outcome.grew)


remove_parameters(command, "cudnn")
script_option(command)


def _check_update(path: str, results: ResultFiles, outputs: CiOutputs) -> None:
    """Raise InputError for options that do not go with ``--update``."""
    if path == "-":
        raise InputError("--baseline -", expected="a file to update", do="Name one")
    if results != ResultFiles() or outputs != CiOutputs(sarif=None, github=False, junit=None):
        raise InputError(
            "--update with --json, --sarif, --github or --junit",
            expected="it alone: nothing is compared",
            do="Run once with --update, and once without",
        )


def _update(arguments: StepArguments, request: Request | None, path: str) -> int:
    """Write the step's present figures into the baseline, and print the changes. Return the exit code."""
    from memplan._bytes import format_bytes
    from memplan._text import printable
    from memplan.studies.comparisons.comparison import change_text
    from memplan.studies.guarding.baseline import Baseline

    file = writable(path, "--baseline")
    old = _read(path) if os.path.exists(path) else Baseline()
    now = _snapshot(arguments, request).figures
    before = old.find(now.target, now.options, now.device)
    write(file, old.updated(now).to_json())
    text = f"{now.title} on {now.device}: {format_bytes(now.peak)} peak"
    if before is None:
        text += ", new"
    else:
        text += f", was {format_bytes(before.peak)} ({change_text(before.peak, now.peak)})"
    click.echo(printable(f"{path}: {text}"))
    return 0


def _read(path: str) -> Baseline:
    """Read a baseline, with former spellings of options replaced."""
    from memplan.studies.guarding.baseline import Baseline, read_baseline

    def current(options: str) -> str:
        return " ".join(current_spelling("explain", options.split(" "))[0])

    return Baseline(tuple(replace(step, options=current(step.options)) for step in read_baseline(path).steps))


def _snapshot(arguments: StepArguments, request: Request | None) -> RecordedFigures:
    """Record the target's step, load the trace that it names, or run the script, and return its figures."""
    from memplan.studies.guarding.recorded_figures import figures_of_trace

    target, options = _portable(arguments.target), options_text(arguments)
    trains = None if arguments.train else False  # None: unknown, a step may run no backward pass
    if request is not None:
        if request.command.arguments:
            options = " ".join(filter(None, (options, "--", *request.command.arguments)))
        trace = run(replace(request, cudnn=_named_cudnn(arguments))).trace
    elif is_trace(arguments.target):
        trace, trains = load_trace(arguments), None
    else:
        trace = _record_target(arguments)
    names_cudnn = arguments.environment is not None or is_trace(arguments.target)
    return figures_of_trace(
        trace, target=target, options=options, train=trains, settings=arguments.settings, names_cudnn=names_cudnn
    )


def _record_target(arguments: StepArguments) -> Trace:
    """Return the trace of the target's step."""
    from memplan.trace.record import record_for
    from memplan.trace.recording.session import choose_target

    with progress(f"recording {arguments.target}"), contained(arguments.target), input_advice(arguments):
        described = describe(arguments)
        target = choose_target(
            arguments.device, arguments.assumed, _named_cudnn(arguments), arguments.world, arguments.rank
        )
        return record_for(described.build(on_card=target.card is not None), target)


def _named_cudnn(arguments: StepArguments) -> str | bool:
    """Return the cuDNN to ask for workspaces: by default a version, as the installed cuDNN differs between machines."""
    from memplan.cudnn.cudnn_library import of_this_torch, title_of

    return title_of(of_this_torch().version) if arguments.environment is None else arguments.environment


def _portable(target: str) -> str:
    """Return a target with a relative path and forward slashes, the same on all systems and in all checkouts."""
    from memplan.studies.guarding.recorded_figures import with_forward_slashes

    file_or_module, colon, name = target.rpartition(":")
    if not colon:  # a trace file, or a script
        return with_forward_slashes(short(os.path.abspath(target)))
    if file_or_module.endswith(".py"):
        file_or_module = with_forward_slashes(short(os.path.abspath(file_or_module)))
    return f"{file_or_module}:{name}"


def options_text(arguments: StepArguments) -> str:
    """Return the options of a step as text in a fixed order, without the device, which a baseline stores separately."""
    words: list[str] = []
    for field, option in _NAMES.items():
        value = getattr(arguments, field)
        if isinstance(value, tuple):
            words += [f"--{option} {text}" for text in value]
        elif value is False:
            words.append("--no-train")
        elif value is not None and value is not True:  # 1 == True: `in` would leave out --batch 1
            words.append(f"--{option} {value}")
    if arguments.world is not None:
        words.append(f"--world {arguments.world} --rank {arguments.rank}")
    return " ".join(words)


_NAMES = {
    "args": "arg", "inputs": "input", "kwargs": "kwarg", "targets": "target", "loss": "loss", "optimizer": "optimizer",
    "autocast": "autocast", "dtype": "dtype", "train": "train", "batch": "batch", "settings": "settings",
    "assume": "assume",
}  # fmt: skip
