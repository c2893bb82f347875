"""The chunks that segments are split into, and the pools that find the best fit among the free chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sortedcontainers import SortedList

from memplan.simulation.timeline import Pool

FREE, LIVE, PENDING = 0, 1, 2
"""States of a chunk: free; allocated; freed, but other streams may still use it."""

_ADDRESS_BITS = 96  # the sizes in a snapshot reach 2**63 bytes each, and addresses follow each other
_ADDRESS = (1 << _ADDRESS_BITS) - 1


@dataclass(eq=False, repr=False, slots=True)
class Chunk:
    """A range of a segment's addresses, linked to its neighbors: torch's `Block`.

    Splitting and merging keep the left chunk, so the first chunk of a segment stays the same object.
    """

    pool: ChunkPool
    stream: int
    address: int
    size: int
    reservation: Reservation | None
    """Its address range, if it belongs to an expandable segment."""
    mapped: bool = True
    """Whether its addresses have memory."""
    state: int = FREE
    """`FREE`, `LIVE`, or `PENDING`: freed, but still in use on another stream."""
    requested: int = 0
    """Bytes of the request that it serves, before rounding; 0 if it is free."""
    owner: int | None = None
    """Identifies for the caller what it was allocated for."""
    other_streams: set[int] | None = None
    """Streams that used it besides its own."""
    freed_at: int = 0
    """``request_count`` of its pool when it became free."""
    left: Chunk | None = None
    right: Chunk | None = None
    """Its neighbors in the segment."""

    def split(self, size: int) -> Chunk:
        """Keep the first ``size`` bytes and return the remainder as a new free chunk, in no pool."""
        remainder = Chunk(self.pool, self.stream, self.address + size, self.size - size, self.reservation)
        remainder.mapped = self.mapped
        remainder.left, remainder.right = self, self.right
        if self.right is not None:
            self.right.left = remainder
        self.right = remainder
        self.size = size
        return remainder

    def merge_right(self) -> None:
        """Merge with the right neighbor, which must be in no pool."""
        right = self.right
        assert right is not None
        self.size += right.size
        self.right = right.right
        if right.right is not None:
            right.right.left = self

    @property
    def fills_segment(self) -> bool:
        """Return whether it is its whole segment."""
        return self.left is None and self.right is None


class ChunkPool:
    """The free chunks for small or for large requests of a memory pool.

    They are sorted by stream, since a chunk that a stream freed serves no other stream.
    """

    def __init__(self, ident: Pool, small: bool, expandable: bool) -> None:
        """``ident``: the memory pool; ``small``: whether these chunks serve its small requests, or the large ones."""
        self.ident = ident
        self.small = small
        self.expandable = expandable
        """Whether requests may use chunks of expandable segments."""
        self.request_count = 0
        """The clock for the age of chunks; counted only if garbage is collected."""
        self.chunks: dict[int, Chunk] = {}
        """All free chunks by address, including unmapped ones."""
        self._free: dict[int, SortedList] = {}
        """Stream -> keys (size, address) of the mapped chunks that requests may use."""
        self._unusable: dict[int, SortedList] = {}
        """The same for chunks of expandable segments, if requests may not use them."""
        self._unmapped: dict[int, SortedList] = {}
        """Stream -> addresses of unmapped chunks."""

    def add(self, chunk: Chunk) -> None:
        """Add a free chunk; its age starts at 0."""
        chunk.freed_at = self.request_count
        self.chunks[chunk.address] = chunk
        by_stream = self._free if chunk.reservation is None or self.expandable else self._unusable
        keys = by_stream.get(chunk.stream)
        if keys is None:
            keys = by_stream[chunk.stream] = SortedList()
        keys.add(chunk.size << _ADDRESS_BITS | chunk.address)

    def add_merged(self, chunk: Chunk) -> Chunk:
        """Merge a free mapped chunk with its free mapped neighbors, add the result, and return it."""
        left, right = chunk.left, chunk.right
        if right is not None and right.state == FREE and right.mapped:
            self.remove(right)
            chunk.merge_right()
        if left is not None and left.state == FREE and left.mapped:
            self.remove(left)
            left.merge_right()
            chunk = left
        self.add(chunk)
        return chunk

    def remove(self, chunk: Chunk) -> None:
        """Remove a free chunk."""
        del self.chunks[chunk.address]
        by_stream = self._free if chunk.reservation is None or self.expandable else self._unusable
        by_stream[chunk.stream].remove(chunk.size << _ADDRESS_BITS | chunk.address)

    def best_fit(self, stream: int, size: int) -> Chunk | None:
        """Return the smallest free chunk of at least ``size`` bytes, with the lowest address among equals.

        In an expandable segment a chunk can grow into unmapped addresses behind it. There the search goes on from the
        smallest chunk as long as the next chunk can grow to less than the current one.
        """
        keys = self._free.get(stream)
        chunk: Chunk | None = None
        for key in () if keys is None else keys.irange(size << _ADDRESS_BITS):
            larger = self.chunks[key & _ADDRESS]
            if chunk is not None and _size_if_grown(larger) >= _size_if_grown(chunk):
                break
            chunk = larger
            if chunk.reservation is None:
                break
        return chunk

    def chunks_of_stream(self, stream: int) -> list[Chunk]:
        """Return the free chunks of a stream, also those that requests may not use, in order of size, then address."""
        keys = [*self._free.get(stream, ()), *self._unusable.get(stream, ())]
        return [self.chunks[key & _ADDRESS] for key in sorted(keys)]

    def ordered_chunks(self) -> list[Chunk]:
        """Return all free chunks, also those that requests may not use, in order of stream, size, address."""
        return [chunk for stream in sorted({*self._free, *self._unusable}) for chunk in self.chunks_of_stream(stream)]

    # Unmapped chunks

    def add_unmapped(self, chunk: Chunk) -> None:
        """Add an unmapped chunk."""
        self.chunks[chunk.address] = chunk
        self._unmapped.setdefault(chunk.stream, SortedList()).add(chunk.address)

    def remove_unmapped(self, chunk: Chunk) -> None:
        """Remove an unmapped chunk."""
        del self.chunks[chunk.address]
        self._unmapped[chunk.stream].remove(chunk.address)

    def unmapped(self, stream: int) -> Iterator[Chunk]:
        """Return the unmapped chunks of a stream, in order of address."""
        return (self.chunks[address] for address in self._unmapped.get(stream, ()))


def _size_if_grown(chunk: Chunk) -> int:
    """Return the size of a free chunk after mapping the unmapped addresses that follow it, if any."""
    right = chunk.right
    return chunk.size + (right.size if right is not None and not right.mapped else 0)


@dataclass(eq=False, repr=False, slots=True)
class Reservation:
    """A reserved address range, mapped in whole pages. Bytes."""

    base: int
    size: int
    page: int
    """Bytes of a page."""
    first: Chunk
    """The chunk at its lowest address."""

    def pages_from(self, address: int) -> int:
        """Return the first page boundary at or after ``address``."""
        return address + (self.base - address) % self.page

    def pages_to(self, address: int) -> int:
        """Return the last page boundary at or before ``address``."""
        return address - (address - self.base) % self.page
