"""What a recorded program asked of the allocator: the requests among the events of a snapshot."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from memplan.simulation.replays.initial_state import Start
from memplan.simulation.snapshots.read import Entry, Snapshot
from memplan.simulation.timeline import DEFAULT_POOL, Pool, Segment

Kind = Literal["alloc", "free", "free_later", "complete", "empty_cache", "oom"]
GIVES = ("segment_free", "segment_unmap")
"""Memory goes back to the card."""


class Request(NamedTuple):
    """One request. ``owner`` names the block: the index of its alloc, or the owner that it has at the start."""

    kind: Kind
    event: int
    owner: int = -1
    size: int = 0
    stream: int = 0
    pool: Pool = DEFAULT_POOL


def requests_of(snapshot: Snapshot, start: Start) -> list[Request | None]:
    """Return for each event of a snapshot the request that it is; None where it is no request of the program's.

    A block is given back to be free "later" where it was still in use on another stream. Memory that went back to the
    card is a request (`torch.cuda.empty_cache`) unless the allocator gave it back itself to serve another one.
    """
    return _Requests(snapshot, start).found()


class _Requests:
    def __init__(self, snapshot: Snapshot, start: Start) -> None:
        self.snapshot = snapshot
        self.pools = _PrivatePools(snapshot, start)
        blocks = [block for segment in start.segments for block in segment.blocks if block.owner is not None]
        self.live = {block.address: block.owner or 0 for block in blocks}
        self.waiting = {block.address for block in blocks if block.state == "active_pending_free"}
        """Addresses of blocks that were given back and are still in use on another stream."""

    def found(self) -> list[Request | None]:
        entries = self.snapshot.entries
        return [self._request(index, entry, entries) for index, entry in enumerate(entries)]

    def _request(self, index: int, entry: Entry, entries: Sequence[Entry]) -> Request | None:
        action, address = entry.action, entry.address
        if action == "alloc":
            self.live[address] = index
            return Request("alloc", index, index, entry.size, entry.stream, self.pools.of(entry))
        if action == "free_requested":
            owner = self.live.get(address)
            if owner is None or address in self.waiting:
                return None
            following = entries[index + 1][:2] if index + 1 < len(entries) else None
            if following == ("free_completed", address):
                del self.live[address]
                return Request("free", index, owner)
            self.waiting.add(address)
            return Request("free_later", index, owner)
        if action == "free_completed":
            if address not in self.waiting:
                return None
            self.waiting.remove(address)
            return Request("complete", index, self.live.pop(address))
        if action == "oom":
            return Request("oom", index, size=entry.size, stream=entry.stream, pool=self.pools.of(entry))
        self.pools.follow(index, entry)
        first_given = action in GIVES and (not index or entries[index - 1].action not in GIVES)
        return Request("empty_cache", index) if first_given and _asked(self.snapshot, index) else None


def _asked(snapshot: Snapshot, index: int) -> bool:
    """Return whether the memory given back from an event on was asked to be, and not the allocator's own way out.

    An allocator that has run out gives back in the middle of a request, from the same stack. Where no stacks were
    recorded, only an out-of-memory that follows at once shows that; everything else counts as asked for.
    """
    entries, stacks = snapshot.entries, snapshot.stacks
    stack = entries[index].stack
    after = index
    while after < len(entries) and entries[after].action in GIVES:
        after += 1
    if after == len(entries):
        return True
    if any(frame.name == "empty_cache" for frame in stacks[stack]):
        return True
    following = entries[after]
    if following.action == "oom":
        return False
    return not (stack and stack == following.stack and following.action in ("segment_alloc", "segment_map"))


class _PrivatePools:
    """The pool that a request was for: as recorded, else that of the segment its block lies in.

    Of a segment that is gone by the end nothing tells the pool, in the versions of torch that do not write it.
    """

    def __init__(self, snapshot: Snapshot, start: Start) -> None:
        self.ends: dict[int, tuple[int, Pool]] = {}
        self.starts: list[int] = []
        private = [segment for segment in (*start.segments, *snapshot.segments) if segment.pool != DEFAULT_POOL]
        for segment in _stretches([segment for segment in private if segment.expandable]):
            self._add(segment.address, segment.size, segment.pool)
        for segment in start.segments:
            if segment.pool != DEFAULT_POOL and not segment.expandable:
                self._add(segment.address, segment.size, segment.pool)
        self.to_come: dict[int, Segment] = {}
        """Index of a segment_alloc -> the private segment that is there at the end."""
        final = {segment.address: segment for segment in private if not segment.expandable}
        if final:
            taken = [(index, entry) for index, entry in enumerate(snapshot.entries) if entry.action == "segment_alloc"]
            last = {entry.address: index for index, entry in taken}
            self.to_come = {last[address]: segment for address, segment in final.items() if address in last}

    def of(self, entry: Entry) -> Pool:
        if entry.pool is not None:
            return entry.pool
        at = bisect_right(self.starts, entry.address) if entry.action != "oom" else 0
        if at:
            end, pool = self.ends[self.starts[at - 1]]
            if entry.address < end:
                return pool
        return DEFAULT_POOL

    def follow(self, index: int, entry: Entry) -> None:
        """Note that a segment comes or goes."""
        if index in self.to_come:
            self._add(entry.address, entry.size, self.to_come[index].pool)
        elif entry.action == "segment_free" and entry.address in self.ends:
            del self.ends[entry.address]
            del self.starts[bisect_left(self.starts, entry.address)]

    def _add(self, address: int, size: int, pool: Pool) -> None:
        if address not in self.ends:
            insort(self.starts, address)
        self.ends[address] = address + size, pool


def _stretches(segments: Sequence[Segment]) -> list[Segment]:
    """Expandable segments, and the addresses between two of a kind, as one: no other kind ever lies there."""
    found: list[Segment] = []
    for segment in sorted(segments, key=lambda one: one.address):
        last = found[-1] if found else None
        if last is not None and (last.pool, last.stream, last.small) == (segment.pool, segment.stream, segment.small):
            end = max(last.address + last.size, segment.address + segment.size)
            found[-1] = replace(last, size=end - last.address)
        else:
            found.append(segment)
    return found
