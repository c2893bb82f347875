"""torch's memory history of a run, joined with the calls that the profiler recorded."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, replace

from memplan import _torch
from memplan._bytes import round_to_blocks
from memplan.trace.recording.causes import StepParts
from memplan.trace.records import ON_CARD, Call, CallKind

_FREE_REQUESTED, _FREE_COMPLETED = "free_requested", "free_completed"
_DEFAULT_POOL: tuple[int, tuple[int, ...]] = (0, (0, 0))


@dataclass(frozen=True)
class Events:
    """A memory history as events of a profile."""

    profile: _torch.Profile
    """Has an event for each allocation and each requested free."""
    pools: tuple[int, ...]
    """For each allocation, in order, the number of its stream and pool; 0 for torch's default."""
    awaited_frees: frozenset[int]
    """Allocations whose free had to wait for another stream."""
    calls: tuple[tuple[int, CallKind], ...]
    """The step's calls of the allocator: (number of earlier events, kind)."""


@dataclass
class _Allocation:
    """The profiler's events of an allocation."""

    allocated: _torch.MemoryEvent | None = None
    freed: _torch.MemoryEvent | None = None


def _allocations_by_address(profile: _torch.Profile) -> defaultdict[int, deque[_Allocation]]:
    """Return address -> the allocations at it, in order."""
    by_address: defaultdict[int, deque[_Allocation]] = defaultdict(deque)
    for event in profile.events:
        allocations = by_address[event.address]
        if event.bytes > 0:
            allocations.append(_Allocation(event))
        elif allocations and allocations[-1].freed is None:
            allocations[-1].freed = event
    return by_address


def _size(allocation: _Allocation) -> int:
    return 0 if allocation.allocated is None else allocation.allocated.bytes


def events_of(history: list[_torch.HistoryEvent], profile: _torch.Profile) -> Events:
    """Join a memory history with the profiler's record of the same run, which has the calls around each event.

    The profiler records the same allocations at the same addresses, with block sizes instead of requested sizes. It
    misses some frees, and allocations in threads that the step starts, which get no call.
    """
    profiled = _allocations_by_address(profile)
    events, pools, calls = list[_torch.MemoryEvent](), list[int](), list[tuple[int, CallKind]]()
    profiled_of_live = dict[int, _Allocation]()
    numbers = {_DEFAULT_POOL: 0}  # (stream, pool) -> number
    live, pending_frees = dict[int, int](), dict[int, int]()  # address -> number of the allocation
    awaited_frees = set[int]()
    time = 0
    for index, row in enumerate(history):
        if row.action in ("alloc", _FREE_REQUESTED):
            is_alloc = row.action == "alloc"
            if is_alloc:
                candidates = profiled[row.address]
                matches = bool(candidates) and _size(candidates[0]) == round_to_blocks(max(row.bytes, 1))
                profiled_of_live[row.address] = allocation = candidates.popleft() if matches else _Allocation()
            else:
                allocation = profiled_of_live.pop(row.address, _Allocation())
            event = allocation.allocated if is_alloc else allocation.freed
            time = max(time, event.time) if event is not None else time
            mark, call = (event.mark, event.call) if event is not None else ("", -1)
            events.append(_torch.MemoryEvent(row.address, row.bytes if is_alloc else -row.bytes, time, mark, call))
            if is_alloc:
                live[row.address] = len(pools)
                pools.append(numbers.setdefault((row.stream, row.pool), len(numbers)))
            elif not _is_completed_at_once(history, index):
                pending_frees[row.address] = live.get(row.address, -1)
        elif row.action == _FREE_COMPLETED and row.address in pending_frees:
            awaited_frees.add(pending_frees.pop(row.address))
            calls.append((len(events), "synchronize"))
        elif row.action == "segment_free":
            calls.append((len(events), "empty_cache"))
    unique = tuple(dict.fromkeys(calls))
    return Events(replace(profile, events=events), tuple(pools), frozenset(awaited_frees), unique)


def _is_completed_at_once(history: list[_torch.HistoryEvent], index: int) -> bool:
    """Return whether the next event completes a requested free, so that it waited for no stream."""
    following = history[index + 1 : index + 2]
    return bool(following) and following[0].action == _FREE_COMPLETED and following[0].address == history[index].address


@dataclass(frozen=True)
class OnCard:
    """The parts of a step with its storages on the card, and its calls of the allocator."""

    parts: StepParts
    calls: tuple[Call, ...]


def on_card(parts: StepParts, events: Events) -> OnCard:
    """Return the parts of a step, joined to its memory history, with its storages on the card. Each call of the
    allocator gets a tick, which moves all later ticks by 1."""
    before = [number for number, _ in events.calls]
    calls = tuple(Call(number + 1 + position, kind) for position, (number, kind) in enumerate(events.calls))

    def shifted(tick: int) -> int:
        return tick + sum(1 for number in before if number < tick)

    storages = tuple(
        replace(
            storage, device=ON_CARD, stream=events.pools[storage.id],
            used_on=(-1,) if storage.id in events.awaited_frees else (),
            born=shifted(storage.born), died=None if storage.died is None else shifted(storage.died),
        )
        for storage in parts.storages
    )  # fmt: skip
    ops = tuple(replace(op, start=shifted(op.start), end=shifted(op.end)) for op in parts.ops)
    steps = tuple(shifted(tick) for tick in parts.steps)
    return OnCard(replace(parts, storages=storages, ops=ops, steps=steps, end=parts.end + len(calls)), calls)
