"""How torch's CUDA caching allocator rounds what is asked for (c10/cuda/CUDACachingAllocator.cpp). Bytes throughout."""

from __future__ import annotations

from memplan._bytes import ALLOCATOR_BLOCK, round_to_blocks
from memplan.simulation.allocator.settings import MIB, AllocatorSettings

LARGEST_SMALL = MIB
"""Requests up to this size come from the small pool."""
SMALL_SEGMENT = 2 * MIB
"""What the small pool takes from the device at a time; also its page, with expandable segments."""
SMALLEST_OWN_SEGMENT = 10 * MIB
"""Requests from this size on get a segment of their own."""
SEGMENT_UNIT = 2 * MIB


def block_size(settings: AllocatorSettings, requested: int) -> int:
    """Return the bytes that a request takes out of a block: a multiple of 512, or one of the divisions of a power of
    two.

    Example:
        >>> block_size(AllocatorSettings(), 1200)
        1536
    """
    divisions = settings.divisions(requested)
    if divisions > 1 and requested > ALLOCATOR_BLOCK * divisions:
        return next_division(requested, divisions)
    return max(round_to_blocks(requested), ALLOCATOR_BLOCK)


def next_division(size: int, divisions: int) -> int:
    """``size`` rounded up to a power of two, or to one of ``divisions`` equal steps between two of them.

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
    """Return the bytes that are taken from the device for a block of ``size``, where no free block serves.

    Example:
        >>> segment_size(AllocatorSettings(), 512), segment_size(AllocatorSettings(), 11 << 20)
        (2097152, 12582912)
    """
    if size <= LARGEST_SMALL:
        return SMALL_SEGMENT
    if size < SMALLEST_OWN_SEGMENT:
        return settings.large_segment_size
    return -(-size // SEGMENT_UNIT) * SEGMENT_UNIT
