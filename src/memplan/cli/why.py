"""`memplan why`: torch's out-of-memory message, explained."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from memplan.cli.files import write
from memplan.cli.options import debug_option, json_option
from memplan.errors import TargetError

if TYPE_CHECKING:
    from memplan._json import Saved
    from memplan.reports.document import Document

WATCH = re.compile(r"rank\d{1,6}\.json")
"""Files that `memplan.watch` writes."""
SUFFIXES = (".pickle", ".pkl", ".pickle.gz", ".pkl.gz")
"""Of snapshots."""
HELP = """Say why memory ran out, from what torch said.

MESSAGE is the message or a text with it, such as a traceback; or a file that has it; without one, or as -,
it is read from standard input. Several files, or a folder, are those of several ranks.
Messages of torch 1.1 to 2.13, of CUDA, ROCm, XPU, MPS and the CPU are known.

\b
  memplan why "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of ..."
  memplan why train.log
  python train.py 2>&1 | memplan why
  memplan why rank0.log rank1.log rank2.log rank3.log
  memplan why torchrun_logs

It says where the memory was, line by line, whether it was fragmented or too little, and what helps.

Of several ranks the odd one comes first: the one that alone ran out of memory, or that had allocated more than
the others. A log of all ranks is split where its lines begin with their rank ([rank3]: ...), as torch writes them. A
folder can have logs (torchrun's --log-dir), what memplan.watch(folder=...) wrote, also of ranks that were killed, or
snapshots, as memplan replay reads them.

\b
Exit code: 0 done; 2 bad usage, or a text without such a message.
"""


@click.command("why", help=HELP)
@click.argument("messages", nargs=-1, metavar="[MESSAGE]...")
@json_option("the figures and the verdict")
@debug_option
def command(messages: tuple[str, ...], json_file: str | None) -> int:
    """Explain why memory ran out, from messages, files or folders; print it, and return the exit code."""
    from memplan.reports.terminal import show

    several = len(messages) > 1 or (len(messages) == 1 and _is_folder(messages[0]))
    text, result = _of_ranks(messages) if several else _of_text(_text(messages[0] if messages else None))
    if json_file is not None:
        write(json_file, result.to_json())
    if json_file != "-":
        show(text)
    return 0


def _of_text(text: str) -> tuple[Document, Saved]:
    """Return report and result for a text of a process, or of several ranks, whose lines begin with their rank."""
    from memplan.explanation.why import why
    from memplan.explanation.why_ranks import texts_by_rank, why_ranks
    from memplan.reports.why import ranks_report, report

    parts = texts_by_rank(text)
    if len(parts) > 1:
        reasons = why_ranks(parts)
        return ranks_report(reasons), reasons
    reason = why(text)
    return report(reason), reason


def _of_ranks(paths: tuple[str, ...]) -> tuple[Document, Saved]:
    """Return report and result of several ranks, whose files or folders are ``paths``: of their watches, of their
    snapshots, else of their logs."""
    files: list[Path] = []
    for path in paths:
        files += Path(path).iterdir() if _is_folder(path) else [Path(path)]
    if any(WATCH.fullmatch(file.name) for file in files):
        from memplan.reports import watched
        from memplan.studies.watched.watched import watched_ranks

        ranks = watched_ranks(paths)
        return watched.report(ranks), ranks
    if any(file.name.lower().endswith(SUFFIXES) for file in files):
        from memplan.reports import rank_snapshots
        from memplan.simulation.replays.ranks import replay_ranks

        snapshots = replay_ranks(paths)
        return rank_snapshots.report(snapshots), snapshots
    from memplan.explanation.why_ranks import why_ranks
    from memplan.reports.why import ranks_report

    reasons = why_ranks(paths)
    return ranks_report(reasons), reasons


def _is_folder(path: str) -> bool:
    """Return whether a path is that of a folder; False for texts that can be no path."""
    try:
        return os.path.isdir(path)
    except ValueError:  # a null byte
        return False


def _text(message: str | None) -> str:
    """Return the message: the argument itself, the text of the file that it names, or standard input. Raises
    TargetError if the file cannot be read."""
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
