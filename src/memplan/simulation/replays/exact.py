"""Replay a snapshot's events through the simulated caching allocator and compare each address with the recorded one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from memplan._bytes import ALLOCATOR_BLOCK
from memplan._display import Printed
from memplan.errors import UsageError
from memplan.simulation.allocator.allocator import OutOfMemory
from memplan.simulation.allocator.rounding import LARGEST_SMALL, block_size
from memplan.simulation.peaks import Level
from memplan.simulation.replays.initial_state import Start
from memplan.simulation.replays.requests import SEGMENT_FREES, Request
from memplan.simulation.snapshots.read import Entry, Snapshot
from memplan.simulation.timeline import Action, AllocatorEvent, Block, Pool, Segment

_SEGMENT_ALLOCS = ("segment_alloc", "segment_map")
_UNRECORDED_ADDRESS = 1 << 56
"""Where segments are placed that torch did not allocate: above every address of a card."""
OTHER_STREAM = -1
"""Stands for the other streams that used a block, which are not recorded."""


@dataclass(frozen=True, slots=True)
class Mismatch(Printed):
    """A difference between a recorded event and its replay."""

    index: int
    """Of the event in the history, from 0."""
    what: Literal["address", "segment", "history", "free"]
    """A block's address differs; a segment is allocated or released differently; the history contradicts itself; a
    free block could have served a request that ran out of memory."""
    recorded: str
    replayed: str

    def __str__(self) -> str:
        return f"event {self.index}, {self.what}: recorded {self.recorded}, replayed {self.replayed}"


@dataclass(frozen=True, slots=True)
class OutOfMemoryEvent:
    """A request that ran out of memory, and the allocator's state then. Bytes throughout."""

    index: int
    """Of the event in the history; -1 if already the blocks live at its start did not fit."""
    requested: int
    """Rounded to whole blocks."""
    stream: int
    pool: Pool
    free: int | None
    """Left on the card; None if not recorded."""
    reserved: int
    allocated: int
    segments: tuple[Segment, ...]


class ExactReplay:
    """A replay under the recorded settings. New segments get their recorded addresses; all else is simulated."""

    def __init__(self, snapshot: Snapshot, start: Start, requests: Sequence[Request | None]) -> None:
        """``start``: the allocator's state before the history. ``requests``: for each event of the history the
        program's request, None for the allocator's own actions."""
        self.snapshot = snapshot
        self.requests = requests
        self.start = start
        self.suspect: tuple[int, int] | None = None
        """(owner, bytes) of a block that was live at the start and must have been larger by that many bytes, as the
        first wrong address shows."""
        self.allocator = start.allocator(snapshot.settings, place=self._address_for_segment)
        self.mismatches = [Mismatch(index, "history", text, "nothing") for index, text in start.conflicts]
        """Where the replay differs from the recording."""
        self.levels: list[Level] = [(0, self.allocator.allocated, self.allocator.reserved)]
        """(tick, allocated, reserved) at the start and after each request."""
        self.ooms: list[OutOfMemoryEvent] = []
        """The requests that ran out of memory."""
        self._addresses = {block.owner: block.address for segment in start.segments for block in segment.blocks}
        """Of the live and pending blocks, by owner."""
        self._segment_allocs: list[Entry] = []
        """Segment allocations since the last request: torch records them before the block that they are for."""
        self._segment_frees: list[tuple[int, Entry]] = []
        """Segment frees that are not yet replayed, with the indices of their events."""
        self._just_released = False
        """Whether memory was released since the last request: maybe to serve the next one."""
        self._next_unrecorded = _UNRECORDED_ADDRESS
        """End of the last segment that only the replay has allocated; these lie above all recorded addresses."""
        settings = snapshot.settings
        self._releases_partially = settings.max_split_size is not None or settings.garbage_collection_threshold > 0
        """Whether torch may release only some of the unused segments; under other settings it releases all."""

    def run(self) -> None:
        """Replay all events, or those before the first that contradicts the earlier ones."""
        try:
            self._replay_events()
        except (UsageError, LookupError, ValueError, AssertionError) as error:
            index = self.levels[-1][0]
            self._differs(index, "history", f"{len(self.requests)} events", f"none beyond ({type(error).__name__})")

    def _replay_events(self) -> None:
        """Serve each request in order, with the recorded events of segments that belong to it."""
        levels, allocator = self.levels, self.allocator
        for index, (entry, request) in enumerate(zip(self.snapshot.entries, self.requests, strict=True)):
            if entry.action in SEGMENT_FREES:
                self._segment_frees.append((index, entry))
                continue
            if self._segment_frees:
                self._release_recorded()
                levels.append((index, allocator.allocated, allocator.reserved))
            if entry.action in _SEGMENT_ALLOCS:
                self._segment_allocs.append(entry)
            elif request is not None:
                self._serve(request, entry)
                self._just_released = False
                levels.append((index + 1, allocator.allocated, allocator.reserved))
        if self._segment_frees:
            self._release_recorded()
            levels.append((len(self.requests), allocator.allocated, allocator.reserved))
        if self._segment_allocs:
            self._differs(len(self.requests) - 1, "segment", _describe_all(self._segment_allocs), "none")

    def _address_for_segment(self, size: int) -> int:
        """Return the recorded address for a new segment of ``size`` bytes, or a high one if torch allocated none."""
        if self._segment_allocs:
            return self._segment_allocs[0].address
        self._next_unrecorded += size
        return self._next_unrecorded - size

    def _serve(self, request: Request, entry: Entry) -> None:
        """Send a request to the allocator. ``entry``: the recorded event of the request."""
        tick = request.event + 1
        if request.kind == "alloc":
            self._alloc(request, entry, tick)
        elif request.kind == "oom":
            self._record_oom(request, entry)
        elif request.kind == "complete":
            self.allocator.complete(self._addresses.pop(request.owner), tick=tick)
        elif request.kind == "free":
            self.allocator.free(self._addresses.pop(request.owner), tick=tick)
        elif request.kind == "free_later":
            self.allocator.record_stream(self._addresses[request.owner], OTHER_STREAM)
            self.allocator.free(self._addresses[request.owner], tick=tick)

    def _alloc(self, request: Request, entry: Entry, tick: int) -> None:
        """Allocate a block, and compare its address and the segments allocated for it with the recorded ones."""
        log = self.allocator.log
        before = len(log)
        address = self.allocator.malloc(
            request.size,
            stream=request.stream,
            pool=request.pool,
            owner=request.owner,
            tick=tick,
            # After it released segments, torch allocates a new one without another look at the free blocks.
            fresh=self._just_released and bool(self._segment_allocs),
        )
        self._addresses[request.owner] = address
        if len(log) - before > 1 or self._segment_allocs:
            replayed = log[before:-1]  # without the event of the block itself
            if _actions(replayed) != _actions(self._segment_allocs):
                self._differs(request.event, "segment", _describe_all(self._segment_allocs), _describe_all(replayed))
            self._segment_allocs.clear()
        if address != entry.address:
            if not self.mismatches:
                self.suspect = self._block_of_wrong_size(address)
            self._differs(request.event, "address", f"{entry.address:#x}", f"{address:#x}")

    def _block_of_wrong_size(self, address: int) -> tuple[int, int] | None:
        """Return (owner, additional bytes) of a block that is larger than assumed, which explains that torch did not
        allocate at ``address`` as the replay did; None if there is no such block.

        Torch passed over a free block that fits best here, so the free block was smaller. The block in front of it can
        be larger than assumed if it was live at the start: up to 1 MiB behind its request may not have been split off.
        """
        settings = self.allocator.settings
        for segment in self.allocator.segments():
            if not segment.address < address < segment.address + segment.size:
                continue
            index = next(index for index, block in enumerate(segment.blocks) if block.address == address)
            block, left = segment.blocks[index], segment.blocks[index - 1]
            right = segment.blocks[index + 1 : index + 2]  # the remainder that was split off, if any
            free = block.size + sum(block.size for block in right if block.state == "inactive")
            # with so many bytes less, the free block is a unit too small for the request
            additional = free - block_size(settings, block.requested) + ALLOCATOR_BLOCK
            unsplit = left.size + additional - block_size(settings, left.requested)
            if left.owner in self.start.uncertain and unsplit <= LARGEST_SMALL and additional < free:
                assert left.owner is not None, "uncertain blocks have owners"
                return left.owner, additional
        return None

    def _release_recorded(self) -> None:
        """Release what torch released, all at once, as `empty_cache` and an allocator out of memory do."""
        frees, self._segment_frees, self._just_released = self._segment_frees, [], True
        index, allocator = frees[0][0], self.allocator
        before = len(allocator.log)
        if self._releases_partially:
            for event, entry in frees:
                if entry.action == "segment_free":
                    allocator.release_segment(entry.address, tick=event + 1)
                else:
                    allocator.unmap(entry.address, entry.size, tick=event + 1)
        else:
            for pool in self._pools_of(frees):
                allocator.retire(pool)
            allocator.empty_cache(tick=frees[-1][0] + 1)
        replayed = set(_actions(allocator.log[before:]))
        recorded = set(_actions([entry for _, entry in frees]))
        if self._segment_allocs:
            # A failed attempt mapped pages that were unmapped together with the others: here they never were mapped.
            recorded = _unmapped_ranges(recorded, self._segment_allocs)
            replayed = _unmapped_ranges(replayed, ())
            self._segment_allocs.clear()
        for missing in sorted(recorded - replayed):
            self._differs(index, "segment", _describe(missing), "not all free")
        for surplus in sorted(replayed - recorded):
            self._differs(index, "segment", "nothing", _describe(surplus))

    def _pools_of(self, frees: list[tuple[int, Entry]]) -> set[Pool]:
        """Return the memory pools of the segments that ``frees``, (index, event), release: as recorded, else those of
        the segments at their addresses."""
        pools = {entry.pool for _, entry in frees if entry.pool is not None}
        addresses = sorted(entry.address for _, entry in frees if entry.pool is None)
        if addresses:
            for segment in self.allocator.segments():
                index = bisect_left(addresses, segment.address)
                if index < len(addresses) and addresses[index] < segment.address + segment.size:
                    pools.add(segment.pool)
        return pools

    def _record_oom(self, request: Request, entry: Entry) -> None:
        """Record a request that ran out of memory; it is a mismatch if a block that is free here could serve it."""
        allocator = self.allocator
        if self._segment_allocs:
            self._map_failed_attempt(request)
        segments = allocator.segments()
        block = None if self._releases_partially else _free_block_for(request, segments)
        if block is not None:
            self._differs(request.event, "free", "out of memory", f"{block.size} bytes at {block.address:#x}")
        free = None if entry.address < 0 else entry.address
        event = AllocatorEvent("oom", free or 0, request.size, request.stream, request.pool, tick=request.event + 1)
        allocator.log.append(event)
        oom = OutOfMemoryEvent(
            request.event, request.size, request.stream, request.pool, free, allocator.reserved, allocator.allocated,
            segments,
        )  # fmt: skip
        self.ooms.append(oom)

    def _map_failed_attempt(self, request: Request) -> None:
        """Map the pages that a request got before it ran out of memory, by the same request on a card of that capacity;
        expandable segments keep the pages."""
        allocator = self.allocator
        allocator.capacity = reserved = allocator.reserved + sum(entry.size for entry in self._segment_allocs)
        self._segment_allocs.clear()
        try:
            address = allocator.malloc(request.size, stream=request.stream, pool=request.pool, tick=request.event + 1)
        except OutOfMemory:
            allocator.log.pop()
        else:
            allocator.free(address)
        allocator.capacity = None
        if allocator.reserved != reserved:
            self._differs(request.event, "segment", f"{reserved} bytes held", f"{allocator.reserved}")

    def _differs(
        self, index: int, what: Literal["address", "segment", "history", "free"], recorded: str, replayed: str
    ) -> None:
        """Note that the replay of the event at ``index`` differs from the recording."""
        self.mismatches.append(Mismatch(index, what, recorded, replayed))


def _free_block_for(request: Request, segments: Sequence[Segment]) -> Block | None:
    """Return a free block of the request's pool and stream that is large enough, or None."""
    kind = (request.pool, request.stream, request.size <= LARGEST_SMALL)
    for segment in segments:
        if (segment.pool, segment.stream, segment.small) == kind:
            for block in segment.blocks:
                if block.state == "inactive" and block.size >= request.size:
                    return block
    return None


_Action = tuple[Action, int, int]
"""(action, address, bytes) of an event."""


def _actions(events: Sequence[Entry] | Sequence[AllocatorEvent]) -> list[_Action]:
    return [(event.action, event.address, event.size) for event in events]


def _describe_all(events: Sequence[Entry] | Sequence[AllocatorEvent]) -> str:
    return ", ".join(map(_describe, _actions(events))) or "none"


def _describe(event: _Action) -> str:
    action, address, size = event
    return f"{action} of {size} bytes at {address:#x}"


def _unmapped_ranges(frees: set[_Action], mapped: Sequence[Entry]) -> set[_Action]:
    """Return the address ranges in ``frees`` minus those in ``mapped``, adjacent ranges merged, as segment_unmaps."""
    edges: dict[int, int] = {}  # address -> change in the number of ranges that cover the addresses from there on
    for _, address, size in frees:
        edges[address] = edges.get(address, 0) + 1
        edges[address + size] = edges.get(address + size, 0) - 1
    for entry in mapped:
        edges[entry.address] = edges.get(entry.address, 0) - 1
        edges[entry.address + entry.size] = edges.get(entry.address + entry.size, 0) + 1
    ranges: set[_Action] = set()
    depth, begin = 0, 0  # number of ranges that cover the addresses from here on; where the present range begins
    for address in sorted(edges):
        before, depth = depth, depth + edges[address]
        if before <= 0 < depth:
            begin = address
        elif depth <= 0 < before:
            ranges.add(("segment_unmap", begin, address - begin))
    return ranges
