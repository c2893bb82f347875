"""The events of a snapshot, driven through the caching allocator and compared with what torch did."""

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
from memplan.simulation.allocator.settings import AllocatorSettings
from memplan.simulation.peaks import Level
from memplan.simulation.replays.initial_state import Start
from memplan.simulation.replays.requests import GIVES, Request
from memplan.simulation.snapshots.read import Entry, Snapshot
from memplan.simulation.timeline import Action, AllocatorEvent, Block, Pool, Segment

_TAKES = ("segment_alloc", "segment_map")
_SPARE = 1 << 56
"""Addresses for segments that torch did not take: above all that a card has."""
OTHER_STREAM = -1
"""A stream that is none: what a block waits for whose other streams are not recorded."""


@dataclass(frozen=True, slots=True)
class Mismatch(Printed):
    """A difference between what torch recorded and what the replay did."""

    index: int
    """Of the event in the history, from 0."""
    what: Literal["address", "segment", "history", "free"]
    """The address of a block; a segment taken or given back; the history contradicts itself; free memory is left."""
    recorded: str
    replayed: str

    def __str__(self) -> str:
        return f"event {self.index}, {self.what}: recorded {self.recorded}, replayed {self.replayed}"


@dataclass(frozen=True, slots=True)
class OutOfMemoryEvent:
    """A request that the card could not serve, and what was held then. Bytes throughout."""

    index: int
    """Of the event in the history; -1: already the blocks that were there at its start."""
    requested: int
    """As rounded to whole blocks."""
    stream: int
    pool: Pool
    free: int | None
    """What the card had left; None where that is not recorded."""
    reserved: int
    allocated: int
    segments: tuple[Segment, ...]


class Exact:
    """A replay that takes segments where torch took them, and nothing else, from the recording."""

    def __init__(self, snapshot: Snapshot, start: Start, requests: Sequence[Request | None]) -> None:
        self.snapshot = snapshot
        self.requests = requests
        self.start = start
        self.suspect: tuple[int, int] | None = None
        """At the first wrong address: the owner of a block of the start, and how much larger it must have been."""
        self.allocator = start.allocator(snapshot.settings, place=self._place)
        self.mismatches = [Mismatch(index, "history", text, "nothing") for index, text in start.conflicts]
        self.levels: list[Level] = [(0, self.allocator.allocated, self.allocator.reserved)]
        self.ooms: list[OutOfMemoryEvent] = []
        self._where = {block.owner: block.address for segment in start.segments for block in segment.blocks}
        self._taken: list[Entry] = []
        self._given: list[tuple[int, Entry]] = []
        self._just_gave = False
        """Whether memory went back since the last request: it may have been for the next one."""
        self._spare = _SPARE
        settings = snapshot.settings
        # With these, torch gives back some of what is unused; without, always all of it.
        self._gives_part = settings.max_split_size is not None or settings.garbage_collection_threshold > 0

    def run(self) -> None:
        """Replay all events, or those up to one that makes no sense after what came before it."""
        try:
            self._run()
        except (UsageError, LookupError, ValueError, AssertionError) as error:
            after = self.levels[-1][0]
            self._differ(after, "history", f"{len(self.requests)} events", f"none beyond ({type(error).__name__})")

    def _run(self) -> None:
        levels, allocator = self.levels, self.allocator
        for index, (entry, request) in enumerate(zip(self.snapshot.entries, self.requests, strict=True)):
            if entry.action in GIVES:
                self._given.append((index, entry))
                continue
            if self._given:
                self._give()
                levels.append((index, allocator.allocated, allocator.reserved))
            if entry.action in _TAKES:
                self._taken.append(entry)
            elif request is not None:
                self._serve(request, entry)
                self._just_gave = False
                levels.append((index + 1, allocator.allocated, allocator.reserved))
        if self._given:
            self._give()
            levels.append((len(self.requests), allocator.allocated, allocator.reserved))
        if self._taken:
            self._differ(len(self.requests) - 1, "segment", _listed(self._taken), "none")

    def _place(self, size: int) -> int:
        """Return where torch put the segment that the next block lies in."""
        if self._taken:
            return self._taken[0].address
        self._spare += size
        return self._spare - size

    def _serve(self, request: Request, entry: Entry) -> None:
        tick = request.event + 1
        if request.kind == "alloc":
            self._alloc(request, entry, tick)
        elif request.kind == "oom":
            self._fail(request, entry)
        elif request.kind == "complete":
            self.allocator.complete(self._where.pop(request.owner), tick=tick)
        elif request.kind == "free":
            self.allocator.free(self._where.pop(request.owner), tick=tick)
        elif request.kind == "free_later":
            self.allocator.record_stream(self._where[request.owner], OTHER_STREAM)
            self.allocator.free(self._where[request.owner], tick=tick)

    def _alloc(self, request: Request, entry: Entry, tick: int) -> None:
        log = self.allocator.log
        before = len(log)
        address = self.allocator.malloc(
            request.size,
            stream=request.stream,
            pool=request.pool,
            owner=request.owner,
            tick=tick,
            # Blocks that became free on the way are not looked at again.
            fresh=self._just_gave and bool(self._taken),
        )
        self._where[request.owner] = address
        if len(log) - before - 1 != len(self._taken) or self._taken:
            done = log[before:-1]
            if [event[:3] for event in done] != [taken[:3] for taken in self._taken]:
                self._differ(request.event, "segment", _listed(self._taken), _listed(done))
            self._taken.clear()
        if address != entry.address:
            if not self.mismatches:
                self.suspect = self._suspect(address, self.allocator.settings)
            self._differ(request.event, "address", f"{entry.address:#x}", f"{address:#x}")

    def _suspect(self, address: int, settings: AllocatorSettings) -> tuple[int, int] | None:
        """Torch passed over a free block that serves best here. Then it was smaller.

        That can be where the block in front of it was there at the start, and its own size is not known: up to 1 MiB
        more of it may have been left over when it was cut.
        """
        for segment in self.allocator.segments():
            if not segment.address < address < segment.address + segment.size:
                continue
            at = next(at for at, block in enumerate(segment.blocks) if block.address == address)
            taken, before = segment.blocks[at], segment.blocks[at - 1]
            behind = segment.blocks[at + 1 : at + 2]
            free = taken.size + sum(block.size for block in behind if block.state == "inactive")
            more = free - block_size(settings, taken.requested) + ALLOCATOR_BLOCK
            left_over = before.size + more - block_size(settings, before.requested)
            owner = before.owner
            if owner is not None and owner in self.start.uncertain and left_over <= LARGEST_SMALL and more < free:
                return owner, more
        return None

    def _give(self) -> None:
        """Give back what torch gave back, all of it in one go, as it does in `empty_cache` or when it has run out."""
        given, self._given, self._just_gave = self._given, [], True
        index, allocator = given[0][0], self.allocator
        before = len(allocator.log)
        if self._gives_part:
            for at, entry in given:
                if entry.action == "segment_free":
                    allocator.release_segment(entry.address, tick=at + 1)
                else:
                    allocator.unmap(entry.address, entry.size, tick=at + 1)
        else:
            for pool in self._pools_at(given):
                allocator.retire(pool)
            allocator.empty_cache(tick=given[-1][0] + 1)
        done = {event[:3] for event in allocator.log[before:]}
        recorded = {entry[:3] for _, entry in given}
        if self._taken:
            # An attempt that failed had got pages which went back with the others: they were never taken here.
            recorded = _without(recorded, self._taken)
            done = _without(done, ())
            self._taken.clear()
        for missing in sorted(recorded - done):
            self._differ(index, "segment", _told(missing), "not all free")
        for surplus in sorted(done - recorded):
            self._differ(index, "segment", "nothing", _told(surplus))

    def _pools_at(self, given: list[tuple[int, Entry]]) -> set[Pool]:
        """Return the private pools of memory that is given back."""
        known = {entry.pool for _, entry in given if entry.pool is not None}
        addresses = sorted(entry.address for _, entry in given if entry.pool is None)
        if addresses:
            for segment in self.allocator.segments():
                at = bisect_left(addresses, segment.address)
                if at < len(addresses) and addresses[at] < segment.address + segment.size:
                    known.add(segment.pool)
        return known

    def _fail(self, request: Request, entry: Entry) -> None:
        """Torch ran out: then nothing that is free here may serve the request, either."""
        allocator = self.allocator
        if self._taken:
            self._fail_after_some(request)
        segments = allocator.segments()
        if not self._gives_part and (block := _serving(segments, request)) is not None:
            self._differ(request.event, "free", "out of memory", f"{block.size} bytes at {block.address:#x}")
        free = None if entry.address < 0 else entry.address
        event = AllocatorEvent("oom", free or 0, request.size, request.stream, request.pool, tick=request.event + 1)
        allocator.log.append(event)
        oom = OutOfMemoryEvent(
            request.event, request.size, request.stream, request.pool, free, allocator.reserved, allocator.allocated,
            segments,
        )  # fmt: skip
        self.ooms.append(oom)

    def _fail_after_some(self, request: Request) -> None:
        """With expandable segments, an attempt that failed can have got some of its pages; it keeps them."""
        allocator = self.allocator
        allocator.capacity = reserved = allocator.reserved + sum(taken.size for taken in self._taken)
        self._taken.clear()
        try:
            address = allocator.malloc(request.size, stream=request.stream, pool=request.pool, tick=request.event + 1)
        except OutOfMemory:
            allocator.log.pop()
        else:
            allocator.free(address)
        allocator.capacity = None
        if allocator.reserved != reserved:
            self._differ(request.event, "segment", f"{reserved} bytes held", f"{allocator.reserved}")

    def _differ(
        self, index: int, what: Literal["address", "segment", "history", "free"], recorded: str, replayed: str
    ) -> None:
        self.mismatches.append(Mismatch(index, what, recorded, replayed))


def _serving(segments: Sequence[Segment], request: Request) -> Block | None:
    """Return a free block that is large enough, of the pool and stream of a request."""
    kind = (request.pool, request.stream, request.size <= LARGEST_SMALL)
    for segment in segments:
        if (segment.pool, segment.stream, segment.small) == kind:
            for block in segment.blocks:
                if block.state == "inactive" and block.size >= request.size:
                    return block
    return None


def _listed(events: Sequence[Entry] | Sequence[AllocatorEvent]) -> str:
    return ", ".join(_told(event) for event in events) or "none"


def _told(event: Sequence[object]) -> str:
    return f"{event[0]} of {event[2]} bytes at {event[1]:#x}"


def _without(given: set[tuple[Action, int, int]], taken: Sequence[Entry]) -> set[tuple[Action, int, int]]:
    """Stretches of addresses less those taken before, those that touch as one."""
    edges: dict[int, int] = {}
    for _, address, size in given:
        edges[address] = edges.get(address, 0) + 1
        edges[address + size] = edges.get(address + size, 0) - 1
    for entry in taken:
        edges[entry.address] = edges.get(entry.address, 0) - 1
        edges[entry.address + entry.size] = edges.get(entry.address + entry.size, 0) + 1
    found: set[tuple[Action, int, int]] = set()
    level, begin = 0, 0
    for address in sorted(edges):
        before, level = level, level + edges[address]
        if before <= 0 < level:
            begin = address
        elif level <= 0 < before:
            found.add(("segment_unmap", begin, address - begin))
    return found
