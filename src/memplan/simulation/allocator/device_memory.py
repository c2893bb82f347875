"""The device under the caching allocator: its memory in use, and the log of all events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from memplan.simulation.timeline import Action, AllocatorEvent, Pool

FIRST_ADDRESS = 0x7F00_0000_0000
ALIGNMENT = 2 << 20


@dataclass(kw_only=True, eq=False, repr=False)
class OutOfMemory(Exception):
    """The device has too little memory for a request, even after all unused segments were released. Bytes throughout.

    Args:
        requested: the size of the request.
        segment: the new memory needed for it, at most.
        reserved: the size of the allocator's segments.
        allocated: the part of ``reserved`` in allocated blocks.
        free_in_blocks: the part of ``reserved`` in free blocks, of all pools and streams.
        largest_free: the largest of these free blocks.
        capacity: what the device could give in all, or the limit of the process if that is lower.
    """

    requested: int
    segment: int
    reserved: int
    allocated: int
    free_in_blocks: int
    largest_free: int
    capacity: int | None

    def __post_init__(self) -> None:
        super().__init__(
            f"out of memory: {self.requested} bytes requested, {self.reserved} of {self.capacity} bytes reserved"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # By default pickle calls the class with the text alone, which fails.
        return partial(OutOfMemory, **vars(self)), ()


class Device:
    """Memory of a device, reserved by an allocator up to a capacity.

    Args:
        capacity: bytes that the device can give; None: unlimited.
    """

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        """Bytes that the device can give; None: unlimited."""
        self.reserved = 0
        """Bytes of all segments and mapped pages."""
        self.log: list[AllocatorEvent] = []
        """All events, in order."""
        self.tick = 0
        """Tick of the events logged next."""

    def has_room(self, size: int) -> bool:
        """Check whether ``size`` bytes are left."""
        return self.capacity is None or self.reserved + size <= self.capacity

    def reserve(self, action: Action, address: int, size: int, stream: int, pool: Pool) -> None:
        """Reserve memory for the allocator and log it."""
        self.reserved += size
        self.log.append(AllocatorEvent(action, address, size, stream, pool, owner=None, tick=self.tick))

    def release(self, action: Action, address: int, size: int, stream: int, pool: Pool) -> None:
        """Release memory of the allocator and log it."""
        self.reserved -= size
        self.log.append(AllocatorEvent(action, address, size, stream, pool, owner=None, tick=self.tick))


def ascending_addresses(above: int = 0) -> Callable[[int], int]:
    """Return a function from sizes to addresses that follow each other, in multiples of 2 MiB.

    Args:
        above: the end of the addresses in use.
    """
    next_address = max(FIRST_ADDRESS, -(-above // ALIGNMENT) * ALIGNMENT)

    def next_free(size: int) -> int:
        """Return the address after the last returned range, for one of ``size`` bytes."""
        nonlocal next_address
        address = next_address
        next_address += -(-size // ALIGNMENT) * ALIGNMENT
        return address

    return next_free
