"""`memplan why`: torch's out-of-memory message, explained."""

from __future__ import annotations

import os
import sys

import click

from memplan.cli.files import write
from memplan.cli.options import debug_option, json_option
from memplan.errors import TargetError

HELP = """Say why memory ran out, from what torch said.

MESSAGE is the message or a text with it, such as a traceback; or a file that has it; without one, or as -,
it is read from standard input. Messages of torch 1.1 to 2.13, of CUDA, ROCm, XPU, MPS and the CPU are known.

\b
  memplan why "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of ..."
  memplan why train.log
  python train.py 2>&1 | memplan why

It says where the memory was, line by line, whether it was fragmented or too little, and what helps.

\b
Exit code: 0 done; 2 bad usage, or a text without such a message.
"""


@click.command("why", help=HELP)
@click.argument("message", required=False)
@json_option("the figures and the verdict")
@debug_option
def command(message: str | None, json_file: str | None) -> int:
    """Run the command and return its exit code."""
    from memplan.explanation.why import why
    from memplan.reports.terminal import show
    from memplan.reports.why import report

    reason = why(_text(message))
    if json_file is not None:
        write(json_file, reason.to_json())
    if json_file != "-":
        show(report(reason))
    return 0


def _text(message: str | None) -> str:
    """Return the message: the argument itself, the text of the file that it names, or standard input.

    Raises:
        TargetError: the file cannot be read.
    """
    from memplan._json import Unreadable, read_text
    from memplan.simulation.oom_message import LONGEST

    if message is None or message == "-":
        data, more = b"", sys.stdin.buffer.read(LONGEST)
        while more:  # keep the end of a long log
            data = (data + more)[-LONGEST:]
            more = sys.stdin.buffer.read(LONGEST)
        return data.decode("utf-8", "replace")
    try:
        is_file = os.path.exists(message)
    except ValueError:  # a null byte
        is_file = False
    if not is_file:
        return message
    try:
        return read_text(message)
    except (OSError, Unreadable) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise TargetError(
            f"{message} cannot be read ({reason})", expected="a file with the message, or the message itself",
            do="Check the path",
        ) from None  # fmt: skip
