"""`memplan run`: report the memory that an unchanged training script needs."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from memplan._text import printable
from memplan.cli.options import StepArguments, Whole, all_ranks_options, debug_option, host_option, top_option
from memplan.cli.outputs import Outputs, check_contribute, contribute_option, output_options
from memplan.cli.progress import progress
from memplan.cli.verdicts import does_not_fit, warn_of_branches
from memplan.errors import InputError

if TYPE_CHECKING:
    from memplan.integrations.scripts.request import Request, RunResult
    from memplan.studies.comparisons.measured import MeasuredComparison

HELP = """Say what a training script needs, as it is, before it trains.

SCRIPT and its arguments are what python would be given. The script runs unchanged in a process of its own on tensors
without values, until its optimizers have made two updates. Nothing is trained, no GPU is needed, and what it
would write, save, send or start is held back and listed.

\b
  memplan run examples/train.py --batch-size 64
  memplan run --device rtx4090 examples/train.py --batch-size 64
  memplan run --device h100 --input 64x3x32x32 --input "64:int64<10" examples/train.py
  memplan run -m package.train --epochs 3
  memplan run --world 8 --device h100 train.py
  memplan run --world 8 --rank all --device h100 train.py
  memplan run --measure --device cuda examples/train.py
  memplan run --lines examples/train.py examples/train.py

memplan's own options come before the script. --input describes the batch where the data are not on this machine.
Functions that the script decorates with memplan.profile are shown line by line; --lines FILE.py[:FUNCTION] does so
for others, without a decorator.
--world runs it as one of the ranks that torchrun starts: torchrun --nproc-per-node 8 train.py is --world 8.
memplan check, largest and fit take a script, too: memplan largest --script examples/train.py --device rtx4090.

\b
Exit code: 0 done; 1 does not fit on the card that --device names; 2 bad
usage, a script that fails or calls no model, or one whose path depends on
a value that a recording does not have.
"""


def unprotected_option(command: Any) -> Any:
    """Add ``--unprotected`` to a command."""
    return click.option(
        "--unprotected", is_flag=True,
        help="Run the script where nothing can hold back what it writes, sends or starts.",
    )(command)  # fmt: skip


@click.command("run", help=HELP, context_settings={"allow_interspersed_args": False})
@click.option("-m", "is_module", is_flag=True, help="SCRIPT is a module, as after python -m.")
@click.option(
    "--device", metavar="NAME",
    help="cpu, or a card such as h100 (memplan devices lists them); with --measure, cuda for this machine's GPU.",
)  # fmt: skip
@click.option(
    "--phases", is_flag=True,
    help="Follow it through evaluation, checkpoints and further epochs, with short loaders; say the peak of each.",
)  # fmt: skip
@click.option("--steps", type=Whole(min=1), show_default="2", metavar="N", help="Updates to see.")
@click.option(
    "--input", "inputs", multiple=True, metavar="SPEC", help="A tensor of the batch, instead of the loader's."
)
@click.option("--kwarg", "kwargs", multiple=True, metavar="NAME=SPEC", help="The same of a batch that is a dict.")
@click.option("--batch", type=Whole(min=1), metavar="N", help="Samples in a batch, instead of the loader's.")
@click.option("--measure", "really", is_flag=True, help="Run it for real, here, instead of recording it.")
@click.option(
    "--allow-writes",
    "writes",
    is_flag=True,
    help="Let it write files, connect and start programs; nothing is removed, and checkpoints need --measure.",
)
@unprotected_option
@all_ranks_options
@click.option("--show-output", "shows", is_flag=True, help="Show what it prints.")
@click.option(
    "--limit", type=click.FloatRange(min=0, min_open=True), default=300.0, show_default=True, metavar="SECONDS",
    help="End it after this time.",
)  # fmt: skip
@click.option("--settings", metavar="CONF", help="Of the card's caching allocator, as in PYTORCH_ALLOC_CONF.")
@click.option("--assume", multiple=True, metavar="FILE:LINE=SHARE", help="How much is selected by value at a line.")
@click.option(
    "--cudnn", metavar="PATH", help="Environment or version of cuDNN for a card's workspaces; off: intervals."
)
@contribute_option
@click.option(
    "--lines", "places", multiple=True, metavar="FILE.py[:FUNCTION]",
    help="Show a file's functions, or one of them, line by line.",
)  # fmt: skip
@host_option
@debug_option
@top_option(12, "Layers")
@output_options
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(top: int, settings: str | None, host: str | None, outputs: Outputs, **values: Any) -> int:
    """Run a script, print what it needs, and return the exit code: 1 if it does not fit its card, 2 if a branch was
    assumed.

    ``values`` are the script, its arguments and the options of its run (see `request_of`); the others are as the
    options describe them.
    """
    from memplan.explanation.explain import explain_trace
    from memplan.explanation.host import read_host
    from memplan.integrations.line_profiles.places import unused_options
    from memplan.reports.run import dumps, report
    from memplan.reports.terminal import show
    from memplan.studies.runs.whole_run import whole_run

    check_contribute(values["contribute"], values["device"] if values["really"] else None)
    room = read_host(host, measured=values["really"])
    if values["rank"] == "all":
        from memplan.cli.roles import check, run_roles

        if values["phases"]:
            raise InputError("--rank all with --phases", expected="one of them", do="Leave one out")
        check(values["world"], values["really"], outputs)
        return run_roles(request_of(values | {"rank": 0}), run, room, settings, outputs, top)
    request = request_of(values)
    ran = run(request)
    whole, trace = None, ran.trace
    if request.phases:
        whole, trace = whole_run(ran.trace, ran.facts, title=ran.command.name, settings=settings)
    explanation = explain_trace(trace, title=ran.command.name, settings=settings, host=room)
    comparison = _compare_with_prediction(request, ran, settings) if ran.trace.counters else None
    as_json = partial(dumps, str(ran.command), ran.facts, explanation, comparison, whole)
    outputs.write(ran.trace, explanation, as_json, settings)
    if not outputs.takes_stdout:
        show(report(str(ran.command), ran.facts, explanation, top, comparison, whole))
    for message in unused_options(values["places"], explanation.lines):
        click.echo(f"memplan: {message}", err=True)
    return warn_of_branches(explanation) or int(does_not_fit(explanation) or bool(ran.facts.unwritten))


def _compare_with_prediction(request: Request, ran: RunResult, settings: str | None) -> MeasuredComparison:
    """Record a script that was measured on a card for the same card, and compare the peaks."""
    from memplan.studies.comparisons.measured import compare_with_prediction

    predicted = run(replace(request, really=False, contribute=None, device="cuda"))
    return compare_with_prediction(predicted.trace, ran.trace, ran.command.name, settings=settings)


def request_of(values: dict[str, Any]) -> Request:
    """Return the request for a script from the values of the command's options, by name. Raises InputError if an option
    is malformed, or contradicts another."""
    from memplan.integrations.line_profiles.places import parse_lines_option
    from memplan.integrations.scripts.command import Command
    from memplan.integrations.scripts.loaders import Rules
    from memplan.integrations.scripts.request import Request
    from memplan.trace.naming.parsing import named
    from memplan.trace.recording.session import check_rank
    from memplan.trace.spec import spec

    arguments = StepArguments("", assume=values["assume"], cudnn=values["cudnn"])
    if values["inputs"] and values["kwargs"]:
        raise InputError("--input and --kwarg", expected="a batch that is a list, or a dict", do="Leave one out")
    check_rank(values.get("world"), values.get("rank", 0))
    if values.get("phases") and values["places"]:
        raise InputError("--lines with --phases", expected="lines of two updates, or phases", do="Leave one out")
    if values.get("phases") and values["steps"] is not None:
        raise InputError("--steps with --phases", expected="a number of updates, or all phases", do="Leave one out")
    kwargs = {name: spec(text) for name, text in named(values["kwargs"], "--kwarg").items()}
    rules = Rules(tuple(spec(text) for text in values["inputs"]), kwargs, values["batch"])
    command = Command(values["script"], tuple(values["arguments"]), values["is_module"]).checked()
    contribute = None if values["contribute"] is None else os.path.abspath(values["contribute"])
    return Request(
        command, values["device"], values["steps"] or 2, values["really"], rules, writes=values["writes"],
        unprotected=values["unprotected"], shows=values["shows"], limit=values["limit"],
        contribute=contribute, phases=values.get("phases", False), assume=tuple(arguments.assumed.items()),
        cudnn=arguments.environment, world=values.get("world"), rank=values.get("rank", 0),
        lines=tuple(map(parse_lines_option, values.get("places", ()))),
    )  # fmt: skip


def run(request: Request) -> RunResult:
    """Run a script in its own process, with a progress line. If it exits, exit with its code."""
    from memplan.integrations.scripts.process import run_script
    from memplan.integrations.scripts.request import ScriptEnded

    with progress(f"{'running' if request.really else 'recording'} {request.command.name}"):
        try:
            return run_script(request, lambda line: click.echo(f"memplan: {printable(line)}", err=True))
        except ScriptEnded as error:
            for line in error.said.splitlines():
                click.echo(printable(line), err=True)
            if error.code is None:
                raise
            # sys.exit of the script, for example from argparse
            if isinstance(error.code, int):
                raise SystemExit(error.code) from error
            click.echo(printable(error.code), err=True)
            raise SystemExit(1) from error
