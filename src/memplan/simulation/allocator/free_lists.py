"""Free memory in order: the chunks that segments are cut into, and the pools that find the best fit among them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sortedcontainers import SortedList

from memplan.simulation.timeline import Pool

FREE, LIVE, PENDING = 0, 1, 2
"""States of a chunk: in its pool; handed out; given back, but other streams may still be using it."""

_ADDRESS_BITS = 96  # sizes of a snapshot reach 2**63 bytes, and addresses stand one behind the other
_ADDRESS = (1 << _ADDRESS_BITS) - 1


class Chunk:
    """A piece of a segment's addresses, the allocator's own record of it; its neighbours make up the segment.

    When chunks are cut or merged, the left one stays: the first chunk of a segment is the same for as long as the
    segment is held.
    """

    __slots__ = (
        "address",
        "born",
        "left",
        "mapped",
        "owner",
        "pool",
        "requested",
        "reservation",
        "right",
        "size",
        "state",
        "stream",
        "uses",
    )

    def __init__(self, pool: ChunkPool, stream: int, address: int, size: int, reservation: Reservation | None) -> None:
        self.pool = pool
        self.stream = stream
        self.address = address
        self.size = size
        self.reservation = reservation
        """The range of addresses it lies in, with expandable segments."""
        self.mapped = True
        """Whether there is memory behind the addresses."""
        self.state = FREE
        self.requested = 0
        self.owner: int | None = None
        self.uses: set[int] | None = None
        """Other streams that it was used on."""
        self.born = 0
        """How often its pool had been asked when this became free."""
        self.left: Chunk | None = None
        self.right: Chunk | None = None

    def cut(self, size: int) -> Chunk:
        """Keep the first ``size`` bytes; the rest is a new free chunk to the right, in no pool yet."""
        rest = Chunk(self.pool, self.stream, self.address + size, self.size - size, self.reservation)
        rest.mapped = self.mapped
        rest.left, rest.right = self, self.right
        if self.right is not None:
            self.right.left = rest
        self.right = rest
        self.size = size
        return rest

    def absorb_right(self) -> None:
        """Take in the right neighbour, which must be in no pool."""
        gone = self.right
        assert gone is not None
        self.size += gone.size
        self.right = gone.right
        if gone.right is not None:
            gone.right.left = self

    @property
    def whole(self) -> bool:
        """Return whether it is all of its segment."""
        return self.left is None and self.right is None


class ChunkPool:
    """The free chunks of one kind of request: small or large ones, of the default pool or of a private one.

    Each stream has its own: what one stream freed serves no other.
    """

    def __init__(self, ident: Pool, small: bool, expandable: bool) -> None:
        self.ident = ident
        self.small = small
        self.expandable = expandable
        """Whether chunks of expandable segments may serve requests."""
        self.asked = 0
        """How often it was asked for a chunk, counted where garbage is collected: the clock of a chunk's age."""
        self.chunks: dict[int, Chunk] = {}
        """All of its free chunks by address, those without memory, too."""
        self._free: dict[int, SortedList] = {}
        self._parked: dict[int, SortedList] = {}
        """Free chunks of expandable segments where these may serve no request."""
        self._unmapped: dict[int, SortedList] = {}

    def add(self, chunk: Chunk) -> None:
        """Put in a free chunk; its age begins anew."""
        chunk.born = self.asked
        self.chunks[chunk.address] = chunk
        kept = self._free if chunk.reservation is None or self.expandable else self._parked
        keys = kept.get(chunk.stream)
        if keys is None:
            keys = kept[chunk.stream] = SortedList()
        keys.add(chunk.size << _ADDRESS_BITS | chunk.address)

    def remove(self, chunk: Chunk) -> None:
        """Take out a free chunk."""
        del self.chunks[chunk.address]
        kept = self._free if chunk.reservation is None or self.expandable else self._parked
        kept[chunk.stream].remove(chunk.size << _ADDRESS_BITS | chunk.address)

    def best(self, stream: int, size: int) -> Chunk | None:
        """Return the smallest free chunk of at least ``size`` bytes, at the lowest address among equals.

        In an expandable segment, a chunk with unmapped addresses behind it counts as large as it could grow: from
        the smallest chunk on, while the next one could grow less than this one, that one is taken.
        """
        keys = self._free.get(stream)
        chunk: Chunk | None = None
        for key in () if keys is None else keys.irange(size << _ADDRESS_BITS):
            following = self.chunks[key & _ADDRESS]
            if chunk is not None and _could_grow_to(following) >= _could_grow_to(chunk):
                break
            chunk = following
            if chunk.reservation is None:
                break
        return chunk

    def of_stream(self, stream: int) -> list[Chunk]:
        """Return the free chunks of a stream, in order of size, then address."""
        keys = [key for kept in (self._free, self._parked) for key in kept.get(stream, ())]
        return [self.chunks[key & _ADDRESS] for key in sorted(keys)]

    def in_order(self) -> list[Chunk]:
        """Return all free chunks, in order of stream, size, address."""
        return [chunk for stream in sorted({*self._free, *self._parked}) for chunk in self.of_stream(stream)]

    # Addresses without memory

    def add_unmapped(self, chunk: Chunk) -> None:
        """Put in a chunk without memory."""
        self.chunks[chunk.address] = chunk
        self._unmapped.setdefault(chunk.stream, SortedList()).add(chunk.address)

    def remove_unmapped(self, chunk: Chunk) -> None:
        """Take out a chunk without memory."""
        del self.chunks[chunk.address]
        self._unmapped[chunk.stream].remove(chunk.address)

    def unmapped(self, stream: int) -> Iterator[Chunk]:
        """Return the chunks without memory of a stream, in order of address."""
        return (self.chunks[address] for address in self._unmapped.get(stream, ()))


def _could_grow_to(chunk: Chunk) -> int:
    behind = chunk.right
    return chunk.size + (behind.size if behind is not None and not behind.mapped else 0)


@dataclass(eq=False, slots=True)
class Reservation:
    """A range of addresses, of which whole pages have memory. Bytes."""

    base: int
    size: int
    page: int
    first: Chunk

    def pages_from(self, address: int) -> int:
        """Return the first page boundary at or after ``address``."""
        return address + (self.base - address) % self.page

    def pages_to(self, address: int) -> int:
        """Return the last page boundary at or before ``address``."""
        return address - (address - self.base) % self.page
