"""Free memory in order: the chunks that segments are cut into, and the pools that find the best fit among them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

from memplan.simulation.timeline import Pool

FREE, LIVE, PENDING = 0, 1, 2
"""States of a chunk: in its pool; handed out; given back, but other streams may still be using it."""

_ADDRESS_BITS = 64
_ADDRESS = (1 << _ADDRESS_BITS) - 1
_BUCKET = 1000


class SortedKeys:
    """Integers in order, without duplicates. O(log n) to find; to add and remove, a move within one short list."""

    __slots__ = ("_buckets", "_tops")

    def __init__(self) -> None:
        self._buckets: list[list[int]] = []
        self._tops: list[int] = []
        """The largest of each bucket."""

    def __iter__(self) -> Iterator[int]:
        for bucket in self._buckets:
            yield from bucket

    def add(self, key: int) -> None:
        """Put in a key that is not in yet."""
        tops, buckets = self._tops, self._buckets
        at = bisect_left(tops, key)
        if at == len(tops):
            if not tops:
                buckets.append([key])
                tops.append(key)
                return
            at -= 1
            buckets[at].append(key)
            tops[at] = key
        else:
            insort(buckets[at], key)
        bucket = buckets[at]
        if len(bucket) > 2 * _BUCKET:
            buckets.insert(at, bucket[:_BUCKET])
            tops.insert(at, bucket[_BUCKET - 1])
            del bucket[:_BUCKET]

    def remove(self, key: int) -> None:
        """Take out a key that is in."""
        at = bisect_left(self._tops, key)
        bucket = self._buckets[at]
        del bucket[bisect_left(bucket, key)]
        if not bucket:
            del self._buckets[at], self._tops[at]
        elif self._tops[at] == key:
            self._tops[at] = bucket[-1]

    def at_least(self, key: int) -> int | None:
        """The smallest key that is not below ``key``."""
        at = bisect_left(self._tops, key)
        if at == len(self._tops):
            return None
        bucket = self._buckets[at]
        return bucket[bisect_left(bucket, key)]


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
        """Whether it is all of its segment."""
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
        self._free: dict[int, SortedKeys] = {}
        self._parked: dict[int, SortedKeys] = {}
        """Free chunks of expandable segments where these may serve no request."""
        self._unmapped: dict[int, list[int]] = {}

    def add(self, chunk: Chunk) -> None:
        """Put in a free chunk; its age begins anew."""
        chunk.born = self.asked
        self.chunks[chunk.address] = chunk
        kept = self._free if chunk.reservation is None or self.expandable else self._parked
        keys = kept.get(chunk.stream)
        if keys is None:
            keys = kept[chunk.stream] = SortedKeys()
        keys.add(chunk.size << _ADDRESS_BITS | chunk.address)

    def remove(self, chunk: Chunk) -> None:
        """Take out a free chunk."""
        del self.chunks[chunk.address]
        kept = self._free if chunk.reservation is None or self.expandable else self._parked
        kept[chunk.stream].remove(chunk.size << _ADDRESS_BITS | chunk.address)

    def best(self, stream: int, size: int) -> Chunk | None:
        """The smallest free chunk of at least ``size`` bytes, at the lowest address among equals.

        In an expandable segment, a chunk with unmapped addresses behind it counts as large as it could grow: from
        the smallest chunk on, while the next one could grow less than this one, that one is taken.
        """
        keys = self._free.get(stream)
        key = None if keys is None else keys.at_least(size << _ADDRESS_BITS)
        if keys is None or key is None:
            return None
        chunk = self.chunks[key & _ADDRESS]
        while chunk.reservation is not None:
            key = keys.at_least(key + 1)
            if key is None:
                break
            following = self.chunks[key & _ADDRESS]
            if _could_grow_to(following) >= _could_grow_to(chunk):
                break
            chunk = following
        return chunk

    def of_stream(self, stream: int) -> list[Chunk]:
        """The free chunks of a stream, in order of size, then address."""
        keys = [key for kept in (self._free, self._parked) for key in kept.get(stream, ())]
        return [self.chunks[key & _ADDRESS] for key in sorted(keys)]

    def in_order(self) -> list[Chunk]:
        """All free chunks, in order of stream, size, address."""
        return [chunk for stream in sorted({*self._free, *self._parked}) for chunk in self.of_stream(stream)]

    # Addresses without memory

    def add_unmapped(self, chunk: Chunk) -> None:
        """Put in a chunk without memory."""
        self.chunks[chunk.address] = chunk
        insort(self._unmapped.setdefault(chunk.stream, []), chunk.address)

    def remove_unmapped(self, chunk: Chunk) -> None:
        """Take out a chunk without memory."""
        del self.chunks[chunk.address]
        addresses = self._unmapped[chunk.stream]
        del addresses[bisect_left(addresses, chunk.address)]

    def unmapped(self, stream: int) -> Iterator[Chunk]:
        """The chunks without memory of a stream, in order of address."""
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
        """The first page boundary at or after ``address``."""
        return address + (self.base - address) % self.page

    def pages_to(self, address: int) -> int:
        """The last page boundary at or before ``address``."""
        return address - (address - self.base) % self.page
