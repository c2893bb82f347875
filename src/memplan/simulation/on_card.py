"""A step for a card, driven through the caching allocator."""

from __future__ import annotations

from memplan.simulation.allocator.allocator import CachingAllocator, OutOfMemory
from memplan.simulation.allocator.settings import AllocatorSettings
from memplan.simulation.peaks import Level
from memplan.trace.records import Call, Storage
from memplan.trace.trace import Trace

_Event = tuple[int, int, Storage | Call]
_DEATH, _BIRTH, _CALL = 0, 1, 2
_APART = 1 << 20
"""Added to a stream's number: every stream has pools of its own."""


def drive(
    trace: Trace,
    settings: AllocatorSettings,
    *,
    low: bool,
    apart: bool = False,
    capacity: int | None = None,
    smaller: dict[int, int] | None = None,
    until: int | None = None,
) -> tuple[CachingAllocator, list[Level]]:
    """Return the allocator after all events of a trace, or those up to a tick, and the levels after each.

    ``low``: of what is known as an interval, the least; else the most. ``apart``: in segments of its own, so that it
    neither finds nor leaves free blocks that would make the case cheaper. A block that another stream used
    (`record_stream`) is free at once in the low case, in the high case when the step next synchronizes. Where there is
    no room for a workspace of cuDNN, that of the next of its plans is taken, as torch does: ``smaller`` gets the bytes
    of these by their storages.

    Raises:
        OutOfMemory: more than ``capacity`` bytes were needed.
    """
    allocator = CachingAllocator(settings, capacity=capacity)
    plans = {one.storage: one.plans for one in trace.engines} if capacity is not None else {}
    addresses: dict[int, int] = {}
    levels: list[Level] = []
    for tick, kind, what in _events(trace):
        if until is not None and tick > until:
            break
        if isinstance(what, Call):
            if what.kind == "empty_cache":
                allocator.empty_cache(tick=tick)
            else:
                allocator.synchronize(tick=tick)
        elif kind == _BIRTH:
            size = what.low if low and what.low is not None else what.bytes
            stream = what.stream + _APART if apart and what.low is not None else what.stream
            sizes = [plan.workspace for plan in plans.get(what.id, ())] or [size]
            addresses[what.id], taken = _first_that_fits(allocator, sizes, stream=stream, owner=what.id, tick=tick)
            if taken < sizes[0] and smaller is not None:
                smaller[what.id] = taken
        else:
            address = addresses.pop(what.id)
            if not low:
                for stream in what.used_on:
                    allocator.record_stream(address, stream)
            allocator.free(address, tick=tick)
        levels.append((tick, allocator.allocated, allocator.reserved))
    return allocator, levels


def _first_that_fits(
    allocator: CachingAllocator, sizes: list[int], *, stream: int, owner: int, tick: int
) -> tuple[int, int]:
    """Return the address of a block of the first size that there is room for, and the size. Source: Conv_v8.cpp,
    try_configs."""
    for size in sizes[:-1]:
        try:
            return allocator.malloc(size, stream=stream, owner=owner, tick=tick), size
        except OutOfMemory:
            continue
    return allocator.malloc(sizes[-1], stream=stream, owner=owner, tick=tick), sizes[-1]


def room_for(trace: Trace, capacity: int, settings: AllocatorSettings, *, low: bool) -> dict[int, int] | None:
    """Return whether a step runs in ``capacity`` bytes, with all that the allocator does before it gives up.

    Returns:
        The bytes of workspaces for which a smaller plan than the first has to do, by their storages; None: it does not
        run.
    """
    smaller = dict[int, int]()
    try:
        drive(trace, settings, low=low, capacity=capacity, smaller=smaller)
    except OutOfMemory:
        return None
    return smaller


def fits(trace: Trace, capacity: int, settings: AllocatorSettings, *, low: bool) -> bool:
    """Return whether a step runs in ``capacity`` bytes."""
    return room_for(trace, capacity, settings, low=low) is not None


def _events(trace: Trace) -> list[_Event]:
    counted = trace.counted
    events: list[_Event] = [(s.born, _BIRTH, s) for s in counted]
    events += [(s.died, _DEATH, s) for s in counted if s.died is not None]
    events += [(call.tick, _CALL, call) for call in trace.calls]
    # no two of a recorded step share a tick; of one that was changed by hand, deaths come first, as on the CPU
    return sorted(events, key=lambda event: event[:2])
