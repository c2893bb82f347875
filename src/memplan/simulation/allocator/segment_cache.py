"""The segments that the caching allocator holds from the device, and their free chunks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator

from memplan._bytes import ALLOCATOR_BLOCK
from memplan.simulation.allocator.device_memory import Device
from memplan.simulation.allocator.expandable_segments import ExpandableSegments
from memplan.simulation.allocator.free_lists import Chunk, ChunkPool
from memplan.simulation.allocator.rounding import LARGEST_SMALL, segment_size
from memplan.simulation.allocator.segments import segment_of
from memplan.simulation.allocator.settings import AllocatorSettings
from memplan.simulation.timeline import DEFAULT_POOL, Pool, Segment


class SegmentCache:
    """Segments held from one device: takes new ones, and returns unused ones in torch's order.

    Args:
        settings: as in PYTORCH_ALLOC_CONF.
        device: the device's memory.
        place: returns the address of a new segment of so many bytes.
        total: bytes of the whole card.
        limit: bytes that the process may hold; garbage is collected only where there is a limit.
    """

    def __init__(
        self,
        settings: AllocatorSettings,
        device: Device,
        place: Callable[[int], int],
        total: int | None,
        limit: int | None,
    ) -> None:
        self.settings = settings
        self.device = device
        self.limit = limit
        self.expandable = ExpandableSegments(settings, device, place, total)
        self.collects = limit is not None and settings.garbage_collection_threshold > 0
        self.retired: list[Pool] = []
        """Private pools without a user: their unused segments may be released, too."""
        self.firsts: dict[int, Chunk] = {}
        """First chunk of each segment that is not expandable, by address."""
        self.pools: dict[Pool, tuple[ChunkPool, ChunkPool]] = {}
        """Free chunks of each memory pool: of small requests, of large ones."""
        self._place = place
        self._small, self._large = self.pool(DEFAULT_POOL)

    def pool(self, ident: Pool) -> tuple[ChunkPool, ChunkPool]:
        """Return the free chunks of a memory pool, of small and of large requests."""
        if ident not in self.pools:
            expandable = self.settings.expandable_segments
            self.pools[ident] = ChunkPool(ident, True, expandable), ChunkPool(ident, False, expandable)
        return self.pools[ident]

    def take_free(self, pool: ChunkPool, stream: int, size: int) -> Chunk | None:
        """Take the free chunk that serves a request out of its pool; None where there is none."""
        chunk = pool.best(stream, size)
        if chunk is None:
            return None
        split = self.settings.max_split_size
        if split is not None:
            rounding = self.settings.max_non_split_rounding
            spare = self.settings.large_segment_size if rounding is None else rounding
            # A block that is never split serves only requests that are themselves so large, and nearly as large.
            if chunk.size >= (split if size < split else size + spare):
                return None
        pool.remove(chunk)
        return chunk

    def splits(self, pool: ChunkPool, rest: int, size: int) -> bool:
        """Check whether ``rest`` bytes behind a request of ``size`` become a free chunk of their own."""
        if pool.small or self.settings.expandable_segments:
            return rest >= ALLOCATOR_BLOCK
        split = self.settings.max_split_size
        return rest > LARGEST_SMALL and (split is None or size < split)

    def over_limit(self, size: int) -> bool:
        """Check whether a segment for a request would exceed the process's limit."""
        return self.limit is not None and self.device.reserved + segment_size(self.settings, size) > self.limit

    def from_device(self, pool: ChunkPool, stream: int, size: int) -> Chunk | None:
        """Take a chunk of new memory for a request; None where the device or the limit has too little."""
        if self.over_limit(size):
            return None
        if self.settings.expandable_segments:
            return self.expandable.allocate(pool, stream, size)
        segment = segment_size(self.settings, size)
        if not self.device.has(segment):
            return None
        chunk = Chunk(pool, stream, self._place(segment), segment, None)
        self.firsts[chunk.address] = chunk
        self.device.take("segment_alloc", chunk.address, segment, stream, pool.ident)
        return chunk

    def release(self, chunk: Chunk) -> None:
        """Return a segment that is one free chunk."""
        chunk.pool.remove(chunk)
        del self.firsts[chunk.address]
        self.device.give_back("segment_free", chunk.address, chunk.size, chunk.stream, chunk.pool.ident)

    def release_unused(self) -> None:
        """Return every segment and page without a block in it."""
        for pool in (self._large, self._small):
            self._release_pool(pool)
        for ident in self.retired:
            for pool in self.pool(ident):
                self._release_pool(pool)

    def _release_pool(self, pool: ChunkPool) -> None:
        chunks = pool.in_order()
        for chunk in chunks:
            if chunk.reservation is None and chunk.whole:
                self.release(chunk)
        for chunk in chunks:
            if chunk.reservation is not None:
                self.expandable.unmap(chunk, chunk.address, chunk.address + chunk.size)

    def release_oversize(self, pool: ChunkPool, stream: int, size: int) -> bool:
        """Release, with a split limit, unused blocks above it: one that is large enough, or else the largest ones.

        Returns:
            Whether that is enough for the request.
        """
        split = self.settings.max_split_size
        if split is None:
            return False
        needed = max(size, split)
        chunks = pool.of_stream(stream)
        at = bisect_left(chunks, needed, key=lambda chunk: chunk.size)
        if at < len(chunks) and chunks[at].reservation is None:
            # Torch would release a part of a segment here, which it never has above the limit; a restored state may.
            if chunks[at].whole:
                self.release(chunks[at])
            return chunks[at].whole
        released = 0
        while at > 0 and released < needed and chunks[at - 1].size >= split:
            at -= 1
            if chunks[at].reservation is None and chunks[at].whole:
                released += chunks[at].size
                self.release(chunks[at])
        return released >= needed

    def collect_garbage(self) -> None:
        """Release, above the threshold, unused segments of the large pool, those of more than average age first."""
        assert self.limit is not None
        threshold = int(self.settings.garbage_collection_threshold * float(self.limit))
        surplus = self.device.reserved - threshold
        unused = [chunk for chunk in self._large.in_order() if chunk.whole]
        asked = self._large.asked
        age = sum(asked - chunk.born for chunk in unused)
        released = True
        while surplus > 0 and unused and released:
            average = age / len(unused)
            old = [chunk for chunk in unused if asked - chunk.born >= average and chunk.reservation is None]
            unused = [chunk for chunk in unused if asked - chunk.born < average or chunk.reservation is not None]
            released = bool(old)
            for chunk in old:
                surplus -= chunk.size
                age -= asked - chunk.born
                self.release(chunk)

    def free_chunks(self) -> Iterator[Chunk]:
        """Yield every free chunk that has memory."""
        for pools in self.pools.values():
            for pool in pools:
                yield from (chunk for chunk in pool.chunks.values() if chunk.mapped)

    def segments(self) -> tuple[Segment, ...]:
        """Return the held segments in order of address; of expandable segments, each stretch that has memory."""
        found = [segment_of(first) for first in self.firsts.values()]
        for reservation in self.expandable.reservations:
            chunk: Chunk | None = reservation.first
            while chunk is not None:
                if chunk.mapped and (chunk.left is None or not chunk.left.mapped):
                    found.append(segment_of(chunk))
                chunk = chunk.right
        return tuple(sorted(found, key=lambda segment: segment.address))
