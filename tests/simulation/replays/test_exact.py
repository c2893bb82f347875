"""What happens when memory runs out, and when torch and the replay have come apart."""

from __future__ import annotations

from typing import Any

import pytest
from simulation.histories import BASE, MIB, A, B, C, block, event, recorded, segment, written
from simulation.reference_allocator import ReferenceAllocator

from memplan.simulation.allocator.allocator import OutOfMemory
from memplan.simulation.allocator.settings import AllocatorSettings
from memplan.simulation.replays.replay import replay
from memplan.simulation.timeline import Pool

EXPANDABLE = AllocatorSettings(expandable_segments=True)


def reference(capacity: int, settings: AllocatorSettings = EXPANDABLE) -> ReferenceAllocator:
    following = iter(range(1, 100))
    return ReferenceAllocator(
        settings, lambda size: BASE + next(following) * (1 << 33), capacity=capacity, limit=None, total=1 << 32
    )


def actions(allocator: ReferenceAllocator, begin: int) -> list[str]:
    return [row.action for row in allocator.log[begin:]]


def with_a_hole(allocator: ReferenceAllocator, pool: Pool) -> None:
    """Four blocks of a page; the second page is given back, the last two are free: a hole, then free, then the end."""
    blocks = [allocator.malloc(20 * MIB, 0, pool, k, 0) for k in range(4)]
    allocator.retire(pool)
    allocator.free(blocks[1], 0)
    allocator.empty_cache(0)
    allocator.free(blocks[2], 0)
    allocator.free(blocks[3], 0)


def test_pages_of_an_attempt_that_failed_go_back_with_the_others() -> None:
    """90 MiB would need the hole and two pages more, which are cached for another stream."""
    allocator = reference(120 * MIB)
    with_a_hole(allocator, (0, 0))
    allocator.free(allocator.malloc(40 * MIB, 5, (0, 0), 9, 0), 0)
    begin = len(allocator.log)
    allocator.malloc(90 * MIB, 0, (0, 0), 10, 0)
    assert actions(allocator, begin) == ["segment_map", "segment_unmap", "segment_unmap", "segment_map", "alloc"]
    data = written(allocator.log, allocator.segments(), recorded(EXPANDABLE))
    assert replay(data).mismatches == []
    data["device_traces"][0][begin + 1]["size"] -= 20 * MIB
    assert replay(data).mismatches != []


def test_pages_of_an_attempt_that_failed_stay_where_nothing_is_released() -> None:
    """For a graph's pool torch releases nothing: out of memory, and the hole is filled."""
    allocator = reference(80 * MIB)
    with_a_hole(allocator, (0, 1))
    begin = len(allocator.log)
    with pytest.raises(OutOfMemory):
        allocator.malloc(90 * MIB, 0, (0, 1), 10, 0)
    allocator.malloc(10 * MIB, 0, (0, 1), 11, 0)
    assert actions(allocator, begin) == ["segment_map", "oom", "alloc"]
    data = written(allocator.log, allocator.segments(), recorded(EXPANDABLE))
    done = replay(data)
    assert done.mismatches == []
    assert (done.ooms[0].reserved, done.timeline.events[-1][2]) == (80 * MIB, 80 * MIB)


def test_blocks_that_became_free_on_the_way_are_not_looked_at_again() -> None:
    """Torch waits for other streams, releases what is unused, and then takes new memory; a free block would serve."""
    allocator = reference(70 * MIB, AllocatorSettings())
    whole = allocator.malloc(40 * MIB, 0, (0, 0), 0, 0)
    allocator.free(whole, 0)
    waiting = allocator.malloc(30 * MIB, 0, (0, 0), 1, 0)
    allocator.malloc(9 * MIB, 0, (0, 0), 2, 0)  # beside it
    allocator.free(allocator.malloc(20 * MIB, 5, (0, 0), 3, 0), 0)
    allocator.record_stream(waiting, 5)
    allocator.free(waiting, 0)
    begin = len(allocator.log)
    allocator.malloc(25 * MIB, 0, (0, 0), 4, 0)
    assert actions(allocator, begin) == ["free_completed", "segment_free", "segment_alloc", "alloc"]
    assert replay(written(allocator.log, allocator.segments())).mismatches == []


def test_segments_of_a_graph_that_is_gone_go_back() -> None:
    trace = [event("segment_free", A, 20 * MIB, pool_id=(0, 1)), event("segment_free", B, 20 * MIB)]
    assert replay({"segments": [], "device_traces": [trace]}).mismatches == []


def test_a_segment_in_use_that_torch_gave_back_is_told() -> None:
    """Of two free segments torch is said to have used the other one, and to have given back the first."""
    trace: list[dict[str, Any]] = [
        event("alloc", B, 20 * MIB),
        event("segment_free", A, 20 * MIB),
        event("segment_alloc", C, 20 * MIB),
    ]
    end = [segment(B, block(20 * MIB, "active_allocated")), segment(C, block(20 * MIB))]
    told = [str(mismatch) for mismatch in replay({"segments": end, "device_traces": [trace]}).mismatches]
    assert told[0] == f"event 0, address: recorded {B:#x}, replayed {A:#x}"
    assert f"event 1, segment: recorded segment_free of 20971520 bytes at {A:#x}, replayed not all free" in told


def test_free_memory_that_would_have_served_is_told() -> None:
    oom = {"action": "oom", "device_free": 0, "size": 5 * MIB, "stream": 0}
    end = [segment(A, block(3 * MIB, "active_allocated"), block(17 * MIB))]
    assert [str(mismatch) for mismatch in replay({"segments": end, "device_traces": [[oom]]}).mismatches] == [
        f"event 0, free: recorded out of memory, replayed {17 * MIB} bytes at {A + 3 * MIB:#x}"
    ]
    assert replay({"segments": end, "device_traces": [[oom | {"stream": 3}]]}).mismatches == []
    assert replay({"segments": end, "device_traces": [[oom | {"size": 18 * MIB}]]}).mismatches == []
