"""The start of a history, worked out by hand: where each block was, how large, and of which pool its segment."""

from __future__ import annotations

from typing import Any

import pytest
from environment import examples, slow
from simulation.histories import MIB, A, B, Program, block, event, freed, recorded, segment, written

from memplan.simulation.allocator.settings import parse_settings
from memplan.simulation.replays.initial_state import Start, rewind
from memplan.simulation.snapshots.read import read_snapshot
from memplan.simulation.timeline import Block, Segment

KIB = 1024


def start_of(segments: list[dict[str, Any]], trace: list[dict[str, Any]], conf: str = "") -> Start:
    data = {
        "segments": segments,
        "device_traces": [trace],
        "allocator_settings": recorded(parse_settings(conf)),
    }
    return rewind(read_snapshot(data))


def blocks_of(start: Start) -> list[tuple[int, int, int, str]]:
    return [
        ((b.address - A) // KIB, b.size // KIB, b.requested, b.state.removeprefix("active_"))
        for held in start.segments
        for b in held.blocks
    ]


def test_nothing_happened() -> None:
    start = start_of([segment(A, block(3 * MIB, "active_allocated", 2_900_000), block(17 * MIB))], [])
    assert blocks_of(start) == [(0, 3072, 2_900_000, "allocated"), (3072, 17 * KIB, 0, "inactive")]


def test_blocks_come_and_go() -> None:
    end = [segment(A, block(5 * MIB), block(4 * MIB, "active_allocated"), block(11 * MIB))]
    trace = [
        *freed(A, 2 * MIB),  # was there at the start
        event("alloc", A, 5 * MIB),
        event("alloc", A + 5 * MIB, 4 * MIB),
        *freed(A, 5 * MIB),
    ]
    assert blocks_of(start_of(end, trace)) == [(0, 2048, 2 * MIB, "allocated"), (2048, 18 * KIB, 0, "inactive")]


def test_segments_come_and_go() -> None:
    end = [segment(B, block(20 * MIB))]
    trace = [
        *freed(A, 2 * MIB),
        event("segment_free", A, 20 * MIB),
        event("segment_alloc", B, 20 * MIB),
        event("alloc", B, 2 * MIB),
        *freed(B, 2 * MIB),
        *freed(A - 2 * MIB, 600),
        event("segment_free", A - 2 * MIB, 2 * MIB),
    ]
    start = start_of(end, trace)
    assert [(s.address, s.size, s.small) for s in start.segments] == [
        (A - 2 * MIB, 2 * MIB, True),
        (A, 20 * MIB, False),
    ]


@pytest.mark.parametrize(
    ("conf", "gap", "size"),
    [
        ("", 1 * MIB, 3 * MIB),  # no free block of the large pool is so small
        ("", 1 * MIB + 512, 2 * MIB),
        ("", 17 * MIB, 2 * MIB),
        ("expandable_segments:True", 1 * MIB, 2 * MIB),  # there every gap is free
        ("max_split_size_mb:20", 1 * MIB, 3 * MIB),
    ],
)
def test_a_gap_that_is_too_little_belongs_to_the_block_in_front(conf: str, gap: int, size: int) -> None:
    end = [segment(A, block(2 * MIB + gap), block(20 * MIB - gap, "active_allocated"))]
    start = start_of(end, freed(A, 2 * MIB), conf)
    assert start.segments[0].blocks[0] == Block(A, size, 2 * MIB, "active_allocated", 2)


def test_a_gap_is_seen_at_any_time_of_the_blocks_life() -> None:
    end = [segment(A, block(50 * MIB))]
    trace = [
        event("alloc", A + 3 * MIB - 512, 10 * MIB),  # so the first block ends there
        *freed(A + 3 * MIB - 512, 10 * MIB),
        *freed(A, 2 * MIB + 100),
    ]
    start = start_of(end, trace)
    assert start.segments[0].blocks[0].size == 3 * MIB - 512
    assert start.uncertain == frozenset()


def test_a_block_above_the_split_limit_is_all_of_its_segment() -> None:
    end = [segment(A, block(62 * MIB))]
    assert start_of(end, freed(A, 58 * MIB), "max_split_size_mb:40").segments[0].blocks[0].size == 62 * MIB
    start = start_of(end, freed(A, 58 * MIB))
    assert start.segments[0].blocks[0].size == 58 * MIB
    assert start.uncertain == {2}


def test_requests_round_as_the_settings_say() -> None:
    end = [segment(A, block(2 * MIB))]
    start = start_of(end, freed(A, 1200), "roundup_power2_divisions:2")
    assert start.segments[0].blocks[0].size == 1536
    start = start_of(end, freed(A, 2100), "roundup_power2_divisions:2")
    assert start.segments[0].blocks[0].size == 3072


def test_a_block_still_used_on_another_stream() -> None:
    end = [segment(A, block(2 * MIB, "active_pending_free"))]
    assert start_of(end, [event("free_requested", A, 2 * MIB)]).segments[0].blocks[0].state == "active_allocated"
    end = [segment(A, block(2 * MIB))]
    assert start_of(end, [event("free_completed", A, 2 * MIB)]).segments[0].blocks[0].state == "active_pending_free"


def test_pages_come_and_go() -> None:
    page = 20 * MIB
    end = [segment(A + 2 * page, block(2 * page), is_expandable=True)]
    trace = [
        event("segment_unmap", A, page),  # of a segment that reached up to the third page
        event("segment_map", A + page, page),
        event("segment_unmap", A + page, page),
        event("segment_map", A + 3 * page, page),
    ]
    start = start_of(end, trace)
    assert [(s.address, s.size, s.expandable) for s in start.segments] == [
        (A, page, True),
        (A + 2 * page, page, True),
    ]
    assert start.below == ()


def test_the_blocks_seen_in_it_tell_the_pool_of_a_segment() -> None:
    """20 MiB look like a page of the large pool; ten pages of the small one are as much."""
    start = start_of([], [*freed(A, 512), event("segment_unmap", A, 20 * MIB)], "expandable_segments:True")
    assert [s.small for s in start.segments] == [True]
    start = start_of([], [*freed(A, 2 * MIB), event("segment_unmap", A, 20 * MIB)], "expandable_segments:True")
    assert [s.small for s in start.segments] == [False]


def test_pages_below_the_first_are_reserved() -> None:
    page = 20 * MIB
    end = [segment(A, block(2 * page), is_expandable=True)]
    start = start_of(end, [event("segment_map", A, page)])
    assert [s.address for s in start.segments] == [A + page]
    assert [(s.address, s.size) for s in start.below] == [(A, page)]
    allocator = start.allocator(parse_settings("expandable_segments:True"))
    assert (allocator.reserved, allocator.log) == (page, [])
    assert allocator.malloc(2 * page) == A


def test_a_history_that_contradicts_itself_is_told() -> None:
    end = [segment(A, block(20 * MIB, "active_allocated"))]
    trace = [
        event("alloc", B, 512),
        event("free_requested", B, 512),
        event("free_completed", A, 512),
        event("free_completed", B, 512),
        event("segment_alloc", B, 512),
        event("segment_alloc", A, 20 * MIB),
        event("segment_free", A + MIB, 2 * MIB),
        event("segment_map", B, 2 * MIB),
    ]
    assert [index for index, _ in start_of(end, trace).conflicts] == [0, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("conf", ["", "expandable_segments:True", "max_split_size_mb:40", "roundup_power2_divisions:4"])
def test_from_the_first_event_on_there_was_nothing(conf: str) -> None:
    """A random program, from an allocator that held nothing: undone, nothing must be left."""
    for seed in range(examples(10)):
        settings = parse_settings(conf)
        allocator = Program(settings, seed).run()
        start = rewind(read_snapshot(written(allocator.log, allocator.segments(), recorded(settings))))
        assert start == Start((), (), ())


@pytest.mark.parametrize("conf", ["expandable_segments:True", *slow("", "roundup_power2_divisions:4")])
def test_from_any_event_on_it_is_what_was_held_then(conf: str) -> None:
    """Blocks in use: all, with their requests. Segments: all, with their pools, as the program never ran out."""
    settings = parse_settings(conf)
    for seed in range(examples(10)):
        whole = Program(settings, seed, length=300)
        first = Program(settings, seed, length=100).run()
        allocator = whole.run()
        assert allocator.log[: len(first.log)] == first.log
        rest = allocator.log[len(first.log) :]
        start = rewind(read_snapshot(written(rest, allocator.segments(), recorded(settings))))
        assert outline(start.segments) == outline(first.segments())


def outline(segments: tuple[Segment, ...]) -> list[tuple[object, ...]]:
    return [
        (
            s.address,
            s.size,
            s.stream,
            s.small,
            s.pool,
            [(b.address, b.requested, b.state) for b in s.blocks if b.requested],
        )
        for s in segments
    ]
