"""What an allocator does in segments that hold tensors already, beside an allocator written apart that ran through."""

from __future__ import annotations

from random import Random

import pytest
from simulation.reference_allocator import ReferenceAllocator

from memplan.simulation.allocator.device_memory import ascending_addresses
from memplan.simulation.allocator.occupied import Begin, Occupied
from memplan.simulation.allocator.settings import AllocatorSettings
from memplan.simulation.timeline import Block, Segment

MIB = 1 << 20
SETTINGS = AllocatorSettings()


@pytest.mark.parametrize("seed", range(8))
def test_it_goes_on_as_if_it_had_not_been_interrupted(seed: int) -> None:
    random = Random(seed)
    reference = ReferenceAllocator(SETTINGS, ascending_addresses())
    sizes = [random.choice([700, 300_000, 3 * MIB, 7 * MIB, 12 * MIB]) + random.randrange(512) for _ in range(40)]
    blocks = [reference.malloc(size, 0, (0, 0), None, tick=0) for size in sizes]
    for address in random.sample(blocks, 25):
        reference.free(address, tick=0)
    reference.empty_cache(tick=0)
    before = reference.segments()
    allocator = Occupied.of(before, SETTINGS).allocator(SETTINGS)
    assert (allocator.allocated, allocator.reserved) == (reference.allocated, reference.reserved)
    for _ in range(30):
        size = random.choice([5000, 900_000, 4 * MIB, 11 * MIB])
        allocator.malloc(size)
        reference.malloc(size, 0, (0, 0), None, tick=0)
        assert (allocator.allocated, allocator.reserved) == (reference.allocated, reference.reserved)


def segment(address: int, *sizes: int) -> Segment:
    """A segment of the large pool at an address in MiB; blocks in MiB, free ones below 0."""
    blocks, end = list[Block](), address * MIB
    for size in sizes:
        state = "active_allocated" if size > 0 else "inactive"
        blocks.append(Block(end, abs(size) * MIB, max(size, 0) * MIB, state))
        end += abs(size) * MIB
    total = end - address * MIB
    return Segment(address * MIB, total, stream=0, small=False, pool=(0, 0), expandable=False, blocks=tuple(blocks))


def test_what_holds_nothing_is_given_back_first() -> None:
    """By hand: of three segments one is free, and one as soon as the gradient in it is."""
    segments = segment(1000, 4, -16), segment(1100, -20), segment(1200, 8, -12)
    occupied = Occupied.of(segments, SETTINGS, freed={1200 * MIB, 7})
    assert occupied.segments == segments[:1]
    assert occupied.live == {1000 * MIB: 4 * MIB}


def test_memory_of_others_is_not_counted() -> None:
    occupied = Occupied((segment(1000, 4, -4, 5, -7), segment(1200, 6, -14)))
    assert Begin(occupied, {0: 1000 * MIB, 3: 1000 * MIB}).others == 11 * MIB


def test_new_segments_lie_above() -> None:
    allocator = Occupied((segment(1 << 30, 4, -16),)).allocator(SETTINGS)
    assert allocator.malloc(30 * MIB) >= (1 << 50) + 20 * MIB
    assert allocator.malloc(16 * MIB) == (1 << 50) + 4 * MIB
    assert allocator.reserved == 50 * MIB
