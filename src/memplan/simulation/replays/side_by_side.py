"""A snapshot's history beside what-ifs: what `memplan replay` shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memplan.simulation.allocator.settings import AllocatorSettings
from memplan.simulation.replays.out_of_memory import REMEDIES, OomExplanation, explain_oom
from memplan.simulation.replays.replayed import Replay
from memplan.simulation.replays.what_if import what_if
from memplan.simulation.timeline import Pool, Segment

_MANY = 300_000


@dataclass(frozen=True, slots=True)
class SegmentGroup:
    """Segments of one kind. Bytes."""

    small: bool
    """Of the pool for requests of at most 1 MiB."""
    stream: int
    pool: Pool
    expandable: bool
    count: int
    reserved: int
    allocated: int
    largest_free: int

    @property
    def free(self) -> int:
        """Return what is in no block in use."""
        return self.reserved - self.allocated


@dataclass(frozen=True, slots=True)
class Cases:
    """The recorded history, and what it would have been."""

    replay: Replay
    """The snapshot as it was recorded."""
    base: Replay
    """The same, on a card of another capacity where one was asked for."""
    others: tuple[Replay, ...]
    """Under other settings, on the same card."""
    explanation: OomExplanation | None
    """Of the last request that the base could not serve."""

    @property
    def all_fit(self) -> bool | None:
        """Return whether everything is served: by one of the other settings, if any were asked for. None: nobody can
        say.

        What the card had is not known where an old recording ran out of memory without writing it down.
        """
        if not self.others:
            return self.base.fits
        if self.base.ooms and all(other.capacity is None for other in self.others):
            return None
        return any(other.fits for other in self.others)


def cases(replay: Replay, settings: Sequence[AllocatorSettings] = (), capacity: int | None = None) -> Cases:
    """Return a snapshot's replay beside others of it. Where memory ran out, it is explained.

    Of a history of more than 300,000 events, a replay takes seconds: then of all `REMEDIES` only the first is tried.

    Args:
        replay: the snapshot's own.
        settings: what to try.
        capacity: bytes that the card can give to torch; None: as in the recording.
    """
    base = replay if capacity is None else what_if(replay, None, capacity)
    others = tuple(what_if(replay, other, capacity) for other in settings)
    tried = REMEDIES if len(replay.requests) <= _MANY else REMEDIES[:1]
    return Cases(replay, base, others, explain_oom(base, tried=tried) if base.ooms else None)


def grouped(segments: Sequence[Segment]) -> list[SegmentGroup]:
    """Group segments by pool and stream, those that hold the most first."""
    found: dict[tuple[bool, int, Pool, bool], list[Segment]] = {}
    for segment in segments:
        found.setdefault((segment.small, segment.stream, segment.pool, segment.expandable), []).append(segment)
    rows: list[SegmentGroup] = []
    for kind, group in found.items():
        blocks = [block for segment in group for block in segment.blocks]
        used = sum(block.size for block in blocks if block.state == "active_allocated")
        largest = max((block.size for block in blocks if block.state == "inactive"), default=0)
        rows.append(SegmentGroup(*kind, len(group), sum(segment.size for segment in group), used, largest))
    return sorted(rows, key=lambda row: -row.reserved)
