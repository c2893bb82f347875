"""torch's history gives the order, the sizes and the pools; the profiler only says within which calls."""

from __future__ import annotations

from memplan import _torch
from memplan.trace.card_run.history import events_of, on_card
from memplan.trace.recording.causes import StepParts
from memplan.trace.records import Call, Storage

POOL = (0, 0)


def event(action: str, address: int, size: int, stream: int = 0, pool: tuple[int, ...] = POOL) -> _torch.HistoryEvent:
    return _torch.HistoryEvent(action, address, size, stream, pool)


def freed(address: int, size: int, stream: int = 0) -> list[_torch.HistoryEvent]:
    return [event("free_requested", address, size, stream), event("free_completed", address, size, stream)]


def test_sizes_are_as_requested_and_calls_are_the_profilers() -> None:
    seen = [_torch.MemoryEvent(512, 1024, 10, "", 3), _torch.MemoryEvent(512, -1024, 20, "", 4)]
    found = events_of([event("segment_alloc", 512, 2048), event("alloc", 512, 700), *freed(512, 700)],
                      _torch.Profile(seen, [], {}))  # fmt: skip
    assert [(one.bytes, one.call, one.time) for one in found.profile.events] == [(700, 3, 10), (-700, 4, 20)]
    assert (found.pools, found.awaited_frees, found.calls) == ((0,), frozenset(), ())


def test_what_another_thread_allocates_is_outside_of_all_calls() -> None:
    found = events_of([event("alloc", 512, 8)], _torch.Profile([], [], {}))
    assert [(one.call, one.bytes) for one in found.profile.events] == [(-1, 8)]


def test_streams_and_private_pools_are_told_apart() -> None:
    rows = [event("alloc", 512, 8), event("alloc", 1024, 8, 77), event("alloc", 2048, 8, 0, (0, 1))]
    assert events_of(rows, _torch.Profile([], [], {})).pools == (0, 1, 2)


def test_segments_that_are_given_back_are_a_call_of_its_own_tick() -> None:
    rows = [event("alloc", 512, 8), *freed(512, 8), event("segment_free", 512, 2048), event("alloc", 4096, 16)]
    found = events_of(rows, _torch.Profile([], [], {}))
    assert found.calls == ((2, "empty_cache"),)
    moved = on_card(parts((1, 2), (3, None)), found)
    assert moved.calls == (Call(3, "empty_cache"),)
    assert [(one.born, one.died) for one in moved.parts.storages] == [(1, 2), (4, None)]
    assert (moved.parts.end, moved.parts.steps) == (4, (0,))


def test_a_release_that_waits_for_a_stream_ends_when_it_is_completed() -> None:
    first = [event("alloc", 512, 8), event("free_requested", 512, 8)]
    rows = [*first, event("alloc", 4096, 16), event("free_completed", 512, 8)]
    found = events_of(rows, _torch.Profile([], [], {}))
    assert (found.calls, found.awaited_frees) == (((3, "synchronize"),), frozenset({0}))
    moved = on_card(parts((1, 2), (3, None)), found)
    assert [bool(one.used_on) for one in moved.parts.storages] == [True, False]
    assert moved.calls == (Call(4, "synchronize"),)


def parts(*lives: tuple[int, int | None]) -> StepParts:
    storages = tuple(Storage(number, 8, "input", *life) for number, life in enumerate(lives))
    return StepParts(ops=(), storages=storages, layers=(), steps=(0,), end=3)


def test_a_release_that_the_profiler_did_not_see_takes_nobody_elses_time() -> None:
    """The second block at an address is freed much later: that is not when the first was."""
    seen = [_torch.MemoryEvent(512, 512, 10, "", 1), _torch.MemoryEvent(512, 512, 20, "", 2),
            _torch.MemoryEvent(1024, 512, 30, "", 3), _torch.MemoryEvent(512, -512, 90, "", 4)]  # fmt: skip
    rows = [event("alloc", 512, 8), *freed(512, 8), event("alloc", 512, 16), event("alloc", 1024, 8), *freed(512, 16)]
    found = events_of(rows, _torch.Profile(seen, [], {})).profile.events
    assert [(one.bytes, one.time, one.call) for one in found] == [
        (8, 10, 1), (-8, 10, -1), (16, 20, 2), (8, 30, 3), (-16, 90, 4)
    ]  # fmt: skip


def test_a_block_that_the_profiler_did_not_see_takes_nobody_elses_call() -> None:
    seen = [_torch.MemoryEvent(512, 1024, 20, "", 2)]
    rows = [event("alloc", 512, 8), *freed(512, 8), event("alloc", 512, 1000)]
    assert [one.call for one in events_of(rows, _torch.Profile(seen, [], {})).profile.events] == [-1, -1, 2]
