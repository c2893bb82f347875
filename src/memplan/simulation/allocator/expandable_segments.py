"""Expandable segments: ranges of addresses that get and lose memory a page at a time."""

from __future__ import annotations

from collections.abc import Callable

from memplan.simulation.allocator.device_memory import Device
from memplan.simulation.allocator.free_lists import FREE, Chunk, ChunkPool, Reservation
from memplan.simulation.allocator.rounding import SMALL_SEGMENT
from memplan.simulation.allocator.settings import AllocatorSettings

UNKNOWN_CARD = 1 << 42
"""Bytes to reserve addresses for where the card's memory is not known: more than any card has."""


class ExpandableSegments:
    """Gives memory to addresses and takes it back, and keeps pools and neighbours in step.

    Args:
        settings: for the page of the large pool.
        device: what the memory comes from.
        place: gives the address of a new reservation of so many bytes.
        total: bytes of the whole card; addresses are reserved for 9/8 of it, as torch does.
    """

    def __init__(
        self, settings: AllocatorSettings, device: Device, place: Callable[[int], int], total: int | None
    ) -> None:
        self._device = device
        self._place = place
        self._large_page = settings.large_segment_size
        self._total = UNKNOWN_CARD if total is None else total
        self.reservations: list[Reservation] = []

    def page(self, pool: ChunkPool) -> int:
        """Return the bytes of a page of this pool."""
        return SMALL_SEGMENT if pool.small else self._large_page

    def reservation_size(self, pool: ChunkPool, size: int = 0) -> int:
        """Return the bytes of addresses that are reserved at a time for this pool; enough for a request of ``size``."""
        page = self.page(pool)
        return -(-max(self._total + self._total // 8, size) // page) * page

    def allocate(self, pool: ChunkPool, stream: int, size: int) -> Chunk | None:
        """Return a chunk of at least ``size`` bytes, in no pool; None where the device has too little.

        What was mapped before the device ran out stays, as free chunks.
        """
        found = self._room(pool, stream, size) or self._reserve(pool, stream, size)
        if not found.mapped:
            found = self._map(found, min(size, found.size))
        while found is not None and found.size < size:
            behind = found.right
            assert behind is not None
            found = self._map(behind, min(size - found.size, behind.size))
        if found is not None:
            pool.remove(found)
        return found

    def _room(self, pool: ChunkPool, stream: int, size: int) -> Chunk | None:
        """Return where free and unmapped chunks that touch make up ``size``: the first of them, at the lowest
        address."""
        for chunk in pool.unmapped(stream):
            before = chunk.left
            start = before if before is not None and before.state == FREE else chunk
            room, at = 0, start
            while room < size and at is not None and at.state == FREE:
                room += at.size
                at = at.right
            if room >= size:
                return start
        return None

    def _reserve(self, pool: ChunkPool, stream: int, needed: int) -> Chunk:
        size = self.reservation_size(pool, needed)
        return self.reserve_at(pool, stream, self._place(size), size)

    def reserve_at(self, pool: ChunkPool, stream: int, address: int, size: int) -> Chunk:
        """Return a new reservation without memory."""
        chunk = Chunk(pool, stream, address, size, None)
        chunk.mapped = False
        chunk.reservation = Reservation(address, size, self.page(pool), chunk)
        self.reservations.append(chunk.reservation)
        pool.add_unmapped(chunk)
        return chunk

    def _map(self, chunk: Chunk, size: int) -> Chunk | None:
        """Give memory to the first ``size`` bytes of an unmapped chunk, in whole pages; the free chunk they are in."""
        reservation = chunk.reservation
        assert reservation is not None
        start, pool = chunk.address, chunk.pool
        size = reservation.pages_from(start + size) - start
        if not self._device.has(size):
            return None
        pool.remove_unmapped(chunk)
        if size < chunk.size:
            pool.add_unmapped(chunk.cut(size))
        chunk.mapped = True
        before, behind = chunk.left, chunk.right
        if behind is not None and behind.state == FREE and behind.mapped:
            pool.remove(behind)
            chunk.absorb_right()
        if before is not None and before.state == FREE and before.mapped:
            pool.remove(before)
            before.absorb_right()
            chunk = before
        pool.add(chunk)
        self._device.take("segment_map", start, size, chunk.stream, pool.ident)
        return chunk

    def unmap(self, chunk: Chunk, start: int, end: int) -> bool:
        """Take back the memory of the whole pages between two addresses of a free chunk; whether there were any."""
        reservation = chunk.reservation
        assert reservation is not None
        start, end = reservation.pages_from(start), reservation.pages_to(end)
        if start >= end:
            return False
        pool = chunk.pool
        pool.remove(chunk)
        if start > chunk.address:
            rest = chunk.cut(start - chunk.address)
            pool.add(chunk)
            chunk = rest
        if end < chunk.address + chunk.size:
            pool.add(chunk.cut(end - start))
        chunk.mapped = False
        before, behind = chunk.left, chunk.right
        if behind is not None and not behind.mapped:
            pool.remove_unmapped(behind)
            chunk.absorb_right()
        if before is not None and not before.mapped:
            before.absorb_right()
            chunk = before
        else:
            pool.add_unmapped(chunk)
        self._device.give_back("segment_unmap", start, end - start, chunk.stream, pool.ident)
        if chunk.whole:
            pool.remove_unmapped(chunk)
            self.reservations.remove(reservation)
        return True
