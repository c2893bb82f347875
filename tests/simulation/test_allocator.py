"""The caching allocator on examples worked by hand from torch's published rules."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from itertools import pairwise

import pytest

from memplan.errors import UsageError
from memplan.simulation.allocator import CachingAllocator, OutOfMemory
from memplan.simulation.model import DEFAULT_POOL, AllocatorEvent, Block, Segment
from memplan.simulation.settings import parse_settings
from memplan.simulation.sizes import block_size, next_division, segment_size

MIB = 1 << 20
PRIVATE = (0, 1)


def allocator(text: str = "", **options: int | None) -> CachingAllocator:
    """One whose n-th segment begins n * 64 GiB from zero."""
    return CachingAllocator(parse_settings(text), place=places(), **options)


def places() -> Callable[[int], int]:
    made = 0

    def place(size: int) -> int:
        nonlocal made
        made += 1
        return made << 36

    return place


FIRST, SECOND, THIRD = 1 << 36, 2 << 36, 3 << 36


def done(used: CachingAllocator) -> list[tuple[str, int, int]]:
    return [(event.action, event.address, event.size) for event in used.log]


# Sizes


@pytest.mark.parametrize(
    ("asked", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB, 10 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (20 * MIB, 20 * MIB, 20 * MIB),
        (100_000_000, 100_000_256, 96 * MIB),
    ],
)
def test_a_first_request(asked: int, block: int, segment: int) -> None:
    used = allocator()
    used.malloc(asked)
    # In the large pool, a rest of at most 1 MiB stays with the block.
    kept = segment if segment > 2 * MIB and segment - block <= MIB else block
    assert (used.requested, used.allocated, used.reserved) == (asked, kept, segment)


def test_nothing_is_asked_for() -> None:
    used = allocator()
    assert used.malloc(0) == 0
    used.free(0)
    used.record_stream(0, 1)
    assert used.log == []
    with pytest.raises(UsageError, match="-1 bytes"):
        used.malloc(-1)


def test_divisions_of_powers_of_two() -> None:
    """The example in torch's notes: 1200 with 4 divisions lies between 1024, 1280, 1536, 1792."""
    assert next_division(1200, 4) == 1280
    assert [next_division(size, 4) for size in (1024, 1025, 1280, 1793, 2047)] == [1024, 1280, 1280, 2048, 2048]
    settings = parse_settings("roundup_power2_divisions:4")
    # Up to 512 bytes a division, 512 bytes are the step all the same.
    assert [block_size(settings, size) for size in (1, 1200, 2048, 2049, 5000)] == [512, 1536, 2048, 2560, 5120]
    assert block_size(settings, 33 * MIB) == 40 * MIB
    assert segment_size(settings, block_size(settings, 9 * MIB)) == 10 * MIB


def test_divisions_by_size() -> None:
    settings = parse_settings("roundup_power2_divisions:[64:1,128:2,>:4]")
    sizes = [(70 << 20) + 1, (130 << 20) + 1, (300 << 20) + 1]
    assert [block_size(settings, size) for size in sizes] == [(70 << 20) + 512, 192 << 20, 320 << 20]


def test_divisions_as_in_torchs_own_tests() -> None:
    """84 MiB by 4 and by 8, and 400 MiB by 2."""
    assert block_size(parse_settings("roundup_power2_divisions:4"), 84 * MIB) == 96 * MIB
    settings = parse_settings("roundup_power2_divisions:[64:8,128:2,256:2,512:2,1024:1,>:1]")
    assert block_size(settings, 84 * MIB) == 88 * MIB
    assert block_size(settings, 400 * MIB) == 512 * MIB


def test_large_segments_of_another_size() -> None:
    used = allocator("large_segment_size_mb:12")
    used.malloc(2 * MIB)
    used.malloc(11 * MIB)
    assert [(action, size) for action, _, size in done(used)] == [
        ("segment_alloc", 12 * MIB),
        ("alloc", 2 * MIB),
        ("segment_alloc", 12 * MIB),
        ("alloc", 11 * MIB),
    ]


# Finding, cutting, merging


def test_blocks_are_cut_from_the_front_and_merged_again() -> None:
    used = allocator()
    a, b, c = used.malloc(2 * MIB), used.malloc(3 * MIB, owner=7), used.malloc(4 * MIB)
    assert (a, b, c) == (FIRST, FIRST + 2 * MIB, FIRST + 5 * MIB)
    used.free(a)
    used.free(c)
    assert used.segments() == (
        Segment(
            FIRST,
            20 * MIB,
            0,
            False,
            DEFAULT_POOL,
            False,
            (
                Block(FIRST, 2 * MIB, 0, "inactive"),
                Block(b, 3 * MIB, 3 * MIB, "active_allocated", 7),
                Block(c, 15 * MIB, 0, "inactive"),
            ),
        ),
    )
    used.free(b)
    assert used.segments()[0].blocks == (Block(FIRST, 20 * MIB, 0, "inactive"),)
    assert (used.allocated, used.active, used.requested, used.reserved) == (0, 0, 0, 20 * MIB)


def test_the_smallest_block_that_fits_at_the_lowest_address() -> None:
    used = allocator()
    held = [used.malloc(size * MIB) for size in (3, 1, 1, 2, 2, 2, 2, 4)]  # the ones are of the small pool
    large = [held[0], *held[3:]]
    assert [address - FIRST for address in large] == [0, 3 * MIB, 5 * MIB, 7 * MIB, 9 * MIB, 11 * MIB]
    for address in (large[0], large[2], large[4]):  # 3 MiB, 2 MiB, 2 MiB free; 5 MiB behind the last
        used.free(address)
    assert used.malloc(2 * MIB - 5) == large[2]
    assert used.malloc(2 * MIB) == large[4]
    assert used.malloc(2 * MIB) == large[0]  # whole, since no more than 1 MiB would be left
    assert used.malloc(4 * MIB) == FIRST + 15 * MIB


def test_a_rest_of_one_mib_stays_with_its_block_in_the_large_pool() -> None:
    used = allocator()
    used.malloc(19 * MIB)
    assert used.allocated == 20 * MIB
    used.malloc(19 * MIB - 512)
    assert used.allocated == 39 * MIB - 512


def test_the_small_pool_cuts_to_the_last_512_bytes() -> None:
    used = allocator()
    addresses = [used.malloc(MIB), used.malloc(MIB - 512), used.malloc(1)]
    assert addresses == [FIRST, FIRST + MIB, FIRST + 2 * MIB - 512]
    assert used.reserved == 2 * MIB
    assert used.malloc(1) == SECOND


def test_streams_share_nothing() -> None:
    used = allocator()
    used.free(used.malloc(5, stream=3))
    assert used.malloc(5, stream=4) == SECOND
    assert used.malloc(5, stream=3) == FIRST


def test_private_pools_share_nothing() -> None:
    used = allocator()
    used.free(used.malloc(5))
    assert used.malloc(5, pool=PRIVATE) == SECOND
    assert [segment.pool for segment in used.segments()] == [DEFAULT_POOL, PRIVATE]
    assert used.log[-1] == AllocatorEvent("alloc", SECOND, 5, 0, PRIVATE, None, 0)


# Giving back


def test_words_and_order_of_the_log() -> None:
    used = allocator()
    address = used.malloc(1000, stream=2, owner=9, tick=4)
    used.free(address, tick=5)
    used.empty_cache(tick=6)
    assert used.log == [
        AllocatorEvent("segment_alloc", FIRST, 2 * MIB, 2, DEFAULT_POOL, None, 4),
        AllocatorEvent("alloc", FIRST, 1000, 2, DEFAULT_POOL, 9, 4),
        AllocatorEvent("free_requested", FIRST, 1000, 2, DEFAULT_POOL, 9, 5),
        AllocatorEvent("free_completed", FIRST, 1000, 2, DEFAULT_POOL, 9, 5),
        AllocatorEvent("segment_free", FIRST, 2 * MIB, 2, DEFAULT_POOL, None, 6),
    ]
    assert used.segments() == ()


def test_only_segments_without_a_block_go_back() -> None:
    used = allocator()
    kept, freed = used.malloc(2 * MIB), used.malloc(2 * MIB)
    other = used.malloc(30 * MIB)
    used.free(freed)
    used.free(other)
    used.empty_cache()
    assert used.reserved == 20 * MIB
    assert used.release_segment(FIRST) is False
    assert used.release_segment(SECOND) is False
    used.free(kept)
    assert used.release_segment(FIRST) is True
    assert used.reserved == 0


def test_a_block_used_on_another_stream_waits() -> None:
    used = allocator()
    a, b = used.malloc(2 * MIB), used.malloc(2 * MIB)
    used.record_stream(a, 0)  # its own stream: nothing to wait for
    used.record_stream(b, 5)
    used.record_stream(b, 6)
    used.free(a)
    used.free(b)
    assert [event.action for event in used.log[-3:]] == ["free_requested", "free_completed", "free_requested"]
    assert (used.allocated, used.active, used.requested) == (0, 2 * MIB, 2 * MIB)
    assert used.segments()[0].blocks[1].state == "active_pending_free"
    with pytest.raises(UsageError, match="handed out"):
        used.free(b)
    assert used.malloc(3 * MIB) == FIRST + 4 * MIB
    used.complete(b, tick=8)
    assert used.log[-1] == AllocatorEvent("free_completed", b, 2 * MIB, 0, DEFAULT_POOL, None, 8)
    assert used.malloc(4 * MIB) == a
    with pytest.raises(UsageError, match="waiting"):
        used.complete(b)


def test_waiting_for_all_streams() -> None:
    used = allocator()
    addresses = [used.malloc(2 * MIB) for _ in range(3)]
    for address in addresses:
        used.record_stream(address, 1)
    for address in reversed(addresses):
        used.free(address)
    used.synchronize()
    assert [event.address for event in used.log[-3:]] == addresses[::-1]
    assert used.active == 0
    used.record_stream(again := used.malloc(2 * MIB), 1)
    used.free(again)
    used.empty_cache()
    assert used.reserved == 0


def test_addresses_that_are_not_held_are_refused() -> None:
    used = allocator()
    address = used.malloc(5)
    for wrong in (address + 512, 77):
        with pytest.raises(UsageError, match=hex(wrong)):
            used.free(wrong)
        with pytest.raises(UsageError, match=hex(wrong)):
            used.record_stream(wrong, 1)


# Too little


def test_out_of_memory_and_what_it_says() -> None:
    used = allocator(capacity=50 * MIB)
    used.malloc(2 * MIB)
    used.malloc(28 * MIB)
    with pytest.raises(OutOfMemory) as caught:
        used.malloc(19 * MIB, stream=3, tick=9)
    error = caught.value
    assert (error.requested, error.segment, error.capacity) == (19 * MIB, 20 * MIB, 50 * MIB)
    assert (error.reserved, error.allocated) == (48 * MIB, 30 * MIB)
    assert (error.free_in_blocks, error.largest_free) == (18 * MIB, 18 * MIB)
    assert used.log[-1] == AllocatorEvent("oom", 2 * MIB, 19 * MIB, 3, DEFAULT_POOL, None, 9)
    assert used.malloc(18 * MIB) == FIRST + 2 * MIB  # it goes on
    assert vars(pickle.loads(pickle.dumps(error))) == vars(error)


def test_unused_segments_are_released_for_a_request() -> None:
    used = allocator(capacity=64 * MIB)
    used.malloc(5)
    freed = [used.malloc(20 * MIB), used.malloc(30 * MIB)]
    used.record_stream(freed[0], 1)
    for address in freed:
        used.free(address)
    used.malloc(40 * MIB)
    assert done(used)[-5:] == [
        ("free_completed", SECOND, 20 * MIB),  # waited for
        ("segment_free", SECOND, 20 * MIB),
        ("segment_free", THIRD, 30 * MIB),
        ("segment_alloc", 4 << 36, 40 * MIB),
        ("alloc", 4 << 36, 40 * MIB),
    ]
    assert used.reserved == 42 * MIB


def test_a_private_pool_releases_nothing_while_it_is_used() -> None:
    used = allocator(capacity=40 * MIB)
    used.free(used.malloc(30 * MIB))
    with pytest.raises(OutOfMemory):
        used.malloc(20 * MIB, pool=PRIVATE)
    assert used.reserved == 30 * MIB
    address = used.malloc(5, pool=PRIVATE)
    used.free(address)
    used.empty_cache()
    assert [segment.pool for segment in used.segments()] == [PRIVATE]
    used.retire(PRIVATE)
    used.empty_cache()
    assert used.reserved == 0


def test_a_limit_of_the_process() -> None:
    used = allocator("per_process_memory_fraction:0.5", capacity=100 * MIB, total=120 * MIB)
    assert used.limit == 60 * MIB
    used.free(used.malloc(50 * MIB))
    used.malloc(12 * MIB)
    assert used.reserved == 50 * MIB  # cut from the first
    with pytest.raises(OutOfMemory) as caught:
        used.malloc(40 * MIB)
    assert caught.value.capacity == 60 * MIB


def test_a_limit_that_rejects_at_once() -> None:
    text = "per_process_memory_fraction:0.5,throw_on_cudamalloc_oom:True"
    used = allocator(text, capacity=100 * MIB)
    used.free(used.malloc(40 * MIB))
    with pytest.raises(OutOfMemory):
        used.malloc(45 * MIB)
    assert used.reserved == 40 * MIB  # nothing was released for it


# Split limit


def test_blocks_above_the_split_limit_are_kept_whole() -> None:
    used = allocator("max_split_size_mb:64")
    used.free(used.malloc(100 * MIB))
    assert used.malloc(10 * MIB) == SECOND  # a small request takes nothing from it
    assert used.malloc(80 * MIB) == THIRD  # 20 MiB smaller: too much would be idle
    address = used.malloc(80 * MIB + 512)
    assert address == FIRST
    assert used.allocated == (10 + 80 + 100) * MIB


def test_the_idle_part_of_a_whole_block_has_a_limit() -> None:
    used = allocator("max_split_size_mb:64,max_non_split_rounding_mb:50")
    used.free(used.malloc(120 * MIB))
    assert used.malloc(70 * MIB) == SECOND
    assert used.malloc(70 * MIB + 512) == FIRST


def test_one_whole_block_is_released_before_all() -> None:
    used = allocator("max_split_size_mb:64", capacity=260 * MIB)
    small = used.malloc(30 * MIB)
    for address in [used.malloc(size * MIB) for size in (70, 150)] + [small]:
        used.free(address)
    used.malloc(100 * MIB)  # the 150 would leave 50 idle: it goes back; 30 and 70 stay
    assert [segment.size // MIB for segment in used.segments()] == [30, 70, 100]


def test_the_largest_whole_blocks_are_released_until_it_is_enough() -> None:
    used = allocator("max_split_size_mb:64", capacity=300 * MIB)
    for address in [used.malloc(size * MIB) for size in (30, 70, 80, 90)]:
        used.free(address)
    used.malloc(150 * MIB)
    assert [segment.size // MIB for segment in used.segments()] == [30, 70, 150]


# Garbage


def test_old_segments_are_collected_above_the_threshold() -> None:
    used = allocator("garbage_collection_threshold:0.6", limit=100 * MIB)
    a, b, _ = used.malloc(20 * MIB), used.malloc(24 * MIB), used.malloc(30 * MIB)
    used.free(a)  # at the third request
    used.free(b)
    used.free(used.malloc(24 * MIB))
    used.free(used.malloc(24 * MIB))  # at the fifth
    used.malloc(26 * MIB)  # 74 MiB are 14 above the threshold: a, of age 3, makes up for it, and b, of age 1, stays
    assert done(used)[-3:-1] == [("segment_free", FIRST, 20 * MIB), ("segment_alloc", 4 << 36, 26 * MIB)]
    assert used.reserved == 80 * MIB


def test_garbage_is_collected_until_it_is_enough() -> None:
    used = allocator("garbage_collection_threshold:0.5", limit=100 * MIB)
    a, b, _ = used.malloc(20 * MIB), used.malloc(24 * MIB), used.malloc(30 * MIB)
    used.free(a)
    used.free(b)
    used.free(used.malloc(24 * MIB))
    used.malloc(26 * MIB)  # 24 above the threshold: the older one is not enough
    assert [entry[:2] for entry in done(used) if entry[0] == "segment_free"] == [
        ("segment_free", FIRST),
        ("segment_free", SECOND),
    ]


def test_no_garbage_is_collected_without_a_limit() -> None:
    used = allocator("garbage_collection_threshold:0.1", capacity=100 * MIB)
    used.free(used.malloc(20 * MIB))
    used.malloc(40 * MIB)
    assert used.reserved == 60 * MIB


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


def test_release_with_expandable_segments_among_the_free_ones() -> None:
    """As in torch's own tests: plain and expandable segments of 40 MiB under a limit of 120, then one of 120."""
    text = "max_split_size_mb:40"
    plain = allocator(text)
    plain.malloc(40 * MIB)
    plain.malloc(40 * MIB)
    grown = CachingAllocator(parse_settings(f"expandable_segments:True,{text}"), place=lambda size: THIRD)
    grown.malloc(40 * MIB)
    used = CachingAllocator(parse_settings(text), place=lambda size: 9 << 36, limit=120 * MIB)
    used.restore((*plain.segments(), *grown.segments()))
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
