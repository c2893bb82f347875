"""The segments that the caching allocator holds, and the release of unused ones."""

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
    """The segments of a device: allocates new ones, and releases unused ones in torch's order.

    Args:
        place: maps the size of a new segment to its address.
        limit: bytes that the process may hold; garbage is collected only if there is a limit.
    """

    def __init__(
        self,
        settings: AllocatorSettings,
        device: Device,
        place: Callable[[int], int],
        total: int | None,
        limit: int | None,
    ) -> None:
        """``place`` maps the size of a new segment to its address. Bytes: ``total`` of the card, None if unknown, and
        ``limit`` of the process, None without a limit."""
        self.settings = settings
        self.device = device
        self.limit = limit
        self.expandable = ExpandableSegments(settings, device, place, total)
        """The segments that grow page by page, if the settings have ``expandable_segments``."""
        self.collects_garbage = limit is not None and settings.garbage_collection_threshold > 0
        """Whether unused segments are released from a share of the limit on (`collect_garbage`)."""
        self.retired: list[Pool] = []
        """Private pools that nobody uses any more, so their unused segments may be released."""
        self.firsts: dict[int, Chunk] = {}
        """The first chunk of each segment that is not expandable, by address."""
        self.pools: dict[Pool, tuple[ChunkPool, ChunkPool]] = {}
        """The free chunks of each memory pool: (for small requests, for large requests)."""
        self._place = place
        self._small, self._large = self.pool(DEFAULT_POOL)
        """Free chunks outside of private pools, for small and for large requests."""

    def pool(self, ident: Pool) -> tuple[ChunkPool, ChunkPool]:
        """Return the free chunks of a memory pool: (for small requests, for large requests)."""
        if ident not in self.pools:
            expandable = self.settings.expandable_segments
            self.pools[ident] = (
                ChunkPool(ident, small=True, expandable=expandable),
                ChunkPool(ident, small=False, expandable=expandable),
            )
        return self.pools[ident]

    def take_free(self, pool: ChunkPool, stream: int, size: int) -> Chunk | None:
        """Remove the free chunk that serves a request from its pool and return it, or return None."""
        chunk = pool.best_fit(stream, size)
        if chunk is None:
            return None
        limit = self.settings.max_split_size
        if limit is not None:
            rounding = self.settings.max_non_split_rounding
            slack = self.settings.large_segment_size if rounding is None else rounding
            # A block above the split limit serves only requests above the limit, of nearly its size.
            if chunk.size >= (limit if size < limit else size + slack):
                return None
        pool.remove(chunk)
        return chunk

    def should_split(self, pool: ChunkPool, remainder: int, size: int) -> bool:
        """Return whether the ``remainder`` bytes of a chunk after a block of ``size`` bytes become a free chunk."""
        if pool.small or self.settings.expandable_segments:
            return remainder >= ALLOCATOR_BLOCK
        limit = self.settings.max_split_size
        return remainder > LARGEST_SMALL and (limit is None or size < limit)

    def exceeds_limit(self, size: int) -> bool:
        """Check whether a segment for a request would exceed the process's limit."""
        return self.limit is not None and self.device.reserved + segment_size(self.settings, size) > self.limit

    def allocate(self, pool: ChunkPool, stream: int, size: int) -> Chunk | None:
        """Return a chunk of new memory for a request, or None if the device or the limit has too little."""
        if self.exceeds_limit(size):
            return None
        if self.settings.expandable_segments:
            return self.expandable.allocate(pool, stream, size)
        segment = segment_size(self.settings, size)
        if not self.device.has_room(segment):
            return None
        chunk = Chunk(pool, stream, self._place(segment), segment, reservation=None)
        self.firsts[chunk.address] = chunk
        self.device.reserve("segment_alloc", chunk.address, segment, stream, pool.ident)
        return chunk

    def release(self, chunk: Chunk) -> None:
        """Release a segment: the free chunk that fills it."""
        chunk.pool.remove(chunk)
        del self.firsts[chunk.address]
        self.device.release("segment_free", chunk.address, chunk.size, chunk.stream, chunk.pool.ident)

    def release_unused(self) -> None:
        """Release every segment and page without a block in use."""
        for pool in (self._large, self._small):
            self._release_pool(pool)
        for ident in self.retired:
            for pool in self.pool(ident):
                self._release_pool(pool)

    def _release_pool(self, pool: ChunkPool) -> None:
        """Release the unused segments of a pool and unmap its unused pages, in torch's order."""
        chunks = pool.ordered_chunks()
        for chunk in chunks:
            if chunk.reservation is None and chunk.fills_segment:
                self.release(chunk)
        for chunk in chunks:
            if chunk.reservation is not None:
                self.expandable.unmap(chunk, chunk.address, chunk.address + chunk.size)

    def release_oversize(self, pool: ChunkPool, stream: int, size: int) -> bool:
        """Under a split limit, release the smallest sufficient unused block above it, or else the largest blocks.

        Chunks with a ``reservation`` are parts of expandable segments, which torch does not release here
        (release_available_cached_blocks).

        Returns:
            Whether enough was released for the request.
        """
        limit = self.settings.max_split_size
        if limit is None:
            return False
        needed = max(size, limit)
        chunks = pool.chunks_of_stream(stream)
        index = bisect_left(chunks, needed, key=lambda chunk: chunk.size)
        if index < len(chunks) and chunks[index].reservation is None:
            # Chunks above the limit are whole segments in torch; in a restored state they may not be.
            if chunks[index].fills_segment:
                self.release(chunks[index])
            return chunks[index].fills_segment
        # no block is large enough, or the smallest such block is expandable: those before it, the largest first
        released = 0
        while index > 0 and released < needed and chunks[index - 1].size >= limit:
            index -= 1
            if chunks[index].reservation is None and chunks[index].fills_segment:
                released += chunks[index].size
                self.release(chunks[index])
        return released >= needed

    def collect_garbage(self) -> None:
        """Release unused segments of the large pool, those above average age first, until the threshold is met."""
        assert self.limit is not None
        threshold = int(self.settings.garbage_collection_threshold * float(self.limit))
        excess = self.device.reserved - threshold
        unused = [chunk for chunk in self._large.ordered_chunks() if chunk.fills_segment]
        now = self._large.request_count
        total_age = sum(now - chunk.freed_at for chunk in unused)
        released = True
        while excess > 0 and unused and released:
            average = total_age / len(unused)
            expired = [chunk for chunk in unused if now - chunk.freed_at >= average and chunk.reservation is None]
            unused = [chunk for chunk in unused if now - chunk.freed_at < average or chunk.reservation is not None]
            released = bool(expired)
            for chunk in expired:
                excess -= chunk.size
                total_age -= now - chunk.freed_at
                self.release(chunk)

    def free_chunks(self) -> Iterator[Chunk]:
        """Yield every mapped free chunk."""
        for pools in self.pools.values():
            for pool in pools:
                yield from (chunk for chunk in pool.chunks.values() if chunk.mapped)

    def segments(self) -> tuple[Segment, ...]:
        """Return the segments in order of address. Each mapped stretch of an expandable segment counts as a segment."""
        segments = [segment_of(first) for first in self.firsts.values()]
        for reservation in self.expandable.reservations:
            chunk: Chunk | None = reservation.first
            while chunk is not None:
                if chunk.mapped and (chunk.left is None or not chunk.left.mapped):
                    segments.append(segment_of(chunk))
                chunk = chunk.right
        return tuple(sorted(segments, key=lambda segment: segment.address))
