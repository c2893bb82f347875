"""The command line: `memplan COMMAND`. A command is a file here and a line in `COMMANDS`.

Nothing heavy is imported until a command runs, so that help answers within 0.3 s.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import click

from memplan._text import printable
from memplan._version import __version__
from memplan.cli.files import TYPED
from memplan.cli.renamed_options import current_spelling
from memplan.errors import MemplanError

COMMANDS: dict[str, str] = {
    "run": "Say what a training script needs, as it is, before it trains.",
    "explain": "Say where the memory of a step goes, before it runs.",
    "check": "Find where a step wastes memory, or saves it the wrong way.",
    "sweep": "Say what grows with batch, size, or any argument, and what is fixed.",
    "largest": "Find the largest batch, size or sequence that fits a card or a budget.",
    "layouts": "Compare ways to train a model with several cards: copies, shards, checkpoints.",
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
"""Name of each command and what it does. The module ``memplan.cli.NAME`` defines it as ``command``."""

HELP = """Where the memory of a PyTorch step goes, before it runs.

\b
  memplan explain examples/resnet18.py:make --input 32x3x224x224
  memplan explain torchvision.models:resnet18 --input 32x3x224x224 --optimizer adamw

Nothing of the model is allocated, and no GPU is needed.

Exit code: 0 done; 1 found something, or does not fit; 2 bad usage, or a step that cannot be recorded.
"""


class Commands(click.Group):
    """A group that imports a command when it runs, and prints every error as a line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of `COMMANDS`."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the command of a name; None for unknown names."""
        if cmd_name not in COMMANDS:
            return None
        return importlib.import_module(f"memplan.cli.{cmd_name}").command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve a command as click does, with former spellings of options replaced. Raises click.UsageError if there
        is no such command; the message has the nearest names."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            from memplan.trace.naming.parsing import offer

            raise click.UsageError(f"There is no command {args[0]!r}. {offer(args[0], COMMANDS)}", ctx)
        if args:
            current, notes = current_spelling(args[0], args[1:])
            args = [args[0], *current]
            for note in notes:
                _print(f"{note}.")
        ctx.meta[TYPED] = list(args)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list in the help, without importing any command."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command as click does; end without a message if stdout is a closed pipe."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            _discard_stdout()
            return 0

    def main(self, args: Sequence[str] | None = None, *positional: Any, **keywords: Any) -> NoReturn:
        """Run the command line and exit."""
        arguments = list(sys.argv[1:] if args is None else args)
        keywords["standalone_mode"] = False
        keywords.setdefault("obj", "--" in arguments)  # whether a target may have arguments
        argv = sys.argv
        sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # closed by `>&-`
        sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        with _fewer_collections(), _watch_interrupts() as interrupted:
            try:
                code = super().main(arguments, *positional, **keywords)
            except BaseException as error:  # any error ends as a line and an exit code
                # an import that was interrupted may raise another error than KeyboardInterrupt
                caught = KeyboardInterrupt() if interrupted() and isinstance(error, Exception) else error
                code = _report_error(caught, debug="--debug" in arguments)
            finally:
                sys.argv = argv  # a target may have set it
        sys.exit(_flush(code if isinstance(code, int) else 0))


@contextmanager
def _fewer_collections() -> Iterator[None]:
    """Within this context, Python searches for reference cycles after 100,000 new objects instead of 700. torch and
    libraries create millions as they are imported: the searches take a quarter of a command's time."""
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


@contextmanager
def _watch_interrupts() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C was pressed in this context; False if the caller handles it."""
    received: list[int] = []

    def note(number: int, frame: Any) -> None:
        received.append(number)
        signal.default_int_handler(number, frame)

    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(received)
    finally:
        if signal.getsignal(signal.SIGINT) is note:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _report_error(error: BaseException, *, debug: bool) -> int:
    """Print an error as a line on stderr and return the exit code."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 2
    if debug and not isinstance(error, click.ClickException):
        traceback.print_exception(error)
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        _print("interrupted")
        return 130
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        click.echo(error.message, err=True)
    elif isinstance(error, click.UsageError):
        command = error.ctx.command_path if error.ctx else "memplan"
        _print(f"{error.format_message().rstrip('.')}. See {command} --help.")
    elif isinstance(error, click.ClickException):
        _print(error.format_message())
    elif isinstance(error, MemplanError):
        # output of the user's code that was captured before it failed
        for note in getattr(error, "__notes__", getattr(error.__cause__, "__notes__", ())):
            click.echo("\n".join(printable(line) for line in note.split("\n")), err=True)
        _print(str(error))
    elif isinstance(error, OSError) and error.strerror:  # an OSError of the step itself is a StepError
        file = f"{error.filename}: " if error.filename else ""
        _print(
            f"{file}{error.strerror}. Expected a file or device that can be used. Check the path, and the room left."
        )
    else:
        _print(
            f"{type(error).__name__}: {error} ({_innermost_frame(error)}). "
            "Expected no error inside of memplan. Run it again with --debug for the traceback, and report it."
        )
    return 2


def _print(text: str) -> None:
    """Print a message as a single line on stderr."""
    click.echo("memplan: " + printable(" ".join(text.split())).replace("?.", "?"), err=True)


def _innermost_frame(error: BaseException) -> str:
    """Return ``file:line`` at which an error was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else "nowhere"


def _flush(code: int) -> int:
    """Flush stdout and return the exit code. A closed pipe must not make the interpreter print an error at exit."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_stdout()
    except ValueError:  # closed by the user's code
        pass
    return code


def _discard_stdout() -> None:
    """Redirect stdout to the null device, as the interpreter flushes it at exit and prints an error if that fails."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@atexit.register
def _freeze() -> None:
    """Spare the interpreter, as it ends, a search of all that was imported for cycles.

    Triton's extension, made with nanobind, would then print what is left of it.
    """
    if "triton._C.libtriton" not in sys.modules:
        gc.freeze()


main = Commands("memplan", help=HELP, context_settings={"help_option_names": ["-h", "--help"]})
main = click.version_option(__version__, prog_name="memplan")(main)
