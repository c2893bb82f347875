"""What-ifs against a reference allocator that is given the same requests, and one worked out by hand."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from environment import thinned
from simulation.histories import MIB, A, B, Program, block, event, frame, out_of_memory, recorded, segment, written
from simulation.reference_allocator import ReferenceAllocator

from memplan.simulation.allocator.allocator import OutOfMemory
from memplan.simulation.allocator.device_memory import FIRST_ADDRESS
from memplan.simulation.allocator.settings import AllocatorSettings, parse_settings
from memplan.simulation.replays.replay import replay
from memplan.simulation.replays.side_by_side import cases
from memplan.simulation.replays.what_if import Capacity, recorded_capacity, what_if
from memplan.simulation.timeline import AllocatorEvent


def again(log: list[AllocatorEvent], settings: AllocatorSettings, capacity: int | None = None) -> list[tuple[int, int]]:
    """The same requests, given to the reference one by one; the levels up to the first that fails."""
    following = iter(range(1, 1 << 20))
    allocator = ReferenceAllocator(settings, lambda size: next(following) << 33, capacity=capacity, limit=None,
                                   total=1 << 32)  # fmt: skip
    where: dict[int, int] = {}
    waiting: set[int] = set()
    levels: list[tuple[int, int]] = []
    for index, done in enumerate(log):
        owner = done.owner or 0
        if done.action == "alloc":
            try:
                where[owner] = allocator.malloc(done.size, done.stream, done.pool, owner, index)
            except OutOfMemory:
                return levels
        elif done.action == "free_requested":
            if [row[:2] for row in log[index + 1 : index + 2]] != [("free_completed", done.address)]:
                allocator.record_stream(where[owner], 1234)
                waiting.add(owner)
            allocator.free(where[owner], index)
        elif done.action == "free_completed" and owner in waiting:
            waiting.remove(owner)
            if where[owner] in [used.address for used in allocator.blocks if used.pending and used.owner == owner]:
                allocator.complete(where[owner], index)
        elif done.action in ("segment_free", "segment_unmap") and log[index - 1].action != done.action:
            allocator.empty_cache(index)
        levels.append((allocator.allocated, allocator.reserved))
    return levels


@pytest.mark.parametrize("seed", thinned(range(6), 3))
@pytest.mark.parametrize(
    "conf",
    ["expandable_segments:True", "max_split_size_mb:24", "roundup_power2_divisions:2", "large_segment_size_mb:50"],
)
def test_other_settings_give_what_the_reference_gives(conf: str, seed: int) -> None:
    allocator = Program(seed=seed).run()
    log = allocator.log
    settings = parse_settings(conf)
    done = what_if(replay(written(log, allocator.segments())), settings)
    levels = again(log, settings)
    assert done.settings == settings
    assert not done.ooms
    assert (done.peak_allocated, done.peak_reserved) == tuple(max(column) for column in zip(*levels, strict=True))
    assert done.timeline.events[-1][1:] == levels[-1]


@pytest.mark.parametrize("seed", thinned(range(8), 4))
@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_a_smaller_card_fails_where_the_reference_fails(conf: str, seed: int) -> None:
    allocator = Program(seed=seed, largest=27).run()
    log = allocator.log
    settings = parse_settings(conf) if conf else AllocatorSettings()
    base = replay(written(log, allocator.segments()))
    failed = 0
    for share in (0.3, 0.6, 0.9, 1.0):
        capacity = int(base.peak_reserved * share)
        done = what_if(base, settings, capacity)
        levels = again(log, settings, capacity)
        assert done.fits == (len(levels) == len(log))
        if not done.fits:
            failed += 1
            assert done.ended
            assert done.ooms[0].index == len(levels)
            assert done.ooms[0].reserved <= capacity
        assert done.peak_allocated == max([0, *(level[0] for level in levels)])
    assert failed


@pytest.mark.parametrize("seed", range(6))
def test_the_recorded_settings_begin_with_the_recorded_state(seed: int) -> None:
    allocator = Program(seed=seed).run()
    rest = allocator.log[len(allocator.log) // 2 :]
    base = replay(written(rest, allocator.segments()))
    same = what_if(base)
    assert same.from_recorded_start
    assert not same.compared
    assert (same.peak_reserved, same.peak_allocated) == (base.peak_reserved, base.peak_allocated)
    assert same.timeline.events[0] == base.timeline.events[0]
    other = what_if(base, AllocatorSettings(expandable_segments=True))
    assert not other.from_recorded_start
    live = sum(b.size for s in base.start.segments for b in s.blocks if b.state == "active_allocated")
    assert other.timeline.events[0][1] == pytest.approx(live, rel=0.1)


# By hand


def test_an_out_of_memory_that_expandable_segments_would_have_spared() -> None:
    base = replay(out_of_memory())
    assert recorded_capacity(base) == Capacity(100 * MIB, True)
    same = what_if(base)
    assert same.capacity == 100 * MIB
    assert [(oom.index, oom.requested, oom.free) for oom in same.ooms] == [(16, 40 * MIB, 4 * MIB)]
    assert not same.ended  # it failed then, too, and the program went on
    spared = what_if(base, AllocatorSettings(expandable_segments=True))
    assert spared.fits
    assert spared.peak_reserved == 100 * MIB
    assert spared.peak_allocated == 96 * MIB
    assert spared.timeline.events[-1][1:] == (48 * MIB, 100 * MIB)  # what was tried is given back
    assert what_if(base, capacity=136 * MIB).fits  # 96 and a segment of 40
    assert not what_if(base, capacity=136 * MIB - 1).fits


def test_a_start_that_the_card_cannot_hold() -> None:
    end = [segment(A, block(30 * MIB, "active_allocated"), block(10 * MIB), block(10 * MIB, "active_allocated"))]
    base = replay({"segments": end, "device_traces": [[]]})
    exact = what_if(base, capacity=50 * MIB)
    assert (exact.fits, exact.from_recorded_start, exact.peak_reserved) == (True, True, 50 * MIB)
    tight = what_if(base, capacity=40 * MIB)  # anew, without the hole
    assert (tight.fits, tight.from_recorded_start, tight.peak_reserved) == (True, False, 40 * MIB)
    small = what_if(base, capacity=40 * MIB - 1)
    assert (small.fits, small.ended, small.ooms[0].index) == (False, True, -1)


def test_a_process_held_to_less_than_the_card() -> None:
    data = out_of_memory()
    data["device_traces"][0][-1]["device_free"] = 900 * MIB
    base = replay(data)
    assert recorded_capacity(base) == Capacity(96 * MIB, False)
    assert not what_if(base).fits


def test_what_the_card_had_left_is_not_recorded() -> None:
    data = out_of_memory()
    del data["device_traces"][0][-1]["device_free"]
    base = replay(data)
    assert base.ooms[0].free is None
    assert recorded_capacity(base) is None
    assert what_if(base, AllocatorSettings(expandable_segments=True)).capacity is None


def retried(*frames: list[dict[str, Any]]) -> dict[str, Any]:
    """20 MiB go back, then 30 are taken; with the stacks of the two events."""
    first, second = frames or ([], [])
    trace = [
        event("segment_free", A, 20 * MIB, frames=first),
        event("segment_alloc", B, 30 * MIB, frames=second),
        event("alloc", B, 30 * MIB, frames=second),
    ]
    return {"segments": [segment(B, block(30 * MIB, "active_allocated"))], "device_traces": [trace]}


@pytest.mark.parametrize(
    ("frames", "asked"),
    [
        ((), True),  # nobody can say
        (([frame("a.py", 1, "f")], [frame("a.py", 1, "f")]), False),  # in the middle of the request
        (([frame("a.py", 1, "f")], [frame("a.py", 2, "f")]), True),
        (([frame("torch/cuda/memory.py", 1, "empty_cache")], [frame("a.py", 2, "f")]), True),
    ],
)
def test_what_went_back_for_a_request_was_not_asked_for(frames: Any, asked: bool) -> None:
    """On an endless card the allocator gives nothing back by itself."""
    done = what_if(replay(retried(*frames)))
    assert done.timeline.events[-1][2] == (30 * MIB if asked else 50 * MIB)


def test_streams_that_were_waited_for_early_are_not_waited_for_again() -> None:
    """On a small card the allocator waits for a block, and gives its segment back; then the recorded wait comes."""
    trace = [
        event("segment_alloc", A, 40 * MIB),
        event("alloc", A, 40 * MIB),
        event("free_requested", A, 40 * MIB),
        event("segment_alloc", B, 50 * MIB),
        event("alloc", B, 50 * MIB),
        event("free_completed", A, 40 * MIB),
    ]
    end = [segment(A, block(40 * MIB)), segment(B, block(50 * MIB, "active_allocated"))]
    base = replay({"segments": end, "device_traces": [trace]})
    assert base.mismatches == []
    assert base.peak_reserved == 90 * MIB
    small = what_if(base, capacity=60 * MIB)
    assert small.fits
    assert small.peak_reserved == 50 * MIB


def test_recorded_settings_can_be_named() -> None:
    settings = AllocatorSettings(expandable_segments=True)
    allocator = Program(settings).run()
    base = replay(written(allocator.log, allocator.segments(), recorded(settings)))
    assert what_if(base, settings).from_recorded_start
    assert what_if(base, AllocatorSettings()).settings == AllocatorSettings()


def test_the_largest_sizes_that_are_read_are_replayed() -> None:
    """All of a snapshot together are of 2**62 bytes at most."""
    sizes = ((A, 513), (A + 70 * MIB, (1 << 62) - (2 << 30)), (A + 200 * MIB, 3 * MIB))
    events = [event("alloc", address, size) for address, size in sizes]
    events.append({"action": "oom", "device_free": 100 * MIB, "size": 1 << 30})
    found = cases(replay({"segments": [], "device_traces": [events]}))
    assert found.explanation is not None
    assert found.explanation.oom.requested == 1 << 30


@pytest.mark.parametrize("expandable", [False, True])
def test_new_segments_lie_beside_those_of_the_start(expandable: bool) -> None:
    """The recorded ones lie where new ones would be put first: no two pieces of memory may share an address."""
    first = FIRST_ADDRESS
    held = [segment(first + at * 64 * MIB, block(20 * MIB, "active_allocated")) | {"is_expandable": expandable}
            for at in range(3)]  # fmt: skip
    trace = [event("segment_alloc", first + 512 * MIB, 40 * MIB), event("alloc", first + 512 * MIB, 40 * MIB)]
    held.append(segment(first + 512 * MIB, block(40 * MIB, "active_allocated")))
    done = what_if(replay({"segments": held, "device_traces": [trace]}), capacity=1 << 30)
    ends = [(one.address, one.address + one.size) for one in done.timeline.segments]
    assert len(ends) == 4
    assert done.from_recorded_start
    assert all(end <= start for (_, end), (start, _) in pairwise(ends))
