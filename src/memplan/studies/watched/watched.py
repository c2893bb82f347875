"""The watches of several ranks of one training, from the file that each rank writes: which holds more, which died."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from memplan._bytes import format_bytes
from memplan._display import Displayed, Printed
from memplan._json import Saved, SignedInt, Unreadable
from memplan._text import counted
from memplan.errors import InputError, TargetError
from memplan.explanation.model import LABELS
from memplan.simulation.odd_ranks import beyond_median, is_odd, median
from memplan.trace.records import HOST

State = Literal["running", "over", "out of memory", "failed"]
"""``running``: of a process that has ended, it was killed. ``failed``: the watch ended with another error."""
_ORDER: tuple[State, ...] = ("out of memory", "running", "failed", "over")
"""Where a rank dies, the others fail, as their collective operations do."""
_FILE = re.compile(r"rank\d{1,6}\.json")


@dataclass(frozen=True, slots=True)
class Owner(Printed):
    """What a rank holds at the peak of its last observed step: tensors of one line, layer and cause."""

    where: str | None
    layer: str
    cause: str

    def __str__(self) -> str:
        place = (f" of {self.layer}" if self.layer else "") + (f" at {self.where}" if self.where else "")
        return LABELS.get(self.cause, self.cause) + place


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of an owner."""

    owner: Owner
    bytes: int


@dataclass(frozen=True, slots=True)
class RankWatch(Saved, Printed):
    """What a rank's watch has seen so far; the content of ``rank3.json``. Bytes throughout."""

    FORMAT: ClassVar[str] = "memplan.rank_watch"
    AGAIN: ClassVar[str] = "Watch the training again"

    rank: int
    world: int
    device: str
    state: State
    steps: int
    peak: int | None
    """The highest measured so far."""
    predicted: int | None
    """The peak of the last observed step, as simulated from its ops."""
    held: tuple[Held, ...]
    """At that step's peak, the largest first."""
    leaks: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    error: str = ""
    """The first line of the error that ended the watch."""
    post_mortem: str | None = None

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world}, {counted(self.steps, 'step')}, {self.state}"


@dataclass(frozen=True, slots=True)
class OwnerBeyond:
    """Bytes of an owner on a rank, and how many more than in the median of all ranks."""

    owner: Owner
    bytes: int
    beyond: SignedInt


@dataclass(frozen=True, slots=True)
class WatchedRank:
    """A rank beside the others."""

    watch: RankWatch
    source: str
    peak: int
    """As `WatchedRanks.measured` says."""
    beyond: SignedInt
    """``peak`` beyond the median of all ranks."""
    odd: bool
    owners: tuple[OwnerBeyond, ...]
    """What it holds otherwise than the median, the most beyond it first."""


@dataclass(frozen=True, slots=True, repr=False)
class WatchedRanks(Saved, Displayed):
    """The watches of several ranks: those that ended badly first, then by their peaks. Bytes throughout."""

    FORMAT: ClassVar[str] = "memplan.watched_ranks"
    AGAIN: ClassVar[str] = "Read the ranks' files again"

    world: int
    measured: bool
    """Whether the peaks are measured ones; else predicted from observed steps: on the CPU, or where a rank has none."""
    median: int
    rows: tuple[WatchedRank, ...]
    notes: tuple[str, ...] = ()

    @property
    def odd(self) -> tuple[WatchedRank, ...]:
        """Return the ranks that hold much more than the median."""
        return tuple(row for row in self.rows if row.odd)

    @property
    def ended_badly(self) -> tuple[WatchedRank, ...]:
        """Return the ranks that are not over: out of memory, failed, or running when they were last written."""
        return tuple(row for row in self.rows if row.watch.state != "over")

    def _check(self) -> None:
        """Raise Unreadable for a loaded file without ranks."""
        if not self.rows:
            raise Unreadable("has no ranks")


def name_of(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank{rank}.json"


def files_in(folder: Path) -> list[Path]:
    """Return the files of ranks in a folder, in the order of their ranks."""
    found = [path for path in folder.iterdir() if _FILE.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.stem.removeprefix("rank")))


def watched_ranks(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> WatchedRanks:
    """Put the watches of several ranks side by side, from the files that they wrote.

    Args:
        paths: the folder that was given to `memplan.watch`, or files in it.

    Raises:
        TargetError: a folder without such a file, or a file that cannot be read.
        FormatError: a file of something else.
        InputError: two files of the same rank, or of trainings with different numbers of ranks.

    Example:
        >>> with memplan.watch(model, optimizer, folder="watched"):  # on each rank
        ...     train(model, optimizer)
        >>> [row.watch.rank for row in memplan.watched_ranks("watched").odd]  # hold more than the others
        []
    """
    named = [Path(paths)] if isinstance(paths, (str, os.PathLike)) else [Path(path) for path in paths]
    files = [file for path in named for file in (files_in(path) if path.is_dir() else [path])]
    if not files:
        raise TargetError(
            f"{', '.join(map(str, named))} has no file of a rank", expected=f"{name_of(0)} and the others",
            do="Name the folder that memplan.watch got",
        )  # fmt: skip
    found: dict[int, tuple[Path, RankWatch]] = {}
    for file in files:
        watch = _loaded(file)
        if watch.rank in found:
            raise InputError(
                f"{found[watch.rank][0]} and {file} are both of rank {watch.rank}",
                expected="one file for each rank", do="Leave one out",
            )  # fmt: skip
        found[watch.rank] = file, watch
    worlds = sorted({watch.world for _, watch in found.values()})
    if len(worlds) > 1:
        raise InputError(
            f"files of trainings with {worlds[0]} and {worlds[1]} ranks", expected="those of one training",
            do="Remove those of the earlier training",
        )  # fmt: skip
    return _side_by_side(found, worlds[0])


def _loaded(file: Path) -> RankWatch:
    try:
        return RankWatch.load(file)
    except OSError as error:
        raise TargetError(
            f"{file} cannot be read ({error.strerror})", expected="what memplan.watch wrote", do="Check the path"
        ) from None


def _side_by_side(found: dict[int, tuple[Path, RankWatch]], world: int) -> WatchedRanks:
    watches = [watch for _, watch in found.values()]
    # on the CPU torch's profiler misses what gloo's threads allocate and free: measured peaks of equal ranks differ
    on_cpu = any(watch.device == HOST for watch in watches)
    measured = all(watch.peak is not None for watch in watches) and not (on_cpu and any(w.predicted for w in watches))
    peaks = {watch.rank: (watch.peak if measured else watch.predicted) or 0 for watch in watches}
    known = [peak for peak in peaks.values() if peak]
    usual = median(known) if known else 0
    owners = beyond_median({watch.rank: _summed(watch.held) for watch in watches if watch.held})
    rows = [
        WatchedRank(
            watch, str(file), peaks[rank], peaks[rank] - usual if peaks[rank] else 0, is_odd(peaks[rank], usual),
            tuple(OwnerBeyond(*row) for row in owners.get(rank, ())),
        )
        for rank, (file, watch) in found.items()
    ]  # fmt: skip
    rows.sort(key=lambda row: (_ORDER.index(row.watch.state), -row.peak, row.watch.rank))
    return WatchedRanks(world, measured, usual, tuple(rows), tuple(_notes(found, world)))


def _summed(held: Iterable[Held]) -> dict[Owner, int]:
    sizes: dict[Owner, int] = {}
    for row in held:
        sizes[row.owner] = sizes.get(row.owner, 0) + row.bytes
    return sizes


def _notes(found: dict[int, tuple[Path, RankWatch]], world: int) -> Iterable[str]:
    """Yield what makes the comparison less sure."""
    missing = sorted(set(range(min(world, 1 << 16))) - set(found))
    if missing:
        listed = ", ".join(map(str, missing[:8])) + (" and more" if len(missing) > 8 else "")
        yield f"no file of {counted(len(missing), 'rank')}: {listed}"
    for _, watch in found.values():
        if not watch.held:
            yield f"rank {watch.rank} ended before its third step was observed: what it held is not known"
        if watch.post_mortem is not None:
            yield f"rank {watch.rank} wrote a post-mortem: {watch.post_mortem}"


def finding(row: WatchedRank) -> str:
    """Return a sentence on a rank that holds more than the others, with what makes the most of it."""
    text = f"rank {row.watch.rank} holds {format_bytes(row.beyond)} more than the others"
    more = [owner for owner in row.owners if owner.beyond > 0]
    return f"{text}: {format_bytes(more[0].beyond)} of it are {more[0].owner}" if more else text


def ending(watch: RankWatch) -> str:
    """Return a sentence on how a rank's training ended that is not over."""
    step = watch.steps + 1
    if watch.state == "running":
        return f"rank {watch.rank} was last seen in step {step}: it runs still, or was killed"
    error = f": {watch.error}" if watch.error else ""
    verb = "ran out of memory" if watch.state == "out of memory" else "failed"
    return f"rank {watch.rank} {verb} in step {step}{error}"


def summary(ranks: WatchedRanks) -> list[str]:
    """Return the sentences on ranks that ended badly and on those that hold more than the others."""
    lines = [ending(row.watch) for row in ranks.ended_badly]
    lines += [finding(row) for row in ranks.odd]
    return lines or [f"no rank holds much more than the others: the median is {format_bytes(ranks.median)}"]
