"""The command line: `memplan COMMAND`. A command is one file here and one line in `COMMANDS`.

Nothing heavy is imported until a command runs: help has to answer within 0.3 s.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from memplan._text import printable
from memplan._version import __version__
from memplan.cli.files import GIVEN
from memplan.errors import MemplanError

COMMANDS: dict[str, str] = {
    "run": "Say what a training script needs, as it is, before it trains.",
    "explain": "Say where the memory of a step goes, before it runs.",
    "check": "Find where a step wastes memory, or saves it the wrong way.",
    "sweep": "Say what grows with batch, size, or any argument, and what is fixed.",
    "largest": "Find the largest batch, size or sequence that fits a card or a budget.",
    "compare": "Hold two steps against each other: models, precisions, plans, saved results.",
    "guard": "Fail where a step takes more memory than its baseline says.",
    "fit": "Make a training step run within a budget of bytes, with the same result.",
    "export": "Write a training step as C for a small device, under a budget of bytes.",
    "measure": "Really run a step, here or on an emulated card, and say what it allocated.",
    "replay": "Replay a snapshot of torch's CUDA memory, and say what would have been.",
    "why": "Say why memory ran out, from what torch said.",
    "report": "Turn saved results into one page for any browser.",
    "devices": "List the cards that memplan knows, and where each figure is from.",
    "cache": "Show what memplan keeps on disk, or remove it.",
}
"""Name of each command and what it does. ``memplan.cli.NAME`` holds it as ``command``, a click command."""

HELP = """Where the memory of a PyTorch step goes, before it runs.

\b
  memplan explain examples/resnet18.py:make --input 32x3x224x224
  memplan explain torchvision.models:resnet18 --input 32x3x224x224 --optimizer adamw

Nothing of the model is allocated, and no GPU is needed.

Exit code: 0 done; 1 found something, or does not fit; 2 bad usage, or a step that cannot be recorded.
"""


class Commands(click.Group):
    """A group that imports a command when it is asked for, and answers every error with one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of `COMMANDS`."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of a name, imported now; None where there is none."""
        if cmd_name not in COMMANDS:
            return None
        return importlib.import_module(f"memplan.cli.{cmd_name}").command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command as click does; offer the nearest names where it is unknown."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            from memplan.trace.naming.parsing import offer

            raise click.UsageError(f"There is no command {args[0]!r}. {offer(args[0], COMMANDS)}", ctx)
        ctx.meta[GIVEN] = list(args)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list in the help, without importing any command."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command as click does; end without a message where the reader of a pipe has gone."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            _silence()
            return 0

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> NoReturn:
        """Run the command line and exit."""
        given = list(sys.argv[1:] if args is None else args)
        extra["standalone_mode"] = False
        extra.setdefault("obj", "--" in given)  # whether arguments of a target may follow
        own = sys.argv
        sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # closed by `>&-`
        sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        try:
            code = super().main(given, *rest, **extra)
        except BaseException as error:  # whatever it is, it ends as one line and an exit code
            code = _answer(error, debug="--debug" in given)
        finally:
            sys.argv = own  # a target has had its own
        if isinstance(code, int):
            sys.exit(_flushed(code))
        sys.exit(_flushed(0))


def _answer(error: BaseException, *, debug: bool) -> int:
    """Say what went wrong in one line on stderr and return the exit code."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 2
    if debug and not isinstance(error, click.ClickException):
        traceback.print_exception(error)
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        _say("interrupted")
        return 130
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        click.echo(error.message, err=True)
    elif isinstance(error, click.UsageError):
        command = error.ctx.command_path if error.ctx else "memplan"
        _say(f"{error.format_message().rstrip('.')}. See {command} --help.")
    elif isinstance(error, click.ClickException):
        _say(error.format_message())
    elif isinstance(error, MemplanError):
        _say_last(error)
        _say(str(error))
    elif isinstance(error, OSError) and error.strerror:  # a step's own are a StepError
        place = f"{error.filename}: " if error.filename else ""
        _say(f"{place}{error.strerror}. Expected a file or device that can be used. Check the path, and the room left.")
    else:
        _say(
            f"{type(error).__name__}: {error} ({_innermost(error)}). "
            "Expected no error inside of memplan. Run it again with --debug for the traceback, and report it."
        )
    return 2


def _say_last(error: BaseException) -> None:
    """Say what the user's code printed before it failed, where that was held back."""
    for note in getattr(error, "__notes__", getattr(error.__cause__, "__notes__", ())):
        click.echo("\n".join(printable(line) for line in note.split("\n")), err=True)


def _say(text: str) -> None:
    click.echo("memplan: " + printable(" ".join(text.split())).replace("?.", "?"), err=True)


def _innermost(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else "nowhere"


def _flushed(code: int) -> int:
    """Return the exit code, after flushing: a pipe that broke late must not make the interpreter complain."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _silence()
    except ValueError:  # closed by the user's code
        pass
    return code


def _silence() -> None:
    """Send the rest of stdout nowhere, else the interpreter complains of it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


main = Commands("memplan", help=HELP, context_settings={"help_option_names": ["-h", "--help"]})
main = click.version_option(__version__, prog_name="memplan")(main)
