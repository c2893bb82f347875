"""Compare the watches of several ranks of a training, from the file that each rank writes."""

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
"""``running``: or killed, if the process has ended. ``failed``: ended with an error other than out of memory."""
_ORDER: tuple[State, ...] = ("out of memory", "running", "failed", "over")
"""Order of the rows. When a rank dies, collective operations fail on the others."""
_FILE = re.compile(r"rank\d{1,6}\.json")


@dataclass(frozen=True, slots=True)
class Owner(Printed):
    """The line, layer and cause of tensors live at the peak of a rank's last observed step."""

    where: str | None
    layer: str
    cause: str

    def __str__(self) -> str:
        location = (f" of {self.layer}" if self.layer else "") + (f" at {self.where}" if self.where else "")
        return LABELS.get(self.cause, self.cause) + location


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of an owner."""

    owner: Owner
    bytes: int


@dataclass(frozen=True, slots=True)
class RankWatch(Saved, Printed):
    """Results so far of a rank's watch: the content of ``rank3.json``. Sizes are bytes."""

    FORMAT: ClassVar[str] = "memplan.rank_watch"
    AGAIN: ClassVar[str] = "Watch the training again"

    rank: int
    world: int
    device: str
    state: State
    steps: int
    peak: int | None
    """Highest measured peak so far."""
    predicted: int | None
    """Simulated peak of the last observed step."""
    held: tuple[Held, ...]
    """Bytes live at that step's peak by owner, the largest first."""
    leaks: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    error: str = ""
    """First line of the error that ended the watch."""
    post_mortem: str | None = None

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world}, {counted(self.steps, 'step')}, {self.state}"


@dataclass(frozen=True, slots=True)
class OwnerBeyond:
    """Bytes of an owner on a rank, and by how many they exceed the median of all ranks."""

    owner: Owner
    bytes: int
    beyond: SignedInt


@dataclass(frozen=True, slots=True)
class WatchedRank:
    """A rank compared with the others."""

    watch: RankWatch
    source: str
    peak: int
    """Measured or predicted, as `WatchedRanks.measured` says."""
    beyond: SignedInt
    """Difference of ``peak`` from the median of all ranks."""
    odd: bool
    """Whether the peak is much above the median."""
    owners: tuple[OwnerBeyond, ...]
    """Owners whose bytes differ from the median, the largest difference first."""


@dataclass(frozen=True, slots=True, repr=False)
class WatchedRanks(Saved, Displayed):
    """The watches of several ranks, ordered by how they ended, then by peak. Sizes are bytes."""

    FORMAT: ClassVar[str] = "memplan.watched_ranks"
    AGAIN: ClassVar[str] = "Read the ranks' files again"

    world: int
    measured: bool
    """Whether the peaks are measured; on the CPU, and if a rank has no measured peak, they are predicted."""
    median: int
    rows: tuple[WatchedRank, ...]
    notes: tuple[str, ...] = ()

    @property
    def odd(self) -> tuple[WatchedRank, ...]:
        """Ranks whose peak is much above the median."""
        return tuple(row for row in self.rows if row.odd)

    @property
    def ended_badly(self) -> tuple[WatchedRank, ...]:
        """Ranks whose training did not end normally: out of memory, failed, or killed."""
        return tuple(row for row in self.rows if row.watch.state != "over")

    def _check(self) -> None:
        """Raise Unreadable for a loaded file without ranks."""
        if not self.rows:
            raise Unreadable("has no ranks")


def name_of(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank{rank}.json"


def files_in(folder: Path) -> list[Path]:
    """Return the files ``rank0.json``, ``rank1.json``, ... of a folder, in the order of their ranks."""
    files = (path for path in folder.iterdir() if _FILE.fullmatch(path.name))
    return sorted(files, key=lambda path: int(path.stem.removeprefix("rank")))


def watched_ranks(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> WatchedRanks:
    """Put the watches of several ranks side by side, from the files that they wrote.

    Args:
        paths: the ``folder`` of `memplan.watch`, or files in it.

    Raises:
        TargetError: the folder has no such file, or a file cannot be read.
        FormatError: a file has another format.
        InputError: two files are of the same rank, or of trainings with different numbers of ranks.

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
    by_rank: dict[int, tuple[Path, RankWatch]] = {}
    for file in files:
        watch = _loaded(file)
        if watch.rank in by_rank:
            raise InputError(
                f"{by_rank[watch.rank][0]} and {file} are both of rank {watch.rank}",
                expected="one file for each rank", do="Leave one out",
            )  # fmt: skip
        by_rank[watch.rank] = file, watch
    worlds = sorted({watch.world for _, watch in by_rank.values()})
    if len(worlds) > 1:
        raise InputError(
            f"files of trainings with {worlds[0]} and {worlds[1]} ranks", expected="those of one training",
            do="Remove those of the earlier training",
        )  # fmt: skip
    return _compare(by_rank, worlds[0])


def _loaded(file: Path) -> RankWatch:
    """Return the watch in a file. Raises TargetError, FormatError."""
    try:
        return RankWatch.load(file)
    except OSError as error:
        raise TargetError(
            f"{file} cannot be read ({error.strerror})", expected="what memplan.watch wrote", do="Check the path"
        ) from None


def _compare(by_rank: dict[int, tuple[Path, RankWatch]], world: int) -> WatchedRanks:
    """Compare the peaks and owners of all ranks with their medians."""
    watches = [watch for _, watch in by_rank.values()]
    # on the CPU torch's profiler misses what gloo's threads allocate and free: measured peaks of equal ranks differ
    on_cpu = any(watch.device == HOST for watch in watches)
    has_predictions = any(watch.predicted for watch in watches)
    measured = all(watch.peak is not None for watch in watches) and not (on_cpu and has_predictions)
    peaks = {watch.rank: (watch.peak if measured else watch.predicted) or 0 for watch in watches}
    known = [peak for peak in peaks.values() if peak]
    usual = median(known) if known else 0
    owners = beyond_median({watch.rank: _bytes_by_owner(watch.held) for watch in watches if watch.held})
    rows: list[WatchedRank] = []
    for rank, (file, watch) in by_rank.items():
        peak = peaks[rank]
        beyond = peak - usual if peak else 0
        owners_beyond = tuple(OwnerBeyond(*row) for row in owners.get(rank, ()))
        rows.append(WatchedRank(watch, str(file), peak, beyond, is_odd(peak, usual), owners_beyond))
    rows.sort(key=lambda row: (_ORDER.index(row.watch.state), -row.peak, row.watch.rank))
    return WatchedRanks(world, measured, usual, tuple(rows), tuple(_notes(by_rank, world)))


def _bytes_by_owner(held: Iterable[Held]) -> dict[Owner, int]:
    """Return the bytes of each owner at the peak."""
    sizes: dict[Owner, int] = {}
    for row in held:
        sizes[row.owner] = sizes.get(row.owner, 0) + row.bytes
    return sizes


def _notes(by_rank: dict[int, tuple[Path, RankWatch]], world: int) -> Iterable[str]:
    """Yield notes on missing files and unknown peaks, and on the post-mortems of ranks."""
    missing = sorted(set(range(min(world, 1 << 16))) - set(by_rank))  # a damaged file can claim any number of ranks
    if missing:
        listed = ", ".join(map(str, missing[:8])) + (" and more" if len(missing) > 8 else "")
        yield f"no file of {counted(len(missing), 'rank')}: {listed}"
    for _, watch in by_rank.values():
        if not watch.held:
            yield f"rank {watch.rank} ended before its third step was observed: what it held is not known"
        if watch.post_mortem is not None:
            yield f"rank {watch.rank} wrote a post-mortem: {watch.post_mortem}"


def finding(row: WatchedRank) -> str:
    """Return a sentence on a rank above the median, with the owner that exceeds its median most."""
    text = f"rank {row.watch.rank} holds {format_bytes(row.beyond)} more than the others"
    more = [owner for owner in row.owners if owner.beyond > 0]
    return f"{text}: {format_bytes(more[0].beyond)} of it are {more[0].owner}" if more else text


def ending(watch: RankWatch) -> str:
    """Return a sentence on how a rank's training ended, if not normally."""
    step = watch.steps + 1
    if watch.state == "running":
        return f"rank {watch.rank} was last seen in step {step}: it runs still, or was killed"
    error = f": {watch.error}" if watch.error else ""
    verb = "ran out of memory" if watch.state == "out of memory" else "failed"
    return f"rank {watch.rank} {verb} in step {step}{error}"


def summary(ranks: WatchedRanks) -> list[str]:
    """Return sentences on ranks that did not end normally and on ranks much above the median."""
    lines = [ending(row.watch) for row in ranks.ended_badly]
    lines += [finding(row) for row in ranks.odd]
    return lines or [f"no rank holds much more than the others: the median is {format_bytes(ranks.median)}"]
