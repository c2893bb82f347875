"""torch's memory history of a run as what the profiler saw of it, in the history's order and sizes."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, replace

from memplan import _torch
from memplan._bytes import round_to_blocks
from memplan.trace.recording.join_events import Joined
from memplan.trace.records import ON_CARD, Call, CallKind

_FREED, _WAITED = "free_requested", "free_completed"
"""Bytes: the caching allocator gives out multiples of these."""
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


@dataclass
class _Life:
    """What the profiler saw of one allocation."""

    born: _torch.MemoryEvent | None = None
    died: _torch.MemoryEvent | None = None


def _lives(profile: _torch.Profile) -> defaultdict[int, deque[_Life]]:
    """Return the allocations at each address, in order."""
    seen: defaultdict[int, deque[_Life]] = defaultdict(deque)
    for event in profile.events:
        lives = seen[event.address]
        if event.bytes > 0:
            lives.append(_Life(event))
        elif lives and lives[-1].died is None:
            lives[-1].died = event
    return seen


def _size(life: _Life) -> int:
    return 0 if life.born is None else life.born.bytes


def events_of(history: list[_torch.HistoryEvent], profile: _torch.Profile) -> Events:
    """Return a history with the profiler's calls.

    The profiler saw the same allocations at the same addresses, in blocks rather than as requested, and within calls.
    What it did not see, as it does not in threads that the step starts, is outside of all calls; of some allocations
    it does not see the release.
    """
    seen = _lives(profile)
    events, pools, calls = list[_torch.MemoryEvent](), list[int](), list[tuple[int, CallKind]]()
    open_now = dict[int, _Life]()
    numbers, live, waiting, waited = {_DEFAULT: 0}, dict[int, int](), dict[int, int](), set[int]()
    time = 0
    for index, row in enumerate(history):
        if row.action in ("alloc", _FREED):
            born = row.action == "alloc"
            if born:
                known = seen[row.address]
                matches = bool(known) and _size(known[0]) == round_to_blocks(max(row.bytes, 1))
                open_now[row.address] = life = known.popleft() if matches else _Life()
            else:
                life = open_now.pop(row.address, _Life())
            found = life.born if born else life.died
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
