"""Replay a snapshot's requests under other allocator settings, or on a card with more or less memory."""

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
    """Bytes of the recording's card available to torch, inferred from its out-of-memory events."""

    bytes: int
    is_card: bool
    """Whether the card was full. If not, the process had a limit of its own (a memory fraction), and ``bytes`` is its
    peak of reserved bytes."""


def recorded_capacity(replay: Replay) -> Capacity | None:
    """Return reserved plus free bytes of the card when the recording ran out of memory; None if it did not."""
    known = [(oom, oom.free) for oom in replay.ooms if oom.free is not None]
    if not known:
        return None
    settings = replay.recorded_settings
    capacities: list[int] = []
    for oom, free in known:
        is_full = settings.expandable_segments or free < segment_size(settings, oom.requested)
        if is_full:
            capacities.append(oom.reserved + free)
    if capacities:
        return Capacity(min(capacities), is_card=True)
    return Capacity(max(reserved for _, _, reserved in replay.timeline.events), is_card=False)


def what_if(replay: Replay, settings: AllocatorSettings | None = None, capacity: int | None = None) -> Replay:
    """Replay the same requests in the same order, under other settings or another capacity.

    With the recorded settings the replay starts in the recorded state if the card can hold it. Otherwise the history
    before the recording would have gone differently, so the blocks live at its start are allocated anew in order of
    address. That leaves out earlier fragmentation and cached memory.

    Calls of `torch.cuda.empty_cache` are replayed; releases by an allocator that had run out are not. A request that
    failed in the recording is tried; if it succeeds, its block is freed at once, since the program went on without.

    Args:
        replay: the snapshot's own replay.
        settings: by default as recorded.
        capacity: bytes of the card available to torch; by default `recorded_capacity`, else unlimited.
    """
    settings = replay.recorded_settings if settings is None else settings
    recorded = recorded_capacity(replay)
    if capacity is None and recorded is not None:
        capacity = recorded.bytes
    run = _WhatIfRun(replay.start, settings, capacity, as_recorded=settings == replay.recorded_settings)
    run.serve_all(replay.requests)
    timeline = timeline_over(replay.snapshot, run.levels, run.allocator)
    return Replay(
        replay.snapshot, replay.start, replay.requests, settings, capacity=capacity, compared=False, mismatches=[],
        timeline=timeline, ooms=tuple(run.ooms), ended=run.ended, from_recorded_start=run.from_recorded_start,
    )  # fmt: skip


class _WhatIfRun:
    """Serves the requests of a history on a new allocator, until a request fails that did not in the recording."""

    def __init__(self, start: Start, settings: AllocatorSettings, capacity: int | None, *, as_recorded: bool) -> None:
        """Begin in the recorded state, or with its live blocks on a new allocator.

        ``as_recorded``: whether to begin in the recorded state, if that is within the capacity.
        """
        self.ooms: list[OutOfMemoryEvent] = []
        """The requests that ran out of memory."""
        self.ended = False
        """Whether a request failed that did not in the recording."""
        self.addresses: dict[int, int] = {}
        """Of live and pending blocks, by owner."""
        self.pending: set[int] = set()
        """Owners of blocks that were freed and are still in use on another stream."""
        blocks = [(segment, block, block.owner) for segment in start.segments for block in segment.blocks]
        reserved = sum(segment.size for segment in start.segments)
        self.from_recorded_start = as_recorded and (capacity is None or reserved <= capacity)
        """Whether it begins in the recorded state."""
        if self.from_recorded_start:
            self.allocator = start.allocator(settings, capacity=capacity)
            self.addresses = {owner: block.address for _, block, owner in blocks if owner is not None}
            pending = [owner for _, block, owner in blocks if block.state == "active_pending_free"]
            self.pending = {owner for owner in pending if owner is not None}
        else:
            self.allocator = CachingAllocator(settings, capacity=capacity)
            self._allocate_live([(segment, block, owner) for segment, block, owner in blocks if owner is not None])
        self.levels: list[Level] = [(0, self.allocator.allocated, self.allocator.reserved)]
        """(tick, allocated, reserved) at the start and after each request."""

    def _allocate_live(self, blocks: Sequence[tuple[Segment, Block, int]]) -> None:
        """Allocate the blocks, each with its owner, that were live at the start."""
        for segment, block, owner in blocks:  # by requests at event -1: before the first
            self._serve_alloc(
                Request("alloc", event=-1, owner=owner, size=block.requested, stream=segment.stream, pool=segment.pool)
            )
            if self.ended:
                return
            if block.state == "active_pending_free":
                self._free_later(owner, tick=0)

    def serve_all(self, requests: Sequence[Request | None]) -> None:
        """Serve the requests, up to the first that runs out of memory and did not in the recording."""
        allocator, levels = self.allocator, self.levels
        for request in requests:
            if self.ended:
                return
            if request is None:
                continue
            tick = request.event + 1
            if request.kind == "alloc":
                self._serve_alloc(request)
            elif request.kind == "free":
                allocator.free(self.addresses.pop(request.owner), tick=tick)
            elif request.kind == "free_later":
                self._free_later(request.owner, tick)
            elif request.kind == "complete":
                address = self.addresses.pop(request.owner)
                if request.owner in self.pending:
                    self.pending.remove(request.owner)
                    allocator.complete(address, tick=tick)
            elif request.kind == "empty_cache":
                before = len(allocator.log)
                allocator.empty_cache(tick=tick)
                self._update_pending(before)
            else:
                self._retry(request)
            levels.append((tick, allocator.allocated, allocator.reserved))

    def _serve_alloc(self, request: Request) -> None:
        """Allocate a block; the run ends if that fails."""
        address = self._malloc(request)
        if address is None:
            self.ended = True
        else:
            self.addresses[request.owner] = address

    def _retry(self, request: Request) -> None:
        """Try a request that ran out of memory in the recording, and free the block if there is one."""
        address = self._malloc(request)
        if address is not None:
            self.levels.append((request.event + 1, self.allocator.allocated, self.allocator.reserved))
            self.allocator.free(address, tick=request.event + 1)

    def _malloc(self, request: Request) -> int | None:
        """Return the address of a new block, or record an `OutOfMemoryEvent` and return None."""
        owner = request.owner if request.owner >= 0 else None
        before = len(self.allocator.log)
        try:
            return self.allocator.malloc(
                request.size, stream=request.stream, pool=request.pool, owner=owner, tick=request.event + 1
            )
        except OutOfMemory as error:
            self._record_oom(request, error)
            return None
        finally:
            self._update_pending(before)

    def _free_later(self, owner: int, tick: int) -> None:
        """Free a block that is still in use on another stream."""
        self.allocator.record_stream(self.addresses[owner], OTHER_STREAM)
        self.allocator.free(self.addresses[owner], tick=tick)
        self.pending.add(owner)

    def _update_pending(self, log_start: int) -> None:
        """Drop the pending blocks that were freed since ``log_start``, because the allocator waited for all streams."""
        if self.pending:
            log = self.allocator.log[log_start:]
            self.pending -= {event.owner for event in log if event.action == "free_completed"}

    def _record_oom(self, request: Request, error: OutOfMemory) -> None:
        """Add the event of a request that ran out of memory, with the state of the allocator."""
        free = None if error.capacity is None else max(error.capacity - error.reserved, 0)
        self.ooms.append(
            OutOfMemoryEvent(
                request.event, request.size, request.stream, request.pool, free, error.reserved, error.allocated,
                self.allocator.segments(),
            )
        )  # fmt: skip
