"""Compare memory snapshots of several ranks at the same step: ranks above the median, and the lines responsible."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from memplan._display import Displayed
from memplan._json import Saved, SignedInt, Unreadable
from memplan.errors import InputError, SnapshotFormatError, TargetError
from memplan.simulation.odd_ranks import beyond_median, is_odd, median, rank_in_name
from memplan.simulation.replays.out_of_memory import innermost
from memplan.simulation.replays.replay import replay
from memplan.simulation.replays.replayed import Replay
from memplan.simulation.snapshots.read import Frame

_STEP = re.compile(r"(?:iteration|iter|step)[_-]?(\d{1,9})", re.IGNORECASE)
_SUFFIXES = (".pickle", ".pkl", ".json", ".pickle.gz", ".pkl.gz", ".json.gz")
_EVENTS = 0.1
"""Numbers of events that differ by more than this share are noted."""


@dataclass(frozen=True, slots=True)
class OwnerRow:
    """A line of code and the bytes of its blocks on a rank."""

    frame: Frame | None
    """None where no stack was recorded."""
    bytes: int
    beyond: SignedInt
    """``bytes`` minus the median of all ranks."""


@dataclass(frozen=True, slots=True)
class RankRow:
    """A rank's snapshot, in bytes."""

    rank: int
    source: str
    events: int
    allocated: int
    """At the peak; without histories, in the snapshot."""
    reserved: int
    beyond: SignedInt
    """``allocated`` minus the median of all ranks."""
    odd: bool
    """Whether ``beyond`` is at least 1 MiB and 1 % of the median."""
    owners: tuple[OwnerRow, ...]
    """Lines whose bytes differ from the median, the largest ``beyond`` first."""


@dataclass(frozen=True, slots=True, repr=False)
class RankSnapshots(Saved, Displayed):
    """Snapshots of several ranks, in order of falling ``allocated``. Bytes throughout."""

    FORMAT: ClassVar[str] = "memplan.rank_snapshots"
    AGAIN: ClassVar[str] = "Compare the snapshots again"

    at_peak: bool
    """Whether all snapshots have a history and are compared at their peaks; else in the state that they record."""
    median: int
    rows: tuple[RankRow, ...]
    notes: tuple[str, ...] = ()

    @property
    def odd(self) -> tuple[RankRow, ...]:
        """Return the ranks at least 1 MiB and 1 % above the median."""
        return tuple(row for row in self.rows if row.odd)

    def _check(self) -> None:
        """Raise Unreadable for a loaded file of fewer than two ranks."""
        if len(self.rows) < 2:
            raise Unreadable("has fewer than two ranks")


def replay_ranks(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> RankSnapshots:
    """Compare memory snapshots of several ranks at the same step: which rank allocates more than the others, and where.

    Each snapshot is replayed, and the bytes of each line of code at the peak are compared with the median of all ranks.

    Args:
        paths: files of `torch.cuda.memory._dump_snapshot`, one for each rank, or a folder with them. The rank is the
            number in the file's name (``rank3_memory_snapshot.pickle``), else that of its GPU.
        progress: gets the name of each file before it is read.

    Raises:
        TargetError: a file cannot be read, or a folder has none.
        SnapshotFormatError: a file is no snapshot.
        InputError: fewer than two snapshots, two of the same rank, or names of different steps.

    Example:
        >>> memplan.replay_ranks("snapshots").odd
        ()
    """
    files = _files(paths)
    _check_steps(files)
    replays: dict[int, tuple[Path, Replay]] = {}
    for file in files:
        progress(file.name)
        try:
            replayed = replay(file)
        except SnapshotFormatError as error:
            raise error.about(file.name) if file.name not in error.found else error from None
        named_rank = rank_in_name(file)
        rank = replayed.snapshot.gpu if named_rank is None else named_rank
        if rank in replays:
            other = replays[rank][0]
            by = "" if named_rank is not None else " (of their GPUs, as the names have no rank)"
            raise InputError(
                f"{other} and {file} are both of rank {rank}{by}", expected="one snapshot for each rank",
                do="Leave one out, or write the ranks in the names: rank0.pickle",
            )  # fmt: skip
        replays[rank] = file, replayed
    at_peak = all(replayed.has_history for _, replayed in replays.values())
    by_line = {rank: _bytes_by_line(replayed, at_peak=at_peak) for rank, (_, replayed) in replays.items()}
    allocated = {rank: _allocated(replayed, at_peak=at_peak) for rank, (_, replayed) in replays.items()}
    owners, usual = beyond_median(by_line), median(list(allocated.values()))
    rows = [
        RankRow(
            rank=rank, source=str(file), events=len(replayed.snapshot.entries), allocated=allocated[rank],
            reserved=_reserved(replayed, at_peak=at_peak), beyond=allocated[rank] - usual,
            odd=is_odd(allocated[rank], usual), owners=tuple(OwnerRow(*row) for row in owners[rank]),
        )
        for rank, (file, replayed) in replays.items()
    ]  # fmt: skip
    rows.sort(key=lambda row: (-row.allocated, row.rank))
    return RankSnapshots(at_peak, usual, tuple(rows), tuple(_notes(rows, replays)))


def _files(paths: Any) -> list[Path]:
    """Return the snapshot files of a path or several; a folder stands for its files with a suffix of `_SUFFIXES`."""
    files: list[Path] = []
    for path in map(Path, [paths] if isinstance(paths, (str, os.PathLike)) else paths):
        if not path.is_dir():
            files.append(path)
            continue
        inside = sorted(file for file in path.iterdir() if file.name.lower().endswith(_SUFFIXES))
        if not inside:
            raise TargetError(
                f"{path} has no snapshot", expected=f"files of {', '.join(_SUFFIXES[:3])}", do="Check the path"
            )
        files += inside
    if len(files) < 2:
        raise InputError(
            f"{len(files)} snapshot{'s' * (len(files) != 1)}", expected="those of at least two ranks",
            do="Name several files, or a folder; memplan.replay takes a single one",
        )  # fmt: skip
    return files


def _check_steps(files: Sequence[Path]) -> None:
    """Raise InputError if the names of the files, or of their folders, contain different step numbers."""
    steps: dict[int, Path] = {}
    for file in files:
        numbers = _STEP.findall(file.name) or _STEP.findall(file.parent.name)
        if numbers:
            steps.setdefault(int(numbers[-1]), file)
    if len(steps) > 1:
        (step, file), (other_step, other_file) = list(steps.items())[:2]
        raise InputError(
            f"{file} is of step {step} and {other_file} of step {other_step}, by their names",
            expected="snapshots of the same step", do="Leave out those of other steps",
        )  # fmt: skip


def _allocated(replayed: Replay, *, at_peak: bool) -> int:
    return replayed.peak_allocated if at_peak else sum(size for _, size in _live_at_end(replayed))


def _reserved(replayed: Replay, *, at_peak: bool) -> int:
    return replayed.peak_reserved if at_peak else sum(segment.size for segment in replayed.timeline.segments)


def _live_at_end(replayed: Replay) -> Iterator[tuple[int | None, int]]:
    """Yield owner and bytes of each block that is live at the end."""
    for segment in replayed.timeline.segments:
        for block in segment.blocks:
            if block.state == "active_allocated":
                yield block.owner, block.size


def _bytes_by_line(replayed: Replay, *, at_peak: bool) -> dict[Frame | None, int]:
    """Return the bytes of live blocks by the line that allocated them, at the peak or at the end."""
    sizes: dict[Frame | None, int] = {}
    for owner, size in _live_at_peak(replayed) if at_peak else _live_at_end(replayed):
        frame = innermost(replayed.stack_of(owner))
        sizes[frame] = sizes.get(frame, 0) + size
    return sizes


def _live_at_peak(replayed: Replay) -> Iterator[tuple[int | None, int]]:
    """Yield owner and requested bytes of the blocks that are allocated at the peak: the blocks at the end, with the
    events after the peak undone."""
    timeline = replayed.timeline
    live: dict[int, tuple[int | None, int]] = {}  # address -> (owner, requested bytes)
    for segment in timeline.segments:
        for block in segment.blocks:
            if block.state == "active_allocated":
                live[block.address] = block.owner, block.requested
    for event in reversed(timeline.log):
        if event.tick <= timeline.peak_tick:
            break
        if event.action == "alloc":
            live.pop(event.address, None)
        elif event.action == "free_requested":
            live[event.address] = event.owner, event.size
    yield from live.values()


def _notes(rows: Sequence[RankRow], replays: dict[int, tuple[Path, Replay]]) -> Iterator[str]:
    """Yield notes on differences between the snapshots that make the comparison less certain."""
    most, least = max(rows, key=lambda row: row.events), min(rows, key=lambda row: row.events)
    if most.events - least.events > _EVENTS * most.events:
        yield (
            f"rank {most.rank} has {most.events:,} events and rank {least.rank} {least.events:,}: are they of the same "
            "step?"
        )
    inexact = sorted(rank for rank, (_, replayed) in replays.items() if replayed.mismatches)
    if inexact:
        yield f"replayed with differences from the recording: rank {', '.join(map(str, inexact))}"
    if len({replayed.snapshot.settings for _, replayed in replays.values()}) > 1:
        yield "the allocators' settings differ between the ranks"
