"""The requests of a snapshot's history under other settings, or on a card with more or less memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memplan.simulation.allocator.allocator import CachingAllocator, OutOfMemory
from memplan.simulation.allocator.rounding import segment_size
from memplan.simulation.allocator.settings import AllocatorSettings
from memplan.simulation.peaks import Level
from memplan.simulation.replays.exact import OTHER_STREAM, OutOfMemoryEvent
from memplan.simulation.replays.initial_state import Start
from memplan.simulation.replays.replayed import Replay, timeline_over
from memplan.simulation.replays.requests import Request
from memplan.simulation.timeline import Block, Segment


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the recording's card could give to torch, in bytes, as its running out of memory tells."""

    bytes: int
    is_card: bool
    """Whether the card was full; if not, the process was held to less than it had left (a memory fraction), and
    ``bytes`` is the most that it ever held."""


def recorded_capacity(replay: Replay) -> Capacity | None:
    """Return what there was when the recording ran out of memory: held by torch, plus left on the card. None if it did
    not."""
    known = [(oom, oom.free) for oom in replay.ooms if oom.free is not None]
    if not known:
        return None
    settings = replay.recorded_settings
    full = [
        oom.reserved + free
        for oom, free in known
        if settings.expandable_segments or free < segment_size(settings, oom.requested)
    ]
    if full:
        return Capacity(min(full), True)
    return Capacity(max(reserved for _, _, reserved in replay.timeline.events), False)


def what_if(replay: Replay, settings: AllocatorSettings | None = None, capacity: int | None = None) -> Replay:
    """Return the same requests in the same order, under other settings or another capacity.

    Under the recorded settings it begins with the recorded state, if the card can hold that. Else that state cannot
    have come about, and how another would have is not known, since it lies before the history: the blocks that were
    live then are asked for anew, in order of address. That leaves out what the past had fragmented and cached by then.

    Calls of `torch.cuda.empty_cache` stay; memory that the allocator gave back because it had run out does not count
    as a request. A request that had failed is tried; if it is served, it is given back at once, since the program
    went on without it.

    Args:
        replay: the snapshot's own replay.
        settings: the recorded ones if None.
        capacity: bytes that the card can give to torch; None: as `recorded_capacity` says, else no end.
    """
    settings = replay.recorded_settings if settings is None else settings
    if capacity is None and (found := recorded_capacity(replay)) is not None:
        capacity = found.bytes
    driven = _Driven(replay.start, settings, capacity, as_recorded=settings == replay.recorded_settings)
    driven.run(replay.requests)
    timeline = timeline_over(replay.snapshot, driven.levels, driven.allocator)
    return Replay(
        replay.snapshot, replay.start, replay.requests, settings, capacity, False, [], timeline, tuple(driven.ooms),
        driven.ended, driven.from_recorded_start,
    )  # fmt: skip


class _Driven:
    def __init__(self, start: Start, settings: AllocatorSettings, capacity: int | None, *, as_recorded: bool) -> None:
        self.ooms: list[OutOfMemoryEvent] = []
        self.ended = False
        self.where: dict[int, int] = {}
        """Owner -> address, of blocks that are live or waiting."""
        self.waiting: set[int] = set()
        """Owners of blocks that were given back and are still in use on another stream."""
        blocks = [(segment, block, block.owner) for segment in start.segments for block in segment.blocks]
        held = sum(segment.size for segment in start.segments)
        self.from_recorded_start = as_recorded and (capacity is None or held <= capacity)
        if self.from_recorded_start:
            self.allocator = start.allocator(settings, capacity=capacity)
            self.where = {owner: block.address for _, block, owner in blocks if owner is not None}
            self.waiting = {o for _, block, o in blocks if o is not None and block.state == "active_pending_free"}
        else:
            self.allocator = CachingAllocator(settings, capacity=capacity)
            self._lay([(segment, block, owner) for segment, block, owner in blocks if owner is not None])
        self.levels: list[Level] = [(0, self.allocator.allocated, self.allocator.reserved)]

    def _lay(self, blocks: Sequence[tuple[Segment, Block, int]]) -> None:
        """Ask for the blocks that were live at the start."""
        for segment, block, owner in blocks:
            self._alloc(Request("alloc", -1, owner, block.requested, segment.stream, segment.pool))
            if self.ended:
                return
            if block.state == "active_pending_free":
                self._free_later(owner, 0)

    def run(self, requests: Sequence[Request | None]) -> None:
        """Serve all requests, or those up to the first that fails and had not."""
        allocator, levels = self.allocator, self.levels
        for request in requests:
            if self.ended:
                return
            if request is None:
                continue
            tick = request.event + 1
            if request.kind == "alloc":
                self._alloc(request)
            elif request.kind == "free":
                allocator.free(self.where.pop(request.owner), tick=tick)
            elif request.kind == "free_later":
                self._free_later(request.owner, tick)
            elif request.kind == "complete":
                address = self.where.pop(request.owner)
                if request.owner in self.waiting:
                    self.waiting.remove(request.owner)
                    allocator.complete(address, tick=tick)
            elif request.kind == "empty_cache":
                before = len(allocator.log)
                allocator.empty_cache(tick=tick)
                self._follow(before)
            else:
                self._try(request)
            levels.append((tick, allocator.allocated, allocator.reserved))

    def _alloc(self, request: Request) -> None:
        address = self._malloc(request)
        if address is None:
            self.ended = True
        else:
            self.where[request.owner] = address

    def _try(self, request: Request) -> None:
        """What the recording could not serve: served here, it would have fitted."""
        address = self._malloc(request)
        if address is not None:
            self.levels.append((request.event + 1, self.allocator.allocated, self.allocator.reserved))
            self.allocator.free(address, tick=request.event + 1)

    def _malloc(self, request: Request) -> int | None:
        """Return the address of a new block; None, and an `OutOfMemoryEvent`, where there is too little."""
        owner = request.owner if request.owner >= 0 else None
        before = len(self.allocator.log)
        try:
            return self.allocator.malloc(
                request.size, stream=request.stream, pool=request.pool, owner=owner, tick=request.event + 1
            )
        except OutOfMemory as error:
            self._failed(request, error)
            return None
        finally:
            self._follow(before)

    def _free_later(self, owner: int, tick: int) -> None:
        self.allocator.record_stream(self.where[owner], OTHER_STREAM)
        self.allocator.free(self.where[owner], tick=tick)
        self.waiting.add(owner)

    def _follow(self, before: int) -> None:
        """To get memory back the allocator may have waited for the streams of all blocks."""
        if self.waiting:
            done = {event.owner for event in self.allocator.log[before:] if event.action == "free_completed"}
            self.waiting = {owner for owner in self.waiting if owner not in done}

    def _failed(self, request: Request, error: OutOfMemory) -> None:
        free = None if error.capacity is None else max(error.capacity - error.reserved, 0)
        self.ooms.append(
            OutOfMemoryEvent(
                request.event, request.size, request.stream, request.pool, free, error.reserved, error.allocated,
                self.allocator.segments(),
            )
        )  # fmt: skip
