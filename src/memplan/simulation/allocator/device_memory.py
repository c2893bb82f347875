"""The card as the caching allocator sees it: how much it has given, and the log of all that was done."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from memplan.simulation.timeline import Action, AllocatorEvent, Pool

FIRST_ADDRESS = 0x7F00_0000_0000
ALIGNMENT = 2 << 20


class OutOfMemory(Exception):
    """The device has too little for a request, even after all unused segments went back to it. Bytes throughout.

    Args:
        requested: what was asked for.
        segment: what would have had to come from the device for it, at most.
        reserved: what the allocator held.
        allocated: what of it was in blocks handed out.
        free_in_blocks: what of it was in free blocks, of all pools and streams.
        largest_free: the largest of these blocks.
        capacity: what the device could give in all; where a limit of the process's own was in the way, that limit.
    """

    def __init__(
        self,
        *,
        requested: int,
        segment: int,
        reserved: int,
        allocated: int,
        free_in_blocks: int,
        largest_free: int,
        capacity: int | None,
    ) -> None:
        super().__init__(f"out of memory: {requested} bytes requested, {reserved} of {capacity} bytes reserved")
        self.requested = requested
        self.segment = segment
        self.reserved = reserved
        self.allocated = allocated
        self.free_in_blocks = free_in_blocks
        self.largest_free = largest_free
        self.capacity = capacity

    def __reduce__(self) -> tuple[Any, ...]:
        # By default pickle calls the class with the text alone, which fails.
        return partial(OutOfMemory, **vars(self)), ()


class Device:
    """Bytes given to an allocator, up to a capacity.

    Args:
        capacity: bytes that the card can give; None: no end.
    """

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self.reserved = 0
        self.log: list[AllocatorEvent] = []
        self.tick = 0
        """Stamped on what is logged."""

    def has(self, size: int) -> bool:
        """Return whether ``size`` bytes are left."""
        return self.capacity is None or self.reserved + size <= self.capacity

    def take(self, action: Action, address: int, size: int, stream: int, pool: Pool) -> None:
        """Take memory for the allocator."""
        self.reserved += size
        self.log.append(AllocatorEvent(action, address, size, stream, pool, None, self.tick))

    def give_back(self, action: Action, address: int, size: int, stream: int, pool: Pool) -> None:
        """Return memory to the card."""
        self.reserved -= size
        self.log.append(AllocatorEvent(action, address, size, stream, pool, None, self.tick))


def ascending(above: int = 0) -> Callable[[int], int]:
    """Return a source of addresses that never overlap: each behind the last one, in multiples of 2 MiB.

    Args:
        above: the end of the addresses that are taken.
    """
    following = max(FIRST_ADDRESS, -(-above // ALIGNMENT) * ALIGNMENT)

    def place(size: int) -> int:
        nonlocal following
        address = following
        following += -(-size // ALIGNMENT) * ALIGNMENT
        return address

    return place
