"""torch's CUDA caching allocator, simulated exactly: the same requests get the same addresses and segments.

The rules are those of c10/cuda/CUDACachingAllocator.cpp of torch 2.10. Later versions add settings (see
`memplan.simulation.allocator.settings`), but do not change these rules. Bytes throughout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from memplan._bytes import round_to_blocks
from memplan.errors import UsageError
from memplan.simulation.allocator.blocks import BlockTable
from memplan.simulation.allocator.device_memory import OutOfMemory, ascending_addresses
from memplan.simulation.allocator.free_lists import FREE, LIVE, Chunk, ChunkPool
from memplan.simulation.allocator.rounding import LARGEST_SMALL, block_size, segment_size
from memplan.simulation.allocator.segment_cache import SegmentCache
from memplan.simulation.allocator.segments import build_chunks
from memplan.simulation.allocator.settings import AllocatorSettings
from memplan.simulation.timeline import DEFAULT_POOL, AllocatorEvent, Pool, Segment

__all__ = ["CachingAllocator", "OutOfMemory"]

_DEFAULTS = AllocatorSettings()


class CachingAllocator(BlockTable):
    """The caching allocator of a device.

    Args:
        settings: as in PYTORCH_ALLOC_CONF.
        capacity: bytes that the device can give to this allocator; None: unlimited.
        place: maps the size of a new segment (with expandable segments: of a new address range) to its address. By
            default the segments follow each other.
        total: bytes of the whole card, of which ``settings.memory_fraction`` is a share; by default ``capacity``.
        limit: bytes that the process may hold, as `torch.cuda.set_per_process_memory_fraction` sets them. Garbage is
            collected only if there is such a limit.

    Example:
        >>> allocator = CachingAllocator()
        >>> address = allocator.malloc(3 << 20)
        >>> allocator.allocated, allocator.reserved
        (3145728, 20971520)
    """

    def __init__(
        self,
        settings: AllocatorSettings = _DEFAULTS,
        *,
        capacity: int | None = None,
        place: Callable[[int], int] | None = None,
        total: int | None = None,
        limit: int | None = None,
    ) -> None:
        """Begin without segments.

        ``place`` maps the size of a new segment to its address. Bytes: ``capacity`` of the device (None: unlimited),
        ``total`` of the whole card, ``limit`` of the process.
        """
        super().__init__(capacity)
        total = capacity if total is None else total
        if limit is None and settings.memory_fraction < 1 and total is not None:
            limit = int(settings.memory_fraction * float(total))
        self.settings = settings
        self.limit = limit
        self._cache = SegmentCache(settings, self._device, place or ascending_addresses(), total, limit)
        self._has_divisions = bool(settings.roundup_power2_divisions)

    @property
    def reserved(self) -> int:
        """Bytes of all segments."""
        return self._device.reserved

    @property
    def capacity(self) -> int | None:
        """Bytes that the device can give to this allocator; None: unlimited."""
        return self._device.capacity

    @capacity.setter
    def capacity(self, capacity: int | None) -> None:
        self._device.capacity = capacity

    # Requests

    def malloc(
        self,
        size: int,
        *,
        stream: int = 0,
        pool: Pool = DEFAULT_POOL,
        owner: int | None = None,
        tick: int = 0,
        fresh: bool = False,
    ) -> int:
        """Allocate a block.

        Args:
            size: bytes; 0 allocates no block.
            stream: the stream that allocates it.
            pool: a memory pool, such as that of a CUDA graph. For a private pool no cached memory is released.
            owner: written into the log and the block.
            tick: written into the log.
            fresh: do not reuse a free block, as torch after it has released unused segments.

        Returns:
            The address of the block; 0 for 0 bytes.

        Raises:
            OutOfMemory: the device has too little memory, even after unused segments were released.
            UsageError: a negative size.
        """
        if size <= 0:
            if size < 0:
                raise UsageError(f"a request for {size} bytes", expected="0 or more")
            return 0
        self._device.tick = tick
        rounded = block_size(self.settings, size) if self._has_divisions else round_to_blocks(size)
        pools = self._cache.pools.get(pool) or self._cache.pool(pool)
        chunks = pools[0] if rounded <= LARGEST_SMALL else pools[1]
        if self._cache.collects_garbage:
            chunks.request_count += 1
        chunk = None if fresh else self._cache.take_free(chunks, stream, rounded)
        if chunk is None:
            chunk = self._allocate_chunk(chunks, stream, rounded, size)
        if self._cache.should_split(chunks, chunk.size - rounded, rounded):
            chunks.add(chunk.split(rounded))
        chunk.state = LIVE
        chunk.requested = size
        chunk.owner = owner
        self._live[chunk.address] = chunk
        self.allocated += chunk.size
        self.active += chunk.size
        self.requested += size
        self.log.append(AllocatorEvent("alloc", chunk.address, size, stream, pool, owner, tick))
        return chunk.address

    # Releases

    def empty_cache(self, *, tick: int = 0) -> None:
        """Wait for all streams and release every unused segment and page, as `torch.cuda.empty_cache` does."""
        self._device.tick = tick
        self._release_unused()

    def retire(self, pool: Pool) -> None:
        """Allow the release of unused segments of a private pool that nobody uses any more."""
        if pool != DEFAULT_POOL and pool not in self._cache.retired:
            self._cache.retired.append(pool)

    def release_segment(self, address: int, *, tick: int = 0) -> bool:
        """Release the segment at ``address`` if no block in it is in use. Return whether it was released."""
        chunk = self._cache.firsts.get(address)
        if chunk is None or chunk.state != FREE or not chunk.fills_segment:
            return False
        self._device.tick = tick
        self._cache.release(chunk)
        return True

    def unmap(self, address: int, size: int, *, tick: int = 0) -> bool:
        """Unmap ``size`` bytes of an expandable segment, which begin and end at page boundaries.

        Returns:
            Whether they were unmapped: they must lie within a free block.
        """
        containing = (chunk for chunk in self._cache.free_chunks() if 0 <= address - chunk.address < chunk.size)
        chunk = next(containing, None)
        if chunk is None or chunk.reservation is None or chunk.address + chunk.size < address + size:
            return False
        reservation = chunk.reservation
        if reservation.pages_to(address) != address or size % reservation.page or size <= 0:
            return False
        self._device.tick = tick
        return self._cache.expandable.unmap(chunk, address, address + size)

    # State

    def restore(self, segments: Iterable[Segment]) -> None:
        """Set the state of a new allocator to these segments and blocks; the log stays empty.

        A pending block stays so until `complete` or `synchronize`. The address range that an expandable segment lies in
        is not recorded: it is assumed to begin at its first segment. Raises UsageError if the allocator is in use, or
        blocks do not fill their segment, or segments overlap.
        """
        if self._device.reserved or self.log:
            raise UsageError("an allocator that is in use cannot be given a state", expected="a new one")

        def find_pool(ident: Pool, small: bool) -> ChunkPool:
            for_small, for_large = self._cache.pool(ident)
            return for_small if small else for_large

        for first in build_chunks(segments, self._cache.expandable, find_pool):
            if first.reservation is None:
                self._cache.firsts[first.address] = first
            chunk: Chunk | None = first
            while chunk is not None:
                self._adopt(chunk)
                chunk = chunk.right

    def segments(self) -> tuple[Segment, ...]:
        """Return the segments in order of address. Each mapped stretch of an expandable segment counts as a segment."""
        return self._cache.segments()

    # Within

    def _allocate_chunk(self, pool: ChunkPool, stream: int, size: int, requested: int) -> Chunk:
        """Return a chunk of new memory for a block of ``size`` bytes (``requested`` before rounding). If the device has
        too little, release cached memory in torch's order first; if that is not enough, raise OutOfMemory."""
        if self._cache.collects_garbage:
            self._cache.collect_garbage()
        chunk = self._cache.allocate(pool, stream, size)
        if chunk is None and not (self.settings.reject_over_limit and self._cache.exceeds_limit(size)):
            if self._cache.release_oversize(pool, stream, size):
                chunk = self._cache.allocate(pool, stream, size)
            if chunk is None and pool.ident == DEFAULT_POOL:
                self._release_unused()
                chunk = self._cache.allocate(pool, stream, size)
        if chunk is None:
            raise self._out_of_memory(pool, stream, size, requested)
        return chunk

    def _release_unused(self) -> None:
        self._synchronize()
        self._cache.release_unused()

    def _out_of_memory(self, pool: ChunkPool, stream: int, size: int, requested: int) -> OutOfMemory:
        """Log the failed request and return the error that describes it."""
        capacity = min(bound for bound in (self.capacity, self.limit) if bound is not None)
        left = max(capacity - self.reserved, 0)
        self.log.append(AllocatorEvent("oom", left, size, stream, pool.ident, owner=None, tick=self._device.tick))
        free = [chunk.size for chunk in self._cache.free_chunks()]
        return OutOfMemory(
            requested=requested,
            segment=segment_size(self.settings, size),
            reserved=self.reserved,
            allocated=self.allocated,
            free_in_blocks=sum(free),
            largest_free=max(free, default=0),
            capacity=capacity,
        )
