"""Explain the out-of-memory errors of several ranks together: the odd rank, and why it ran out of memory."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from memplan._bytes import format_bytes_as_torch as shown
from memplan._display import Displayed
from memplan._json import Saved, SignedInt, Unreadable, read_text
from memplan._text import ranks_text
from memplan.errors import InputError, TargetError
from memplan.explanation.why import Why, memory_by_process, why
from memplan.simulation.odd_ranks import is_odd, median, rank_in_name
from memplan.simulation.oom_message import LONGEST

_PREFIX = re.compile(r"^(?:\[default(?P<local>\d{1,6})\]:\s?)?(?:\[rank(?P<rank>\d{1,6})\]:\s?)?", re.MULTILINE)
"""Before each line: torchrun's ``--tee`` writes the local rank, torch's own traceback the rank."""
_LOG_SUFFIXES = (".log", ".txt", ".err", ".out")
_ATTEMPT = re.compile(r"attempt_(\d{1,6})")
_OTHERS = 256 << 20
"""Excess over the median of other processes' bytes on a rank's GPU to mention: about a CUDA context."""


@dataclass(frozen=True, slots=True)
class RankReason:
    """Why a rank ran out of memory; bytes."""

    rank: int
    source: str
    """The file of its log; "" for a text."""
    why: Why | None
    """None if its log has no message about memory."""
    beyond: SignedInt
    """Difference of the allocated bytes from the median of the ranks that ran out; 0 if the message has no figure."""
    odd: bool
    """Whether the rank had allocated more than the others, or is the only rank that ran out."""
    others: int
    """Bytes of other processes on the rank's GPU."""


@dataclass(frozen=True, slots=True, repr=False)
class RankReasons(Saved, Displayed):
    """The out-of-memory errors of several ranks, the odd rank first. Sizes are bytes."""

    FORMAT: ClassVar[str] = "memplan.rank_reasons"

    rows: tuple[RankReason, ...]
    verdict: tuple[str, ...]
    """Sentences on how the odd rank differs, or that all ranks ran out alike."""

    @property
    def first(self) -> RankReason:
        """The odd rank; if there is none, the first rank."""
        return self.rows[0]

    def _check(self) -> None:
        """Raise Unreadable for a loaded file in which no rank ran out of memory."""
        if not self.rows or self.rows[0].why is None:
            raise Unreadable("has no rank that ran out of memory")


def why_ranks(errors: Mapping[int, str] | str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> RankReasons:
    """Explain why several ranks ran out of memory, from torch's message of each; the odd rank first.

    Args:
        errors: texts by rank, or files: a log of each rank, a log of all whose lines begin with their rank
            (``[rank3]: torch.OutOfMemoryError: ...``, as torch writes tracebacks), or a folder with logs, such as
            torchrun's ``--log-dir``. The rank of a file is the number in its name (``rank3.log``), or torchrun's folder
            (``3/stderr.log``).

    Raises:
        TargetError: a file cannot be read, or a folder has no logs.
        InputError: no rank has a message about memory, or a file is of no known rank.

    Example:
        >>> memplan.why_ranks({0: "no message", 1: str(error)}).verdict
        ('Rank 1 alone ran out of memory; rank 0 has no message about it.',)
    """
    if isinstance(errors, Mapping):
        return _reasons({rank: (text, "") for rank, text in errors.items()})
    return _reasons(_read([errors] if isinstance(errors, (str, os.PathLike)) else errors))


def texts_by_rank(text: str) -> dict[int, str]:
    """Return the lines of each rank in a log whose lines begin with their rank; {} without such lines.

    Example:
        >>> texts_by_rank("step 1\\n[rank1]: out of memory\\n[rank0]: out of memory")
        {1: 'out of memory', 0: 'out of memory'}
    """
    lines: dict[int, list[str]] = {}
    for line in text[-LONGEST:].splitlines():
        prefix = _PREFIX.match(line)
        number = None if prefix is None else prefix["rank"] or prefix["local"]
        if prefix is not None and number is not None:
            lines.setdefault(int(number), []).append(line[prefix.end() :])
    return {rank: "\n".join(lines_of_rank) for rank, lines_of_rank in lines.items()}


def _read(paths: Sequence[str | os.PathLike[str]]) -> dict[int, tuple[str, str]]:
    """Return rank -> (text, file); texts of several files of a rank (stdout and stderr) are joined."""
    by_rank: dict[int, tuple[str, str]] = {}
    for file in [file for path in paths for file in _files(Path(path))]:
        text = _text(file)
        parts = texts_by_rank(text)
        named = _rank_of(file)
        if named is not None:
            parts = {named: text}
        elif not parts:
            raise InputError(
                f"{file}, of no known rank", expected="the rank in the name, or before each line ([rank3]: ...)",
                do="Rename it, like rank3.log",
            )  # fmt: skip
        for rank, part in parts.items():
            before = f"{by_rank[rank][0]}\n" if rank in by_rank else ""
            by_rank[rank] = before + part, str(file)
    return by_rank


def _files(path: Path) -> list[Path]:
    """Return a file, or the logs in a folder; of torchrun's restarts, the logs of the last."""
    if not path.is_dir():
        return [path]
    logs = sorted(file for file in path.rglob("*") if file.suffix.lower() in _LOG_SUFFIXES and file.is_file())
    if not logs:
        raise TargetError(
            f"{path} has no logs", expected=f"files of {', '.join(_LOG_SUFFIXES)}", do="Check the path"
        )  # fmt: skip
    last = max(map(_attempt, logs))
    return [file for file in logs if _attempt(file) == last]


def _attempt(file: Path) -> int:
    """Return the number of torchrun's restart from the path of a log; -1 if it has none."""
    numbers = _ATTEMPT.findall(file.parent.as_posix())
    return int(numbers[-1]) if numbers else -1


def _rank_of(file: Path) -> int | None:
    """Return the rank in a file's name, else torchrun's folder of the rank."""
    named = rank_in_name(file)
    folder = file.parent.name
    if named is None and folder.isdecimal() and len(folder) < 7:  # a longer number is no rank, but a date, say
        return int(folder)
    return named


def _text(file: Path) -> str:
    """Return the text of a log; raise TargetError if it cannot be read."""
    try:
        return read_text(file)
    except (OSError, Unreadable) as error:
        raise TargetError(
            f"{file} cannot be read ({getattr(error, 'strerror', None) or error})", expected="a rank's log",
            do="Check the path",
        ) from None  # fmt: skip


def _reasons(texts: Mapping[int, tuple[str, str]]) -> RankReasons:
    """Compare the ranks whose text has an out-of-memory message. ``texts``: rank -> (text, source)."""
    reasons = {rank: _why(text) for rank, (text, _) in texts.items()}
    failed = {rank: reason for rank, reason in reasons.items() if reason is not None}
    if not failed:
        raise InputError(
            f"no message about memory of {ranks_text(sorted(texts))}" if texts else "no texts",
            expected='what torch says: "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total ..."',
            do="Name the files that have the tracebacks",
        )
    sizes = {rank: reason.message.allocated for rank, reason in failed.items()}
    known = [size for size in sizes.values() if size is not None]
    usual = median(known) if known else 0
    alone = len(failed) == 1 < len(texts)
    rows: list[RankReason] = []
    for rank, (_, source) in texts.items():
        reason, size = reasons[rank], sizes.get(rank)
        others = 0 if reason is None else sum(held for _, held in memory_by_process(reason.message)[1])
        odd = reason is not None and (alone or (size is not None and is_odd(size, usual)))
        rows.append(RankReason(rank, source, reason, 0 if size is None else size - usual, odd, others))
    crowded = _crowded(rows)
    # first those that ran out of memory: odd ranks, then those beside other processes, then by their bytes
    rows.sort(key=lambda row: (row.why is None, not row.odd, row.rank not in crowded, -row.beyond, row.rank))
    return RankReasons(tuple(rows), tuple(_verdict(rows, crowded)))


def _why(text: str) -> Why | None:
    """Explain the out-of-memory message in a text; None if it has none."""
    try:
        return why(text)
    except InputError:
        return None


def _crowded(rows: Sequence[RankReason]) -> set[int]:
    """Return the ranks on whose GPUs other processes have more memory than the median."""
    failed = [row for row in rows if row.why is not None]
    usual = median([row.others for row in failed])
    return {row.rank for row in failed if len(failed) > 1 and row.others - usual >= _OTHERS}


def _verdict(rows: Sequence[RankReason], crowded: set[int]) -> Iterator[str]:
    """Yield sentences on the odd ranks, and on GPUs that several ranks share."""
    failed, survived = [row for row in rows if row.why is not None], [row.rank for row in rows if row.why is None]
    ranks = ranks_text(sorted(row.rank for row in failed))
    if survived:
        have = "has" if len(survived) == 1 else "have"
        alone = " alone" if len(failed) == 1 else ""
        rest = f"{ranks_text(sorted(survived))} {have} no message about it"
        yield f"{ranks.capitalize()}{alone} ran out of memory; {rest}."
    for row in failed:
        if row.odd and row.beyond > 0:
            yield f"Rank {row.rank} had allocated {shown(row.beyond)} more than the others that ran out."
        if row.rank in crowded:
            yield (
                f"On the GPU of rank {row.rank} other processes held {shown(row.others)}, more than on the others': "
                "ranks put tensors on it that do not choose their own GPU (torch.cuda.set_device), or that load a file "
                "by torch.load without map_location."
            )
    shared = _on_one_gpu(failed)
    if shared:
        gpu = next(row.why.message.gpu for row in failed if row.why is not None and row.rank in shared)
        yield (
            f"{ranks_text(shared).capitalize()} were all on GPU {gpu}, each beside the others' processes: let each "
            "choose its own, torch.cuda.set_device(int(os.environ['LOCAL_RANK']))."
        )
    if not survived and not crowded and not shared and not any(row.odd for row in failed):
        yield f"{ranks.capitalize()} ran out of memory alike: the step is too large for each."


def _on_one_gpu(failed: Sequence[RankReason]) -> list[int]:
    """Return the ranks that name the same GPU, on which each saw at least as many other processes."""
    by_gpu: dict[int, list[int]] = {}
    for row in failed:
        if row.why is not None and row.why.message.gpu is not None:
            by_gpu.setdefault(row.why.message.gpu, []).append(row.rank)
    processes = {row.rank: len(memory_by_process(row.why.message)[1]) for row in failed if row.why is not None}
    for ranks in by_gpu.values():
        if len(ranks) > 1 and all(processes[rank] >= len(ranks) - 1 for rank in ranks):
            return sorted(ranks)
    return []
