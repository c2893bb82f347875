"""Expandable segments: reserved address ranges in which pages are mapped and unmapped."""

from __future__ import annotations

from collections.abc import Callable

from memplan.simulation.allocator.device_memory import Device
from memplan.simulation.allocator.free_lists import FREE, Chunk, ChunkPool, Reservation
from memplan.simulation.allocator.rounding import SMALL_SEGMENT
from memplan.simulation.allocator.settings import AllocatorSettings

UNKNOWN_CARD = 1 << 42
"""Bytes to reserve addresses for if the card's memory is not known: more than any card has."""


class ExpandableSegments:
    """Maps and unmaps pages of reserved addresses, and updates the chunks and their pools.

    Args:
        place: maps the size of a new reservation to its address.
        total: bytes of the whole card; as in torch, addresses are reserved for 9/8 of it.
    """

    def __init__(
        self, settings: AllocatorSettings, device: Device, place: Callable[[int], int], total: int | None
    ) -> None:
        """``place`` maps the size of an address range to its address. ``total``: bytes of the card; None: unknown."""
        self._device = device
        self._place = place
        self._large_page = settings.large_segment_size
        """Bytes of a page in pools for large requests."""
        self._total = UNKNOWN_CARD if total is None else total
        self.reservations: list[Reservation] = []
        """All reserved address ranges, in the order of their reservation."""

    def page(self, pool: ChunkPool) -> int:
        """Return the page size of this pool."""
        return SMALL_SEGMENT if pool.small else self._large_page

    def reservation_size(self, pool: ChunkPool, size: int = 0) -> int:
        """Return the bytes of a new address range for this pool, at least ``size``, in whole pages."""
        page = self.page(pool)
        card_and_eighth = self._total + self._total // 8  # as torch's ExpandableSegment reserves for every pool
        return -(-max(card_and_eighth, size) // page) * page

    def allocate(self, pool: ChunkPool, stream: int, size: int) -> Chunk | None:
        """Return a mapped chunk of at least ``size`` bytes, in no pool, or None if the device has too little memory.

        Pages that were mapped before the device ran out stay mapped, as free chunks.
        """
        chunk = self._first_with_space(pool, stream, size)
        if chunk is None:
            reserved = self.reservation_size(pool, size)
            chunk = self.reserve_at(pool, stream, self._place(reserved), reserved)
        if not chunk.mapped:
            chunk = self._map(chunk, min(size, chunk.size))
        while chunk is not None and chunk.size < size:
            right = chunk.right
            assert right is not None
            chunk = self._map(right, min(size - chunk.size, right.size))
        if chunk is not None:
            pool.remove(chunk)
        return chunk

    def _first_with_space(self, pool: ChunkPool, stream: int, size: int) -> Chunk | None:
        """Return the chunk of lowest address where adjacent free and unmapped chunks add up to ``size`` bytes."""
        for unmapped in pool.unmapped(stream):
            left = unmapped.left
            first = left if left is not None and left.state == FREE else unmapped
            space, chunk = 0, first
            while space < size and chunk is not None and chunk.state == FREE:
                space += chunk.size
                chunk = chunk.right
            if space >= size:
                return first
        return None

    def reserve_at(self, pool: ChunkPool, stream: int, address: int, size: int) -> Chunk:
        """Reserve an address range and return its chunk, which is not mapped."""
        chunk = Chunk(pool, stream, address, size, reservation=None)
        chunk.mapped = False
        chunk.reservation = Reservation(address, size, self.page(pool), chunk)
        self.reservations.append(chunk.reservation)
        pool.add_unmapped(chunk)
        return chunk

    def _map(self, chunk: Chunk, size: int) -> Chunk | None:
        """Map pages for the first ``size`` bytes of an unmapped chunk. Return the chunk that contains them, or None."""
        reservation = chunk.reservation
        assert reservation is not None
        start, pool = chunk.address, chunk.pool
        size = reservation.pages_from(start + size) - start
        if not self._device.has_room(size):
            return None
        pool.remove_unmapped(chunk)
        if size < chunk.size:
            pool.add_unmapped(chunk.split(size))
        chunk.mapped = True
        chunk = pool.add_merged(chunk)
        self._device.reserve("segment_map", start, size, chunk.stream, pool.ident)
        return chunk

    def unmap(self, chunk: Chunk, start: int, end: int) -> bool:
        """Unmap the whole pages between two addresses of a free chunk. Return whether there were any."""
        reservation = chunk.reservation
        assert reservation is not None
        start, end = reservation.pages_from(start), reservation.pages_to(end)
        if start >= end:
            return False
        pool = chunk.pool
        pool.remove(chunk)
        if start > chunk.address:
            right = chunk.split(start - chunk.address)
            pool.add(chunk)
            chunk = right
        if end < chunk.address + chunk.size:
            pool.add(chunk.split(end - start))
        chunk.mapped = False
        left, right = chunk.left, chunk.right
        if right is not None and not right.mapped:
            pool.remove_unmapped(right)
            chunk.merge_right()
        if left is not None and not left.mapped:
            left.merge_right()
            chunk = left
        else:
            pool.add_unmapped(chunk)
        self._device.release("segment_unmap", start, end - start, chunk.stream, pool.ident)
        if chunk.fills_segment:
            pool.remove_unmapped(chunk)
            self.reservations.remove(reservation)
        return True
