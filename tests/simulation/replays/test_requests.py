"""Which events of a history are requests, by hand."""

from __future__ import annotations

from typing import Any

from simulation.histories import MIB, A, B, C, block, event, frame, freed, segment

from memplan.simulation.replays.initial_state import rewind
from memplan.simulation.replays.requests import Request, requests_of
from memplan.simulation.snapshots.read import read_snapshot


def requests(trace: list[dict[str, Any]], *segments: dict[str, Any]) -> list[Request | None]:
    snapshot = read_snapshot({"segments": [*segments], "device_traces": [trace]})
    return requests_of(snapshot, rewind(snapshot))


def test_blocks_are_named_by_the_event_that_allocated_them() -> None:
    trace = [
        *freed(A, 5 * MIB),  # was there: numbered behind the events
        event("alloc", A, 3 * MIB, stream=4),
        event("free_requested", A, 3 * MIB),
        event("alloc", A + 3 * MIB, 2 * MIB),
        event("free_completed", A, 3 * MIB),
    ]
    end = segment(A, block(3 * MIB), block(2 * MIB, "active_allocated"), block(15 * MIB))
    assert requests(trace, end) == [
        Request("free", 0, 6),
        None,
        Request("alloc", 2, 2, 3 * MIB, 4),
        Request("free_later", 3, 2),
        Request("alloc", 4, 4, 2 * MIB),
        Request("complete", 5, 2),
    ]


def test_a_run_of_memory_given_back_is_one_request() -> None:
    trace = [
        event("segment_free", A, 20 * MIB),
        event("segment_free", B, 20 * MIB),
        event("segment_alloc", C, 20 * MIB),
        event("segment_free", C, 20 * MIB),
        {"action": "oom", "size": 512, "device_free": 0},
    ]
    assert requests(trace) == [Request("empty_cache", 0), None, None, None, Request("oom", 4, size=512)]


def test_what_empty_cache_gives_back_is_asked_for_even_right_before_an_out_of_memory() -> None:
    oom = {"action": "oom", "size": 512, "device_free": 0}
    assert requests([event("segment_free", A, 20 * MIB), oom])[0] is None
    frames = [frame("torch/cuda/memory.py", 3, "empty_cache")]
    assert requests([event("segment_free", A, 20 * MIB, frames=frames), oom])[0] == Request("empty_cache", 0)


def test_the_pool_is_that_of_the_segment_where_it_is_not_recorded() -> None:
    live = block(2 * MIB, "active_allocated")
    trace = [
        event("alloc", A, 2 * MIB),
        event("segment_free", B, 20 * MIB),
        event("segment_alloc", B, 20 * MIB),  # the graph's segment lies where another one had been
        event("alloc", B, 2 * MIB),
        event("alloc", C, 2 * MIB, pool_id=(0, 9)),
        event("alloc", C + 2 * MIB, 2 * MIB),
    ]
    found = requests(
        trace,
        segment(A, live, block(18 * MIB), segment_pool_id=(0, 1)),
        segment(B, live, block(18 * MIB), segment_pool_id=(0, 2)),
        segment(C, live, live, block(16 * MIB)),
    )
    assert [row.pool for row in found if row and row.kind == "alloc"] == [(0, 1), (0, 2), (0, 9), (0, 0)]


def test_what_contradicts_itself_is_no_request() -> None:
    trace = [*freed(B, 5), event("free_requested", A, 512), event("free_requested", A, 512)]
    end = segment(A, block(2 * MIB, "active_pending_free"))
    assert requests(trace, end) == [None, None, Request("free_later", 2, 4), None]
