"""How torch's CUDA caching allocator rounds requests (c10/cuda/CUDACachingAllocator.cpp). Bytes throughout."""

from __future__ import annotations

from memplan._bytes import ALLOCATOR_BLOCK, round_to_blocks
from memplan.simulation.allocator.settings import MIB, AllocatorSettings

LARGEST_SMALL = MIB
"""Requests up to this size come from the small pool."""
SMALL_SEGMENT = 2 * MIB
"""Size of the small pool's segments, and its page size with expandable segments."""
SMALLEST_OWN_SEGMENT = 10 * MIB
"""Requests from this size on get a segment of their own."""
SEGMENT_UNIT = 2 * MIB


def block_size(settings: AllocatorSettings, requested: int) -> int:
    """Return the size of the block for a request: a multiple of 512, or with divisions as `next_division`.

    Example:
        >>> block_size(AllocatorSettings(), 1200)
        1536
    """
    divisions = settings.divisions(requested)
    if divisions > 1 and requested > ALLOCATOR_BLOCK * divisions:
        return next_division(requested, divisions)
    return max(round_to_blocks(requested), ALLOCATOR_BLOCK)


def next_division(size: int, divisions: int) -> int:
    """Round ``size`` up to a power of two, or to one of the ``divisions`` equal steps between two powers.

    Args:
        size: bytes, above ``divisions``.
        divisions: a power of two from 2 on.

    Example:
        >>> next_division(1200, 4)  # of 1024, 1280, 1536, 1792, 2048
        1280
    """
    step = (1 << (size.bit_length() - 1)) // divisions
    return -(-size // step) * step


def segment_size(settings: AllocatorSettings, size: int) -> int:
    """Return the size of the segment that is allocated for a block of ``size`` bytes if no free block fits.

    Example:
        >>> segment_size(AllocatorSettings(), 512), segment_size(AllocatorSettings(), 11 << 20)
        (2097152, 12582912)
    """
    if size <= LARGEST_SMALL:
        return SMALL_SEGMENT
    if size < SMALLEST_OWN_SEGMENT:
        return settings.large_segment_size
    return -(-size // SEGMENT_UNIT) * SEGMENT_UNIT
