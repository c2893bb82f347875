"""torch's memory history of a run as what the profiler saw of it, in the history's order and sizes."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, replace

from memplan import _torch
from memplan.trace.recording.join_events import Joined
from memplan.trace.records import ON_CARD, Call, CallKind

_FREED, _WAITED = "free_requested", "free_completed"
_DEFAULT: tuple[int, tuple[int, ...]] = (0, (0, 0))


@dataclass(frozen=True)
class Events:
    """A history as events of memory.

    ``profile`` has an event for each allocation and each release that was asked for. ``pools`` has a number for each
    allocation, in order: that of its stream and pool, 0 for torch's default. ``waited`` are the allocations whose
    release had to wait for another stream. ``calls`` are (number of events before, kind).
    """

    profile: _torch.Profile
    pools: tuple[int, ...]
    waited: frozenset[int]
    calls: tuple[tuple[int, CallKind], ...]


def events_of(history: list[_torch.HistoryEvent], profile: _torch.Profile) -> Events:
    """Return a history with the profiler's calls.

    The profiler saw the same allocations at the same addresses, in blocks rather than as requested, and within calls.
    What it did not see, as it does not in threads that the step starts, is outside of all calls.
    """
    seen: defaultdict[tuple[int, bool], deque[_torch.MemoryEvent]] = defaultdict(deque)
    for event in profile.events:
        seen[event.address, event.bytes > 0].append(event)
    events, pools, calls = list[_torch.MemoryEvent](), list[int](), list[tuple[int, CallKind]]()
    numbers, live, waiting, waited = {_DEFAULT: 0}, dict[int, int](), dict[int, int](), set[int]()
    time = 0
    for index, row in enumerate(history):
        if row.action in ("alloc", _FREED):
            born = row.action == "alloc"
            known = seen[row.address, born]
            found = known.popleft() if known else None
            time = max(time, found.time) if found is not None else time
            mark, call = (found.mark, found.call) if found is not None else ("", -1)
            events.append(_torch.MemoryEvent(row.address, row.bytes if born else -row.bytes, time, mark, call))
            if born:
                live[row.address] = len(pools)
                pools.append(numbers.setdefault((row.stream, row.pool), len(numbers)))
            elif not _completed_at_once(history, index):
                waiting[row.address] = live.get(row.address, -1)
        elif row.action == _WAITED and row.address in waiting:
            waited.add(waiting.pop(row.address))
            calls.append((len(events), "synchronize"))
        elif row.action == "segment_free":
            calls.append((len(events), "empty_cache"))
    unique = tuple(dict.fromkeys(calls))
    return Events(replace(profile, events=events), tuple(pools), frozenset(waited), unique)


def _completed_at_once(history: list[_torch.HistoryEvent], index: int) -> bool:
    following = history[index + 1 : index + 2]
    return bool(following) and following[0].action == _WAITED and following[0].address == history[index].address


@dataclass(frozen=True)
class OnCard:
    """A joined step with its storages on the card, and what was asked of the allocator."""

    joined: Joined
    calls: tuple[Call, ...]


def on_card(joined: Joined, events: Events) -> OnCard:
    """Return a step as joined to a history, each call of the allocator at a tick of its own."""
    before = [number for number, _ in events.calls]
    calls = tuple(Call(number + 1 + place, kind) for place, (number, kind) in enumerate(events.calls))

    def later(tick: int) -> int:
        return tick + sum(1 for number in before if number < tick)

    storages = tuple(
        replace(
            one, device=ON_CARD, stream=events.pools[one.id], used_on=(-1,) if one.id in events.waited else (),
            born=later(one.born), died=None if one.died is None else later(one.died),
        )
        for one in joined.storages
    )  # fmt: skip
    ops = tuple(replace(op, start=later(op.start), end=later(op.end)) for op in joined.ops)
    steps = tuple(later(tick) for tick in joined.steps)
    moved = replace(joined, storages=storages, ops=ops, steps=steps, end=joined.end + len(calls))
    return OnCard(moved, calls)
