"""Compare snapshots of several ranks at the same step: which rank holds more than the others, and what it is."""

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
    """A line of code, and the bytes that it holds more than in the median of all ranks; less if negative."""

    frame: Frame | None
    """None where no stack was recorded."""
    bytes: int
    beyond: SignedInt


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
    """``allocated`` beyond the median of all ranks."""
    odd: bool
    """Whether that is much."""
    owners: tuple[OwnerRow, ...]
    """Lines whose bytes differ from the median, those that hold the most more first."""


@dataclass(frozen=True, slots=True, repr=False)
class RankSnapshots(Saved, Displayed):
    """Snapshots of several ranks, the one that holds the most first. Bytes throughout."""

    FORMAT: ClassVar[str] = "memplan.rank_snapshots"
    AGAIN: ClassVar[str] = "Compare the snapshots again"

    at_peak: bool
    """Whether all have a history, so that they are compared at their peaks; else as they were when they were taken."""
    median: int
    rows: tuple[RankRow, ...]
    notes: tuple[str, ...] = ()

    @property
    def odd(self) -> tuple[RankRow, ...]:
        """Return the ranks that hold much more than the median."""
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
    """Compare snapshots that several ranks took of the same step, and say which rank holds more than the others.

    Each is replayed, and the lines that hold its memory at the peak are compared with the median of all ranks.

    Args:
        paths: files of `torch.cuda.memory._dump_snapshot`, one for each rank, or a folder with them. The rank is the
            number in the file's name (``rank3_memory_snapshot.pickle``), else that of its GPU.
        progress: gets the name of each file before it is read.

    Raises:
        TargetError: a file cannot be read, or a folder has none.
        SnapshotFormatError: a file is no snapshot.
        InputError: fewer than two, two of the same rank, or of different steps by their names.

    Example:
        >>> memplan.replay_ranks("snapshots").odd
        ()
    """
    files = _files(paths)
    _check_steps(files)
    found: dict[int, tuple[Path, Replay]] = {}
    for file in files:
        progress(file.name)
        try:
            replayed = replay(file)
        except SnapshotFormatError as error:
            raise error.about(file.name) if file.name not in error.found else error from None
        rank = _rank_of(file, replayed)
        if rank in found:
            other = found[rank][0]
            by = "" if rank_in_name(file) is not None else " (of their GPUs, as the names have no rank)"
            raise InputError(
                f"{other} and {file} are both of rank {rank}{by}", expected="one snapshot for each rank",
                do="Leave one out, or write the ranks in the names: rank0.pickle",
            )  # fmt: skip
        found[rank] = file, replayed
    at_peak = all(replayed.has_history for _, replayed in found.values())
    held = {rank: _held(replayed, at_peak=at_peak) for rank, (_, replayed) in found.items()}
    allocated = {rank: _allocated(replayed, at_peak=at_peak) for rank, (_, replayed) in found.items()}
    owners, usual = beyond_median(held), median(list(allocated.values()))
    rows = [
        RankRow(
            rank, str(file), len(replayed.snapshot.entries), allocated[rank], _reserved(replayed, at_peak=at_peak),
            allocated[rank] - usual, is_odd(allocated[rank], usual), tuple(OwnerRow(*row) for row in owners[rank]),
        )
        for rank, (file, replayed) in found.items()
    ]  # fmt: skip
    rows.sort(key=lambda row: (-row.allocated, row.rank))
    return RankSnapshots(at_peak, usual, tuple(rows), tuple(_notes(rows, found)))


def _files(paths: Any) -> list[Path]:
    """Return the files that are named, those of a folder by their endings."""
    named = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    files: list[Path] = []
    for path in map(Path, named):
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
    """Raise InputError where names of files or of their folders say that they are of different steps."""
    steps: dict[int, Path] = {}
    for file in files:
        numbers = _STEP.findall(file.name) or _STEP.findall(file.parent.name)
        if numbers:
            steps.setdefault(int(numbers[-1]), file)
    if len(steps) > 1:
        (first, one), (second, other) = list(steps.items())[:2]
        raise InputError(
            f"{one} is of step {first} and {other} of step {second}, by their names",
            expected="snapshots of the same step", do="Leave out those of other steps",
        )  # fmt: skip


def _rank_of(file: Path, replayed: Replay) -> int:
    named = rank_in_name(file)
    return replayed.snapshot.gpu if named is None else named


def _allocated(replayed: Replay, *, at_peak: bool) -> int:
    return replayed.peak_allocated if at_peak else sum(size for _, size in _live(replayed))


def _reserved(replayed: Replay, *, at_peak: bool) -> int:
    return replayed.peak_reserved if at_peak else sum(segment.size for segment in replayed.timeline.segments)


def _live(replayed: Replay) -> Iterator[tuple[int | None, int]]:
    """Yield owner and bytes of the blocks that are allocated at the end."""
    for segment in replayed.timeline.segments:
        for block in segment.blocks:
            if block.state == "active_allocated":
                yield block.owner, block.size


def _held(replayed: Replay, *, at_peak: bool) -> dict[Frame | None, int]:
    """Return the bytes that each line holds."""
    live = [(owner, size) for owner, size in _live_at_peak(replayed)] if at_peak else list(_live(replayed))
    held: dict[Frame | None, int] = {}
    for owner, size in live:
        frame = innermost(replayed.stack_of(owner))
        held[frame] = held.get(frame, 0) + size
    return held


def _live_at_peak(replayed: Replay) -> Iterator[tuple[int | None, int]]:
    """Yield owner and requested bytes of the blocks that are allocated at the peak: those at the end, with what
    happened since then undone."""
    timeline = replayed.timeline
    blocks = (block for segment in timeline.segments for block in segment.blocks if block.state == "active_allocated")
    live: dict[int, tuple[int | None, int]] = {block.address: (block.owner, block.requested) for block in blocks}
    for event in reversed(timeline.log):
        if event.tick <= timeline.peak_tick:
            break
        if event.action == "alloc":
            live.pop(event.address, None)
        elif event.action == "free_requested":
            live[event.address] = event.owner, event.size
    yield from live.values()


def _notes(rows: Sequence[RankRow], found: dict[int, tuple[Path, Replay]]) -> Iterator[str]:
    """Yield what makes the comparison less sure."""
    most, least = max(rows, key=lambda row: row.events), min(rows, key=lambda row: row.events)
    if most.events - least.events > _EVENTS * most.events:
        yield (
            f"rank {most.rank} has {most.events:,} events and rank {least.rank} {least.events:,}: are they of the same "
            "step?"
        )
    inexact = sorted(rank for rank, (_, replayed) in found.items() if replayed.mismatches)
    if inexact:
        yield f"replayed with differences from the recording: rank {', '.join(map(str, inexact))}"
    devices = {replayed.snapshot.settings for _, replayed in found.values()}
    if len(devices) > 1:
        yield "the allocators' settings differ between the ranks"
