"""Run a trace through the caching allocator of a card."""

from __future__ import annotations

from typing import NamedTuple

from memplan.simulation.allocator.allocator import CachingAllocator, OutOfMemory
from memplan.simulation.allocator.occupied import Begin
from memplan.simulation.allocator.settings import AllocatorSettings
from memplan.simulation.peaks import Level
from memplan.simulation.timeline import Pool
from memplan.trace.records import PRIVATE_POOL, Call, Storage
from memplan.trace.trace import Trace

_Event = tuple[int, int, Storage | Call]
_FREE, _ALLOC, _CALL = 0, 1, 2
_SEPARATE_STREAM = 1 << 20
"""Added to a stream's number, to give an allocation segments of its own: streams share no free blocks."""


class AllocatorRun(NamedTuple):
    """The caching allocator after the events of a trace, and the levels after each event."""

    allocator: CachingAllocator
    levels: list[Level]


def drive(
    trace: Trace,
    settings: AllocatorSettings,
    *,
    low: bool,
    separate: bool = False,
    capacity: int | None = None,
    smaller: dict[int, int] | None = None,
    until: int | None = None,
    log: bool = True,
    begin: Begin | None = None,
) -> AllocatorRun:
    """Run the allocations, frees and calls of a trace in a caching allocator.

    A block that another stream used (`record_stream`) becomes free at once in the low case, and when the step next
    synchronizes in the high case.

    Args:
        trace: for a card.
        settings: of the allocator.
        low: whether a size known as an interval is its lower end; else its upper end.
        separate: whether storages of such sizes get segments of their own, so that they neither use nor leave free
            blocks which would make the case cheaper.
        capacity: bytes of the card; None: unlimited. If a workspace of cuDNN does not fit, that of its next plan is
            tried, as torch does.
        smaller: gets the bytes of such workspaces by their storages.
        until: the last tick to run; by default all.
        log: whether to keep the allocator's events, which take more memory than all else of a long trace.
        begin: state of the allocator when the trace begins, without ``capacity``; None: nothing is allocated.

    Raises:
        OutOfMemory: more than ``capacity`` bytes were needed.
    """
    allocator = CachingAllocator(settings, capacity=capacity) if begin is None else begin.occupied.allocator(settings)
    # storages that are allocated when the trace begins, with their addresses; bytes of blocks that are not the trace's
    placed, others = ({}, 0) if begin is None else (begin.addresses, begin.others)
    plans = {engine.storage: engine.plans for engine in trace.engines} if capacity is not None else {}
    addresses: dict[int, int] = {}
    levels: list[Level] = []
    for tick, kind, subject in _events(trace):
        if until is not None and tick > until:
            break
        if isinstance(subject, Call):
            if subject.kind == "empty_cache":
                allocator.empty_cache(tick=tick)
            else:
                allocator.synchronize(tick=tick)
        elif kind == _ALLOC and subject.id in placed:
            addresses[subject.id] = placed[subject.id]
        elif kind == _ALLOC:
            size = subject.low if low and subject.low is not None else subject.bytes
            stream = subject.stream + _SEPARATE_STREAM if separate and subject.low is not None else subject.stream
            sizes = [plan.workspace for plan in plans.get(subject.id, ())] or [size]
            address, size = _first_that_fits(
                allocator, sizes, stream=stream, pool=(0, subject.stream // PRIVATE_POOL), owner=subject.id, tick=tick
            )
            addresses[subject.id] = address
            if size < sizes[0] and smaller is not None:
                smaller[subject.id] = size
        else:
            address = addresses.pop(subject.id)
            if not low:
                for stream in subject.used_on:
                    allocator.record_stream(address, stream)
            allocator.free(address, tick=tick)
        levels.append((tick, allocator.allocated - others, allocator.reserved - others))
        if not log:
            allocator.log.clear()
    return AllocatorRun(allocator, levels)


def _first_that_fits(
    allocator: CachingAllocator, sizes: list[int], *, stream: int, pool: Pool, owner: int, tick: int
) -> tuple[int, int]:
    """Allocate a block of the first of ``sizes`` that fits, and return (address, size). The other arguments are those
    of `CachingAllocator.malloc`. Source: Conv_v8.cpp, try_configs."""
    for size in sizes[:-1]:
        try:
            return allocator.malloc(size, stream=stream, pool=pool, owner=owner, tick=tick), size
        except OutOfMemory:
            continue
    return allocator.malloc(sizes[-1], stream=stream, pool=pool, owner=owner, tick=tick), sizes[-1]


def room_for(trace: Trace, capacity: int, settings: AllocatorSettings, *, low: bool) -> dict[int, int] | None:
    """Check whether a step runs in ``capacity`` bytes, counting that torch tries smaller workspaces and empties caches.

    Returns:
        Storage -> bytes of each workspace that fits only by a smaller cuDNN plan than the first; None if the step runs
        out of memory.
    """
    smaller = dict[int, int]()
    try:
        drive(trace, settings, low=low, capacity=capacity, smaller=smaller)  # for what it adds to `smaller`
    except OutOfMemory:
        return None
    return smaller


def fits(trace: Trace, capacity: int, settings: AllocatorSettings, *, low: bool) -> bool:
    """Check whether a step runs in ``capacity`` bytes."""
    return room_for(trace, capacity, settings, low=low) is not None


def _events(trace: Trace) -> list[_Event]:
    """Return (tick, kind, storage or call) of the allocations, frees and calls of a trace, in order."""
    counted = trace.counted
    events: list[_Event] = [(storage.born, _ALLOC, storage) for storage in counted]
    events += [(storage.died, _FREE, storage) for storage in counted if storage.died is not None]
    events += [(call.tick, _CALL, call) for call in trace.calls]
    # No two events of a recorded step share a tick. In a step edited by hand, frees come first, as on the CPU.
    return sorted(events, key=lambda event: event[:2])
