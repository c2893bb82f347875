"""torch's CUDA caching allocator, exactly: the same requests get the same addresses and take the same segments.

The rules are those of c10/cuda/CUDACachingAllocator.cpp as of torch 2.10; what came since adds settings (see
`memplan.simulation.allocator.settings`), no rules for these. Bytes throughout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from memplan._bytes import round_to_blocks
from memplan.errors import UsageError
from memplan.simulation.allocator.blocks import BlockTable
from memplan.simulation.allocator.device_memory import OutOfMemory, ascending
from memplan.simulation.allocator.free_lists import FREE, LIVE, Chunk, ChunkPool
from memplan.simulation.allocator.rounding import LARGEST_SMALL, block_size, segment_size
from memplan.simulation.allocator.segment_cache import SegmentCache
from memplan.simulation.allocator.segments import restored
from memplan.simulation.allocator.settings import AllocatorSettings
from memplan.simulation.timeline import DEFAULT_POOL, AllocatorEvent, Pool, Segment

__all__ = ["CachingAllocator", "OutOfMemory"]

_DEFAULTS = AllocatorSettings()


class CachingAllocator(BlockTable):
    """One device's caching allocator.

    Args:
        settings: as in PYTORCH_ALLOC_CONF.
        capacity: bytes that the device can give to this allocator; None: no end.
        place: gives the address of each new segment (with expandable segments: of each new range of addresses) of so
            many bytes. By default, one behind the other.
        total: bytes of the whole card, of which ``settings.memory_fraction`` is a share; ``capacity`` where not given.
        limit: bytes that the process allows itself, as `torch.cuda.set_per_process_memory_fraction` sets them.
            Garbage is collected only where there is such a limit.

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
        super().__init__(capacity)
        total = capacity if total is None else total
        if limit is None and settings.memory_fraction < 1 and total is not None:
            limit = int(settings.memory_fraction * float(total))
        self.settings = settings
        self.limit = limit
        self._cache = SegmentCache(settings, self._device, place or ascending(), total, limit)
        self._rounds = bool(settings.roundup_power2_divisions)

    @property
    def reserved(self) -> int:
        """Bytes held from the device."""
        return self._device.reserved

    @property
    def capacity(self) -> int | None:
        """Bytes that the device can give to this allocator; None: no end."""
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
        """Hand out a block.

        Args:
            size: bytes; 0 takes no block.
            stream: the stream that it is for.
            pool: of a CUDA graph or the user's; while one is in use, no segment is released for a request.
            owner: written into the log and the block.
            tick: written into the log.
            fresh: pass over the free blocks, as torch does once it has released what is unused.

        Returns:
            The block's address; 0 for 0 bytes.

        Raises:
            OutOfMemory: the device has too little, also after the releases that torch makes.
            UsageError: a negative size.
        """
        if size <= 0:
            if size < 0:
                raise UsageError(f"a request for {size} bytes", expected="0 or more")
            return 0
        self._device.tick = tick
        rounded = block_size(self.settings, size) if self._rounds else round_to_blocks(size)
        pools = self._cache.pools.get(pool) or self._cache.pool(pool)
        source = pools[0] if rounded <= LARGEST_SMALL else pools[1]
        if self._cache.collects:
            source.asked += 1
        chunk = None if fresh else self._cache.take_free(source, stream, rounded)
        if chunk is None:
            chunk = self._grow(source, stream, rounded, size)
        if self._cache.splits(source, chunk.size - rounded, rounded):
            source.add(chunk.cut(rounded))
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
        """Wait for all streams as `torch.cuda.empty_cache` does, then return every segment, or page, that is all
        free."""
        self._device.tick = tick
        self._release_unused()

    def retire(self, pool: Pool) -> None:
        """Note that the last user of a private pool is gone: from now on its unused segments may be released, too."""
        if pool != DEFAULT_POOL and pool not in self._cache.retired:
            self._cache.retired.append(pool)

    def release_segment(self, address: int, *, tick: int = 0) -> bool:
        """Return the segment that begins at ``address`` to the device, if it is all free; whether it was."""
        chunk = self._cache.firsts.get(address)
        if chunk is None or chunk.state != FREE or not chunk.whole:
            return False
        self._device.tick = tick
        self._cache.release(chunk)
        return True

    def unmap(self, address: int, size: int, *, tick: int = 0) -> bool:
        """Take back the memory of an expandable segment between two page boundaries, if it is all free.

        Returns:
            Whether it was, and lay within one free block.
        """
        around = (chunk for chunk in self._cache.free_chunks() if 0 <= address - chunk.address < chunk.size)
        chunk = next(around, None)
        if chunk is None or chunk.reservation is None or chunk.address + chunk.size < address + size:
            return False
        reservation = chunk.reservation
        if reservation.pages_to(address) != address or size % reservation.page or size <= 0:
            return False
        self._device.tick = tick
        return self._cache.expandable.unmap(chunk, address, address + size)

    # State

    def restore(self, segments: Iterable[Segment]) -> None:
        """Begin with these segments and blocks instead of with nothing; the log stays empty.

        A pending block waits until `complete` or `synchronize`. Where an expandable segment lies in its range of
        addresses is not recorded: a range is taken to begin at its first segment.

        Raises:
            UsageError: something is already held, or blocks do not fill their segment, or segments overlap.
        """
        if self._device.reserved or self.log:
            raise UsageError("an allocator that is in use cannot be given a state", expected="a new one")
        for first in restored(
            segments, self._cache.expandable, lambda ident, small: self._cache.pool(ident)[0 if small else 1]
        ):
            if first.reservation is None:
                self._cache.firsts[first.address] = first
            chunk: Chunk | None = first
            while chunk is not None:
                self._adopt(chunk)
                chunk = chunk.right

    def segments(self) -> tuple[Segment, ...]:
        """Return what is held now, in order of address; of expandable segments, each stretch that has memory."""
        return self._cache.segments()

    # Within

    def _grow(self, pool: ChunkPool, stream: int, size: int, requested: int) -> Chunk:
        """Return a chunk of new memory, with the releases that torch makes where the device has too little."""
        if self._cache.collects:
            self._cache.collect_garbage()
        chunk = self._cache.from_device(pool, stream, size)
        if chunk is None and not (self.settings.reject_over_limit and self._cache.over_limit(size)):
            if self._cache.release_oversize(pool, stream, size):
                chunk = self._cache.from_device(pool, stream, size)
            if chunk is None and pool.ident == DEFAULT_POOL:
                self._release_unused()
                chunk = self._cache.from_device(pool, stream, size)
        if chunk is None:
            raise self._out_of_memory(pool, stream, size, requested)
        return chunk

    def _release_unused(self) -> None:
        """Return every segment and page without a block in it, after waiting for all streams."""
        self._synchronize()
        self._cache.release_unused()

    def _out_of_memory(self, pool: ChunkPool, stream: int, size: int, requested: int) -> OutOfMemory:
        ceilings = [ceiling for ceiling in (self.capacity, self.limit) if ceiling is not None]
        left = max(min(ceilings) - self.reserved, 0)
        self.log.append(AllocatorEvent("oom", left, size, stream, pool.ident, None, self._device.tick))
        free = [chunk.size for chunk in self._cache.free_chunks()]
        return OutOfMemory(
            requested=requested,
            segment=segment_size(self.settings, size),
            reserved=self.reserved,
            allocated=self.allocated,
            free_in_blocks=sum(free),
            largest_free=max(free, default=0),
            capacity=min(ceilings),
        )
