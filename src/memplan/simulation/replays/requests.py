"""Separate a program's requests from the allocator's own actions in the events of a snapshot."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from memplan.simulation.replays.initial_state import Start
from memplan.simulation.snapshots.read import Entry, Snapshot
from memplan.simulation.timeline import DEFAULT_POOL, Pool, Segment

Kind = Literal["alloc", "free", "free_later", "complete", "empty_cache", "oom"]
SEGMENT_FREES = ("segment_free", "segment_unmap")
"""Actions that release memory to the card."""


class Request(NamedTuple):
    """A request to the allocator. ``owner`` identifies the block: the index of its alloc, or its owner in the start."""

    kind: Kind
    event: int
    """Index of the recorded event."""
    owner: int = -1
    size: int = 0
    stream: int = 0
    pool: Pool = DEFAULT_POOL


def requests_of(snapshot: Snapshot, start: Start) -> list[Request | None]:
    """Return for each event of a snapshot the program's request, or None for the allocator's own actions.

    Freeing a block that is still in use on another stream is "free_later", and "complete" once that use ends. Released
    segments are a request (`torch.cuda.empty_cache`) unless the allocator released them to serve another request.
    """
    requests = _Requests(snapshot, start)
    return [requests.request(index, entry) for index, entry in enumerate(snapshot.entries)]


class _Requests:
    """Tracks the owners of blocks over the events of a snapshot, to identify the block of each free."""

    def __init__(self, snapshot: Snapshot, start: Start) -> None:
        """``start``: the allocator's state before the snapshot's history."""
        self.snapshot = snapshot
        self.pools = _PrivatePools(snapshot, start)
        """Finds the pool of a request."""
        blocks = [block for segment in start.segments for block in segment.blocks if block.owner is not None]
        self.owners = {block.address: block.owner or 0 for block in blocks}
        """Address of each live or pending block -> its owner."""
        self.pending = {block.address for block in blocks if block.state == "active_pending_free"}
        """Addresses of blocks that were freed and are still in use on another stream."""

    def request(self, index: int, entry: Entry) -> Request | None:
        """Return the request of the next event, None for an action of the allocator; events come in order."""
        entries, action, address = self.snapshot.entries, entry.action, entry.address
        if action == "alloc":
            self.owners[address] = index
            return Request(
                "alloc", event=index, owner=index, size=entry.size, stream=entry.stream, pool=self.pools.pool_of(entry)
            )
        if action == "free_requested":
            owner = self.owners.get(address)
            if owner is None or address in self.pending:
                return None
            following = entries[index + 1] if index + 1 < len(entries) else None
            if following is not None and (following.action, following.address) == ("free_completed", address):
                del self.owners[address]
                return Request("free", index, owner)
            self.pending.add(address)
            return Request("free_later", index, owner)
        if action == "free_completed":
            if address not in self.pending:
                return None
            self.pending.remove(address)
            return Request("complete", index, self.owners.pop(address))
        if action == "oom":
            return Request("oom", index, size=entry.size, stream=entry.stream, pool=self.pools.pool_of(entry))
        self.pools.update(index, entry)
        is_first_free = action in SEGMENT_FREES and (not index or entries[index - 1].action not in SEGMENT_FREES)
        return Request("empty_cache", index) if is_first_free and _is_empty_cache(self.snapshot, index) else None


def _is_empty_cache(snapshot: Snapshot, index: int) -> bool:
    """Check whether the program released the segments from event ``index`` on, rather than the allocator itself.

    An allocator that has run out releases segments in the middle of a request, so the stack is the request's. Without
    recorded stacks only an out-of-memory event right after shows that; every other release counts as the program's.
    """
    entries, stacks = snapshot.entries, snapshot.stacks
    stack = entries[index].stack
    end = index
    while end < len(entries) and entries[end].action in SEGMENT_FREES:
        end += 1
    if end == len(entries):
        return True
    if any(frame.name == "empty_cache" for frame in stacks[stack]):
        return True
    next_event = entries[end]
    if next_event.action == "oom":
        return False
    return not (stack and stack == next_event.stack and next_event.action in ("segment_alloc", "segment_map"))


class _PrivatePools:
    """The memory pool of each request: as recorded, else that of the segment that contains the block.

    Older versions of torch do not record it, and then the default pool is assumed for segments released before the end.
    """

    def __init__(self, snapshot: Snapshot, start: Start) -> None:
        """Find the address ranges of private pools, in the states before and after the snapshot's history."""
        self.ends: dict[int, tuple[int, Pool]] = {}
        """Address of a private segment -> (end, pool)."""
        self.starts: list[int] = []
        """The sorted keys of ``ends``."""
        # ranges of addresses that belong to a private pool for the whole history
        private = [segment for segment in (*start.segments, *snapshot.segments) if segment.pool != DEFAULT_POOL]
        for segment in _merge_expandable([segment for segment in private if segment.expandable]):
            self._add(segment.address, segment.size, segment.pool)
        for segment in start.segments:
            if segment.pool != DEFAULT_POOL and not segment.expandable:
                self._add(segment.address, segment.size, segment.pool)
        self.private_segment_by_alloc: dict[int, Segment] = {}
        """Index of a segment_alloc -> the private segment, if it still exists at the end."""
        final = {segment.address: segment for segment in private if not segment.expandable}
        if final:
            last_alloc: dict[int, int] = {}  # address -> index of the last segment_alloc there
            for index, entry in enumerate(snapshot.entries):
                if entry.action == "segment_alloc":
                    last_alloc[entry.address] = index
            self.private_segment_by_alloc = {
                last_alloc[address]: segment for address, segment in final.items() if address in last_alloc
            }

    def pool_of(self, entry: Entry) -> Pool:
        """Return the memory pool of an event."""
        if entry.pool is not None:
            return entry.pool
        index = bisect_right(self.starts, entry.address) if entry.action != "oom" else 0  # which has no address
        if index:
            end, pool = self.ends[self.starts[index - 1]]
            if entry.address < end:
                return pool
        return DEFAULT_POOL

    def update(self, index: int, entry: Entry) -> None:
        """Add or remove the segment that an event allocates or releases."""
        if index in self.private_segment_by_alloc:
            self._add(entry.address, entry.size, self.private_segment_by_alloc[index].pool)
        elif entry.action == "segment_free" and entry.address in self.ends:
            del self.ends[entry.address]
            del self.starts[bisect_left(self.starts, entry.address)]

    def _add(self, address: int, size: int, pool: Pool) -> None:
        """Add a range of addresses of a private pool."""
        if address not in self.ends:
            insort(self.starts, address)
        self.ends[address] = address + size, pool


def _merge_expandable(segments: Sequence[Segment]) -> list[Segment]:
    """Merge the expandable segments of each kind that follow each other, with the addresses between them.

    They belong to one reserved range, in which no other kind ever lies.
    """
    merged: list[Segment] = []
    for segment in sorted(segments, key=lambda segment: segment.address):
        last = merged[-1] if merged else None
        if last is not None and (last.pool, last.stream, last.small) == (segment.pool, segment.stream, segment.small):
            end = max(last.address + last.size, segment.address + segment.size)
            merged[-1] = replace(last, size=end - last.address)
        else:
            merged.append(segment)
    return merged
