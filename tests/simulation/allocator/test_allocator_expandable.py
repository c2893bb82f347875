"""Expandable segments and given states, on examples worked by hand from torch's published rules."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from simulation.placed import FIRST, SECOND, THIRD, allocator, done

from memplan.errors import UsageError
from memplan.simulation.allocator.allocator import CachingAllocator, OutOfMemory
from memplan.simulation.allocator.settings import parse_settings
from memplan.simulation.timeline import DEFAULT_POOL, Block, Segment

MIB = 1 << 20
PRIVATE = (0, 1)


# Expandable segments


def test_a_segment_grows_by_pages() -> None:
    used = allocator("expandable_segments:True", total=80 << 30)
    a, b, c = used.malloc(2 * MIB), used.malloc(30 * MIB), used.malloc(5)
    assert (a, b, c) == (FIRST, FIRST + 2 * MIB, SECOND)
    assert done(used) == [
        ("segment_map", FIRST, 20 * MIB),
        ("alloc", FIRST, 2 * MIB),
        ("segment_map", FIRST + 20 * MIB, 20 * MIB),
        ("alloc", FIRST + 2 * MIB, 30 * MIB),
        ("segment_map", SECOND, 2 * MIB),
        ("alloc", SECOND, 5),
    ]
    large, small = used.segments()
    assert (large.size, large.expandable, large.small) == (40 * MIB, True, False)
    assert (small.size, small.expandable, small.small) == (2 * MIB, True, True)


def test_only_pages_without_a_block_go_back() -> None:
    used = allocator("expandable_segments:True", total=80 << 30)
    a, b, c = used.malloc(25 * MIB), used.malloc(50 * MIB), used.malloc(10 * MIB)
    used.free(b)  # 25 to 75 MiB: of the pages from 20, 40, 60 MiB, only the second is all free
    used.empty_cache()
    assert done(used)[-1] == ("segment_unmap", FIRST + 40 * MIB, 20 * MIB)
    assert [(segment.address - FIRST, segment.size // MIB) for segment in used.segments()] == [
        (0, 40),
        (60 * MIB, 40),
    ]
    # The gap is filled before the end is extended: from the free block before it on.
    assert used.malloc(45 * MIB) == a + 25 * MIB
    assert done(used)[-2] == ("segment_map", FIRST + 40 * MIB, 20 * MIB)
    used.free(a)
    used.free(c)
    used.free(a + 25 * MIB)
    used.empty_cache()
    assert (used.reserved, used.segments()) == (0, ())


@pytest.mark.parametrize(("first", "taken"), [(60, 120), (55, 0)])
def test_a_block_that_could_grow_counts_as_large_as_it_could_become(first: int, taken: int) -> None:
    """Of a range of 180 MiB, 140 have memory: the last 20 are free, and could become 60."""
    used = allocator("expandable_segments:True", total=160 << 20)
    a, _, _, d = (used.malloc(size * MIB) for size in (first, 80 - first, 40, 20))
    assert used.reserved == 140 * MIB
    used.free(a)
    used.free(d)
    assert used.malloc(15 * MIB) == FIRST + taken * MIB


def test_blocks_of_an_expandable_segment_are_cut_to_the_last_512_bytes() -> None:
    used = allocator("expandable_segments:True", total=80 << 30)
    used.malloc(20 * MIB - 512)
    assert used.allocated == 20 * MIB - 512


@pytest.mark.parametrize("pool", [DEFAULT_POOL, PRIVATE])
def test_what_was_mapped_before_the_device_ran_out_stays(pool: tuple[int, int]) -> None:
    used = allocator("expandable_segments:True", capacity=70 * MIB, total=80 << 30)
    _, b, c = (used.malloc(20 * MIB, pool=pool) for _ in range(3))
    used.free(b)
    assert used.unmap(b, 20 * MIB)
    used.free(c)  # now without memory from 20 to 40 MiB, free to 60, without memory from there on
    with pytest.raises(OutOfMemory) as caught:
        used.malloc(75 * MIB, pool=pool)
    found = [entry for entry in done(used)[-3:] if entry[0] != "free_completed"]
    if pool == PRIVATE:
        assert found[-2:] == [("segment_map", b, 20 * MIB), ("oom", 10 * MIB, 75 * MIB)]
        assert (caught.value.reserved, caught.value.largest_free) == (60 * MIB, 40 * MIB)
    else:  # all free pages go back before the second try
        assert found == [("segment_map", b, 20 * MIB), ("segment_unmap", b, 40 * MIB), ("oom", 50 * MIB, 75 * MIB)]
        assert (caught.value.reserved, caught.value.largest_free) == (20 * MIB, 0)


# States


def test_going_on_from_a_state() -> None:
    state = (
        Segment(
            4 * MIB,
            2 * MIB,
            0,
            True,
            DEFAULT_POOL,
            False,
            (
                Block(4 * MIB, 512, 5, "active_allocated", 1),
                Block(4 * MIB + 512, 1024, 1000, "active_pending_free", 2),
                Block(4 * MIB + 1536, 2 * MIB - 1536, 0, "inactive"),
            ),
        ),
        Segment(40 * MIB, 20 * MIB, 7, False, PRIVATE, False, (Block(40 * MIB, 20 * MIB, 9, "inactive"),)),
    )
    used = allocator()
    used.restore(state)
    assert used.log == []
    assert (used.allocated, used.active, used.requested, used.reserved) == (512, 1536, 1005, 22 * MIB)
    assert used.malloc(5) == 4 * MIB + 1536
    assert used.malloc(3 * MIB, stream=7, pool=PRIVATE) == 40 * MIB
    used.complete(4 * MIB + 512)
    used.free(4 * MIB)
    assert used.malloc(1500) == 4 * MIB
    with pytest.raises(UsageError, match="in use"):
        used.restore(state)


def test_going_on_from_expandable_segments() -> None:
    before = allocator("expandable_segments:True", total=80 << 30)
    held = [before.malloc(size * MIB) for size in (20, 20, 20, 30)]
    before.free(held[1])
    before.empty_cache()
    used = allocator("expandable_segments:True", total=80 << 30)
    used.restore(before.segments())
    assert used.segments() == before.segments()
    for size in (15, 40, 5):
        assert used.malloc(size * MIB) == before.malloc(size * MIB)
    assert used.segments() == before.segments()


def grown(address: int, *, stream: int = 0, pool: tuple[int, int] = DEFAULT_POOL) -> Segment:
    """One page of 20 MiB, in use."""
    blocks = (Block(address, 20 * MIB, 20 * MIB, "active_allocated"),)
    return Segment(address, 20 * MIB, stream, False, pool, True, blocks)


@pytest.mark.parametrize(
    ("other", "elsewhere"),
    [
        (grown(FIRST + 60 * MIB, stream=1), SECOND),
        (grown(FIRST + 60 * MIB, pool=PRIVATE), SECOND),
        (grown(FIRST + 70 * MIB), FIRST + 90 * MIB),  # no page of the first range begins there: a second one
        (replace(grown(FIRST + 60 * MIB), expandable=False), SECOND),
    ],
)
def test_a_range_of_addresses_ends_before_what_is_not_its_own(other: Segment, elsewhere: int) -> None:
    used = CachingAllocator(parse_settings("expandable_segments:True"), place=lambda size: SECOND)
    state = (grown(FIRST), other)
    used.restore(state)
    assert used.segments() == state
    assert used.malloc(41 * MIB) == elsewhere
    assert used.malloc(40 * MIB) == FIRST + 20 * MIB


def test_one_whole_block_is_released_before_any_page() -> None:
    """Pages that are free already serve no request where expandable segments are off."""
    page = replace(grown(FIRST), blocks=(Block(FIRST, 20 * MIB, 0, "inactive"),))
    whole = Segment(SECOND, 70 * MIB, 0, False, DEFAULT_POOL, False, (Block(SECOND, 70 * MIB, 0, "inactive"),))
    used = CachingAllocator(parse_settings("max_split_size_mb:64"), place=lambda size: THIRD, capacity=100 * MIB)
    used.restore((page, whole))
    used.malloc(15 * MIB)
    assert [action for action, _, _ in done(used)] == ["segment_free", "segment_alloc", "alloc"]
    assert used.reserved == 36 * MIB


def test_a_range_of_addresses_is_no_larger_than_torch_makes_it() -> None:
    used = CachingAllocator(parse_settings("expandable_segments:True"), place=lambda size: SECOND, total=60 * MIB)
    state = (grown(FIRST), grown(FIRST + 100 * MIB))  # 9/8 of 60 MiB are 4 pages
    used.restore(state)
    assert used.segments() == state
    assert used.malloc(61 * MIB) == SECOND
    assert used.malloc(60 * MIB) == FIRST + 20 * MIB


def test_free_blocks_that_touch_become_one() -> None:
    used = allocator()
    free = tuple(Block(k * MIB, MIB, 0, "inactive") for k in range(2))
    used.restore([Segment(0, 2 * MIB, 0, True, DEFAULT_POOL, False, free)])
    assert used.segments()[0].blocks == (Block(0, 2 * MIB, 0, "inactive"),)


def test_release_with_expandable_segments_among_the_free_ones() -> None:
    """As in torch's own tests: plain and expandable segments of 40 MiB under a limit of 120, then one of 120."""
    text = "max_split_size_mb:40"
    plain = allocator(text)
    plain.malloc(40 * MIB)
    plain.malloc(40 * MIB)
    expandable = CachingAllocator(parse_settings(f"expandable_segments:True,{text}"), place=lambda size: THIRD)
    expandable.malloc(40 * MIB)
    used = CachingAllocator(parse_settings(text), place=lambda size: 9 << 36, limit=120 * MIB)
    used.restore((*plain.segments(), *expandable.segments()))
    with pytest.raises(OutOfMemory):
        used.malloc(40 * MIB)
    for segment in used.segments():
        used.free(segment.address)
    assert used.malloc(120 * MIB) == 9 << 36
    assert [action for action, _, _ in done(used)[-5:]] == [
        "segment_free",
        "segment_free",
        "segment_unmap",
        "segment_alloc",
        "alloc",
    ]


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        ((), "no blocks"),
        ((Block(0, 512, 0, "inactive"),), "do not fill it"),
        ((Block(0, 512, 0, "inactive"), Block(1024, 2 * MIB - 1024, 0, "inactive")), "at 0x200"),
        ((Block(0, 3 * MIB, 0, "inactive"),), "do not fill it"),
        ((Block(0, 2 * MIB, 0, "inactive"), Block(2 * MIB, 512, 0, "inactive")), "do not fill it"),
    ],
)
def test_a_state_with_gaps_is_refused(blocks: tuple[Block, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        allocator().restore([Segment(0, 2 * MIB, 0, True, DEFAULT_POOL, False, blocks)])


def test_a_state_with_overlapping_segments_is_refused() -> None:
    whole = (Block(0, 2 * MIB, 0, "inactive"),)
    one = Segment(0, 2 * MIB, 0, True, DEFAULT_POOL, False, whole)
    with pytest.raises(UsageError, match="overlap"):
        allocator().restore([one, one])


def test_pages_taken_back_by_name() -> None:
    used = allocator("expandable_segments:True", total=80 << 30)
    a, b = used.malloc(40 * MIB), used.malloc(5 * MIB)
    assert used.unmap(FIRST, 20 * MIB) is False  # in use
    used.free(a)
    assert used.unmap(FIRST + 20 * MIB, 40 * MIB) is False  # beyond the free block
    assert used.unmap(FIRST + MIB, 20 * MIB) is False  # no page begins there
    assert used.unmap(FIRST + 20 * MIB, 20 * MIB) is True
    assert [(segment.address - FIRST, segment.size // MIB) for segment in used.segments()] == [
        (0, 20),
        (40 * MIB, 20),
    ]
    assert b == FIRST + 40 * MIB


def test_default_addresses_never_overlap() -> None:
    used = CachingAllocator(parse_settings("expandable_segments:True"))
    used.malloc(5)
    used.malloc(5 * MIB, stream=1)
    plain = CachingAllocator()
    for size in (5, 50 * MIB, 7 * MIB):
        plain.malloc(size)
    for segments in (used.segments(), plain.segments()):
        for before, after in pairwise(segments):
            assert before.address + before.size <= after.address
            assert after.address % (2 * MIB) == 0
