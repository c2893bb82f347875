"""The card as the caching allocator sees it: how much it has given, and the log of all that was done."""

from __future__ import annotations

from collections.abc import Callable

from memplan.simulation.model import Action, AllocatorEvent, Pool

FIRST_ADDRESS = 0x7F00_0000_0000
ALIGNMENT = 2 << 20


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
        """Whether ``size`` bytes are left."""
        return self.capacity is None or self.reserved + size <= self.capacity

    def take(self, action: Action, address: int, size: int, stream: int, pool: Pool) -> None:
        """Memory goes to the allocator."""
        self.reserved += size
        self.log.append(AllocatorEvent(action, address, size, stream, pool, None, self.tick))

    def give_back(self, action: Action, address: int, size: int, stream: int, pool: Pool) -> None:
        """Memory goes back to the card."""
        self.reserved -= size
        self.log.append(AllocatorEvent(action, address, size, stream, pool, None, self.tick))


def ascending() -> Callable[[int], int]:
    """Addresses that never overlap: each behind the last one, in multiples of 2 MiB."""
    following = FIRST_ADDRESS

    def place(size: int) -> int:
        nonlocal following
        address = following
        following += -(-size // ALIGNMENT) * ALIGNMENT
        return address

    return place
