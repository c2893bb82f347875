"""Compare a snapshot's replay with what-ifs, for `memplan replay`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from memplan.simulation.allocator.settings import AllocatorSettings
from memplan.simulation.replays.out_of_memory import REMEDIES, OomExplanation, explain_oom
from memplan.simulation.replays.replayed import Replay
from memplan.simulation.replays.what_if import what_if
from memplan.simulation.timeline import Pool, Segment

_MANY_EVENTS = 300_000


@dataclass(frozen=True, slots=True)
class SegmentGroup:
    """The segments of a kind: the same size class, stream, pool and expandability. Bytes."""

    DERIVED: ClassVar[tuple[str, ...]] = ("free",)

    small: bool
    """Whether they serve requests of at most 1 MiB."""
    stream: int
    pool: Pool
    expandable: bool
    count: int
    """Number of segments."""
    reserved: int
    allocated: int
    largest_free: int
    """The largest free block in one of them."""

    @property
    def free(self) -> int:
        """Return the bytes outside of blocks in use."""
        return self.reserved - self.allocated


@dataclass(frozen=True, slots=True)
class Cases:
    """The replay of a recording, and its what-ifs."""

    replay: Replay
    """The snapshot as it was recorded."""
    base: Replay
    """``replay``, or its what-if on a card of the requested capacity."""
    others: tuple[Replay, ...]
    """Under other settings, with the same capacity."""
    explanation: OomExplanation | None
    """Of the last request for which the base ran out of memory."""

    @property
    def all_fit(self) -> bool | None:
        """Return whether all requests fit: under any of the other settings, or else in the base; None if unknown.

        The answer is unknown if an old recording ran out of memory without recording the card's free bytes.
        """
        if not self.others:
            return self.base.fits
        if self.base.ooms and all(other.capacity is None for other in self.others):
            return None
        return any(other.fits for other in self.others)


def cases(replay: Replay, settings: Sequence[AllocatorSettings] = (), capacity: int | None = None) -> Cases:
    """Return a snapshot's replay with its what-ifs, and an explanation if memory ran out.

    A replay of more than 300,000 events takes seconds, so then only the first of `REMEDIES` is tried.
    """
    base = replay if capacity is None else what_if(replay, settings=None, capacity=capacity)
    others = tuple(what_if(replay, changed, capacity) for changed in settings)
    tried = REMEDIES if len(replay.requests) <= _MANY_EVENTS else REMEDIES[:1]
    return Cases(replay, base, others, explain_oom(base, tried=tried) if base.ooms else None)


def group_segments(segments: Sequence[Segment]) -> list[SegmentGroup]:
    """Group segments by size class, stream, pool and expandability, the group with the most reserved bytes first."""
    groups: dict[tuple[bool, int, Pool, bool], list[Segment]] = {}
    for segment in segments:
        groups.setdefault((segment.small, segment.stream, segment.pool, segment.expandable), []).append(segment)
    rows: list[SegmentGroup] = []
    for kind, group in groups.items():
        blocks = [block for segment in group for block in segment.blocks]
        used = sum(block.size for block in blocks if block.state == "active_allocated")
        largest = max((block.size for block in blocks if block.state == "inactive"), default=0)
        rows.append(SegmentGroup(*kind, len(group), sum(segment.size for segment in group), used, largest))
    return sorted(rows, key=lambda row: -row.reserved)
