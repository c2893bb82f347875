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
    """The profiler's events of an allocation, None for those that it missed."""

    allocated: _torch.MemoryEvent | None = None
    freed: _torch.MemoryEvent | None = None


def _allocations_by_address(profile: _torch.Profile) -> defaultdict[int, deque[_Allocation]]:
    """Return address -> the allocations at this address that the profiler recorded, in order."""
    by_address: defaultdict[int, deque[_Allocation]] = defaultdict(deque)
    for event in profile.events:
        allocations = by_address[event.address]
        if event.bytes > 0:
            allocations.append(_Allocation(event))
        elif allocations and allocations[-1].freed is None:
            allocations[-1].freed = event
    return by_address


def events_of(history: list[_torch.HistoryEvent], profile: _torch.Profile) -> Events:
    """Join a memory history with the profiler's record of the same run, which has the calls around each event.

    The profiler records the same allocations at the same addresses, with block sizes instead of requested sizes. It
    misses some frees, and allocations in threads that the step starts, which get no call.
    """
    profiled = _allocations_by_address(profile)
    events, pools, calls = list[_torch.MemoryEvent](), list[int](), list[tuple[int, CallKind]]()
    pool_numbers = {_DEFAULT_POOL: 0}  # (stream, pool) -> number
    live = dict[int, tuple[int, _Allocation]]()  # address -> (number of the allocation, its profiler's events)
    pending_frees = dict[int, int]()  # address -> number of the allocation
    awaited_frees = set[int]()
    time = 0  # of the profiler's last event: the history's events have no time of the same clock

    def append_event(address: int, size: int, recorded: _torch.MemoryEvent | None) -> None:
        """Append an allocation, or a free (negative size), with mark and call of the profiler's event, if any."""
        nonlocal time
        mark, call = "", -1
        if recorded is not None:
            time, mark, call = max(time, recorded.time), recorded.mark, recorded.call
        events.append(_torch.MemoryEvent(address, size, time, mark, call))

    for index, row in enumerate(history):
        if row.action == "alloc":
            candidates = profiled[row.address]
            recorded = candidates[0].allocated if candidates else None
            # else the profiler has missed this allocation, as in a thread of the step
            matches = recorded is not None and recorded.bytes == round_to_blocks(max(row.bytes, 1))
            allocation = candidates.popleft() if matches else _Allocation()
            append_event(row.address, row.bytes, allocation.allocated)
            live[row.address] = len(pools), allocation
            pools.append(pool_numbers.setdefault((row.stream, row.pool), len(pool_numbers)))
        elif row.action == _FREE_REQUESTED:
            number, allocation = live.pop(row.address, (-1, _Allocation()))
            append_event(row.address, -row.bytes, allocation.freed)
            if not _is_completed_at_once(history, index):
                pending_frees[row.address] = number
        elif row.action == _FREE_COMPLETED and row.address in pending_frees:
            # a trace has no completions: a call, after which the simulator reuses such blocks, stands for it
            awaited_frees.add(pending_frees.pop(row.address))
            calls.append((len(events), "synchronize"))
        elif row.action == "segment_free":  # as by `torch.cuda.empty_cache`
            calls.append((len(events), "empty_cache"))
    unique = tuple(dict.fromkeys(calls))
    return Events(replace(profile, events=events), tuple(pools), frozenset(awaited_frees), unique)


def _is_completed_at_once(history: list[_torch.HistoryEvent], index: int) -> bool:
    """Return whether the free requested by event ``index`` is completed by the next event: it waited for no stream."""
    following = history[index + 1 : index + 2]
    return bool(following) and following[0].action == _FREE_COMPLETED and following[0].address == history[index].address


@dataclass(frozen=True)
class OnCard:
    """The parts of a step with its storages on the card, and its calls of the allocator."""

    parts: StepParts
    calls: tuple[Call, ...]


def on_card(parts: StepParts, events: Events) -> OnCard:
    """Return a step's parts with the streams and pools of its storages, which are the allocations of ``events``.

    Each call of the allocator gets a tick of its own, which moves all later ticks by 1.
    """
    before = [number for number, _ in events.calls]  # the tick after which each call comes
    # one tick after that, and one for each earlier call
    calls = tuple(Call(number + 1 + earlier, kind) for earlier, (number, kind) in enumerate(events.calls))

    def shifted(tick: int) -> int:
        """Return a tick of the history as a tick that also counts the calls."""
        return tick + sum(1 for number in before if number < tick)

    storages = tuple(
        replace(
            storage, device=ON_CARD, stream=events.pools[storage.id],
            used_on=(-1,) if storage.id in events.awaited_frees else (),  # an unknown stream
            born=shifted(storage.born), died=None if storage.died is None else shifted(storage.died),
        )
        for storage in parts.storages
    )  # fmt: skip
    ops = tuple(replace(op, start=shifted(op.start), end=shifted(op.end)) for op in parts.ops)
    steps = tuple(shifted(tick) for tick in parts.steps)
    return OnCard(replace(parts, storages=storages, ops=ops, steps=steps, end=parts.end + len(calls)), calls)
