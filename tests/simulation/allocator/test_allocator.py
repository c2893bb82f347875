"""The caching allocator on examples worked by hand from torch's published rules."""

from __future__ import annotations

import pickle

import pytest
from simulation.placed import FIRST, SECOND, THIRD, allocator, done

from memplan.errors import UsageError
from memplan.simulation.allocator.allocator import OutOfMemory
from memplan.simulation.allocator.rounding import block_size, next_division, segment_size
from memplan.simulation.allocator.settings import parse_settings
from memplan.simulation.timeline import DEFAULT_POOL, AllocatorEvent, Block, Segment

MIB = 1 << 20
PRIVATE = (0, 1)


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
