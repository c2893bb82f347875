"""torch's CUDA caching allocator, exactly: the same requests get the same addresses and take the same segments.

The rules are those of c10/cuda/CUDACachingAllocator.cpp as of torch 2.10; what came since adds settings (see
`memplan.simulation.allocator.settings`), no rules for these. Bytes throughout.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable

from memplan.errors import UsageError
from memplan.simulation.allocator.device_memory import Device, OutOfMemory, ascending
from memplan.simulation.allocator.expandable_segments import ExpandableSegments
from memplan.simulation.allocator.free_lists import FREE, LIVE, PENDING, Chunk, ChunkPool
from memplan.simulation.allocator.rounding import LARGEST_SMALL, SMALLEST_BLOCK, block_size, segment_size
from memplan.simulation.allocator.segments import restored, segment_of
from memplan.simulation.allocator.settings import AllocatorSettings
from memplan.simulation.timeline import DEFAULT_POOL, Action, AllocatorEvent, Pool, Segment

__all__ = ["CachingAllocator", "OutOfMemory"]

_DEFAULTS = AllocatorSettings()


class CachingAllocator:
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
        total = capacity if total is None else total
        if limit is None and settings.memory_fraction < 1 and total is not None:
            limit = int(settings.memory_fraction * float(total))
        self.settings = settings
        self.limit = limit
        self.allocated = 0
        """Bytes in blocks that are handed out."""
        self.active = 0
        """The same, and those of blocks given back that still wait for other streams."""
        self.requested = 0
        """Bytes as asked for, of the active blocks."""
        self._device = Device(capacity)
        self.log: list[AllocatorEvent] = self._device.log
        """All that was done, in torch's order and words."""
        self._place = ascending() if place is None else place
        self._expandable = ExpandableSegments(settings, self._device, self._place, total)
        self._collects = limit is not None and settings.garbage_collection_threshold > 0
        self._rounds = bool(settings.roundup_power2_divisions)
        self._pools: dict[Pool, tuple[ChunkPool, ChunkPool]] = {}
        self._small, self._large = self._pool(DEFAULT_POOL)
        self._retired: list[Pool] = []
        self._segments: dict[int, Chunk] = {}
        """The first chunk of each segment that is not expandable."""
        self._live: dict[int, Chunk] = {}
        self._pending: dict[int, Chunk] = {}

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
        rounded = block_size(self.settings, size) if self._rounds else (size + 511) & -512
        pools = self._pools.get(pool) or self._pool(pool)
        source = pools[0] if rounded <= LARGEST_SMALL else pools[1]
        if self._collects:
            source.asked += 1
        chunk = None if fresh else self._cached(source, stream, rounded)
        if chunk is None:
            chunk = self._grow(source, stream, rounded, size)
        if self._cuts(source, chunk.size - rounded, rounded):
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

    def free(self, address: int, *, tick: int = 0) -> None:
        """Give a block back; it is free at once, or once the other streams that it was used on are done with it.

        Raises:
            UsageError: no block handed out begins there.
        """
        if address == 0:
            return
        chunk = self._live.pop(address, None)
        if chunk is None:
            raise _no_block(address, "handed out")
        self._device.tick = tick
        self.allocated -= chunk.size
        self._log_block("free_requested", chunk)
        if chunk.uses is None:
            self._complete(chunk)
        else:
            chunk.uses = None
            chunk.state = PENDING
            self._pending[address] = chunk

    def record_stream(self, address: int, stream: int) -> None:
        """A block is used on another stream than its own, too: giving it back will wait for that one.

        Raises:
            UsageError: no block handed out begins there.
        """
        if address == 0:
            return
        chunk = self._live.get(address)
        if chunk is None:
            raise _no_block(address, "handed out")
        if stream != chunk.stream:
            chunk.uses = {stream} if chunk.uses is None else chunk.uses | {stream}

    def complete(self, address: int, *, tick: int = 0) -> None:
        """The other streams are done with a block that was given back.

        Raises:
            UsageError: no such block begins there.
        """
        chunk = self._pending.pop(address, None)
        if chunk is None:
            raise _no_block(address, "given back and waiting")
        self._device.tick = tick
        self._complete(chunk)

    def synchronize(self, *, tick: int = 0) -> None:
        """All streams are done: every block that waits for one becomes free, in the order they were given back."""
        self._device.tick = tick
        self._synchronize()

    # Releases

    def empty_cache(self, *, tick: int = 0) -> None:
        """As `torch.cuda.empty_cache`: wait for all streams, then return every segment, or page, that is all free."""
        self._device.tick = tick
        self._release_unused()

    def retire(self, pool: Pool) -> None:
        """The last user of a private pool is gone: from now on its unused segments may be released, too."""
        if pool != DEFAULT_POOL and pool not in self._retired:
            self._retired.append(pool)

    def release_segment(self, address: int, *, tick: int = 0) -> bool:
        """Return the segment that begins at ``address`` to the device, if it is all free; whether it was."""
        chunk = self._segments.get(address)
        if chunk is None or chunk.state != FREE or not chunk.whole:
            return False
        self._device.tick = tick
        self._release(chunk)
        return True

    def unmap(self, address: int, size: int, *, tick: int = 0) -> bool:
        """Take back the memory of an expandable segment between two page boundaries, if it is all free.

        Returns:
            Whether it was, and lay within one free block.
        """
        chunk = self._free_chunk_around(address)
        if chunk is None or chunk.reservation is None or chunk.address + chunk.size < address + size:
            return False
        reservation = chunk.reservation
        if reservation.pages_to(address) != address or size % reservation.page or size <= 0:
            return False
        self._device.tick = tick
        return self._expandable.unmap(chunk, address, address + size)

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
        for first in restored(segments, self._expandable, lambda ident, small: self._pool(ident)[0 if small else 1]):
            if first.reservation is None:
                self._segments[first.address] = first
            chunk: Chunk | None = first
            while chunk is not None:
                self._adopt(chunk)
                chunk = chunk.right

    def segments(self) -> tuple[Segment, ...]:
        """What is held now, in order of address; of expandable segments, each stretch that has memory."""
        found = [segment_of(first) for first in self._segments.values()]
        for reservation in self._expandable.reservations:
            chunk: Chunk | None = reservation.first
            while chunk is not None:
                if chunk.mapped and (chunk.left is None or not chunk.left.mapped):
                    found.append(segment_of(chunk))
                chunk = chunk.right
        return tuple(sorted(found, key=lambda segment: segment.address))

    # Within

    def _pool(self, ident: Pool) -> tuple[ChunkPool, ChunkPool]:
        if ident not in self._pools:
            expandable = self.settings.expandable_segments
            self._pools[ident] = ChunkPool(ident, True, expandable), ChunkPool(ident, False, expandable)
        return self._pools[ident]

    def _cached(self, pool: ChunkPool, stream: int, size: int) -> Chunk | None:
        """The free chunk that serves, out of its pool."""
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

    def _cuts(self, pool: ChunkPool, rest: int, size: int) -> bool:
        if pool.small or self.settings.expandable_segments:
            return rest >= SMALLEST_BLOCK
        split = self.settings.max_split_size
        return rest > LARGEST_SMALL and (split is None or size < split)

    def _grow(self, pool: ChunkPool, stream: int, size: int, requested: int) -> Chunk:
        """A chunk of new memory, with the releases that torch makes where the device has too little."""
        if self._collects:
            self._collect()
        chunk = self._from_device(pool, stream, size)
        if chunk is None and not (self.settings.reject_over_limit and self._over_limit(size)):
            if self._release_oversize(pool, stream, size):
                chunk = self._from_device(pool, stream, size)
            if chunk is None and pool.ident == DEFAULT_POOL:
                self._release_unused()
                chunk = self._from_device(pool, stream, size)
        if chunk is None:
            raise self._out_of_memory(pool, stream, size, requested)
        return chunk

    def _over_limit(self, size: int) -> bool:
        return self.limit is not None and self._device.reserved + segment_size(self.settings, size) > self.limit

    def _from_device(self, pool: ChunkPool, stream: int, size: int) -> Chunk | None:
        if self._over_limit(size):
            return None
        if self.settings.expandable_segments:
            return self._expandable.allocate(pool, stream, size)
        segment = segment_size(self.settings, size)
        if not self._device.has(segment):
            return None
        chunk = Chunk(pool, stream, self._place(segment), segment, None)
        self._segments[chunk.address] = chunk
        self._device.take("segment_alloc", chunk.address, segment, stream, pool.ident)
        return chunk

    def _complete(self, chunk: Chunk) -> None:
        """A block is free: into its pool, as one with its free neighbours."""
        self._log_block("free_completed", chunk)
        self.active -= chunk.size
        self.requested -= chunk.requested
        chunk.requested = 0
        chunk.owner = None
        chunk.state = FREE
        pool, left, right = chunk.pool, chunk.left, chunk.right
        if right is not None and right.state == FREE and right.mapped:
            pool.remove(right)
            chunk.absorb_right()
        if left is not None and left.state == FREE and left.mapped:
            pool.remove(left)
            left.absorb_right()
            chunk = left
        pool.add(chunk)

    def _synchronize(self) -> None:
        waiting = list(self._pending.values())
        self._pending.clear()
        for chunk in waiting:
            self._complete(chunk)

    def _release(self, chunk: Chunk) -> None:
        chunk.pool.remove(chunk)
        del self._segments[chunk.address]
        self._device.give_back("segment_free", chunk.address, chunk.size, chunk.stream, chunk.pool.ident)

    def _release_unused(self) -> None:
        """Every segment and page that no block is in, after waiting for all streams."""
        self._synchronize()
        for pool in (self._large, self._small):
            self._release_pool(pool)
        for ident in self._retired:
            for pool in self._pool(ident):
                self._release_pool(pool)

    def _release_pool(self, pool: ChunkPool) -> None:
        chunks = pool.in_order()
        for chunk in chunks:
            if chunk.reservation is None and chunk.whole:
                self._release(chunk)
        for chunk in chunks:
            if chunk.reservation is not None:
                self._expandable.unmap(chunk, chunk.address, chunk.address + chunk.size)

    def _release_oversize(self, pool: ChunkPool, stream: int, size: int) -> bool:
        """With a split limit: unused blocks above it, one that is large enough or else the largest ones.

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
                self._release(chunks[at])
            return chunks[at].whole
        released = 0
        while at > 0 and released < needed and chunks[at - 1].size >= split:
            at -= 1
            if chunks[at].reservation is None and chunks[at].whole:
                released += chunks[at].size
                self._release(chunks[at])
        return released >= needed

    def _collect(self) -> None:
        """Above the threshold: release unused segments of the large pool, those of more than average age first."""
        assert self.limit is not None
        threshold = int(self.settings.garbage_collection_threshold * float(self.limit))
        surplus = self._device.reserved - threshold
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
                self._release(chunk)

    def _out_of_memory(self, pool: ChunkPool, stream: int, size: int, requested: int) -> OutOfMemory:
        ceilings = [ceiling for ceiling in (self.capacity, self.limit) if ceiling is not None]
        left = max(min(ceilings) - self.reserved, 0)
        self.log.append(AllocatorEvent("oom", left, size, stream, pool.ident, None, self._device.tick))
        free = [
            chunk.size
            for pools in self._pools.values()
            for one in pools
            for chunk in one.chunks.values()
            if chunk.mapped
        ]
        return OutOfMemory(
            requested=requested,
            segment=segment_size(self.settings, size),
            reserved=self.reserved,
            allocated=self.allocated,
            free_in_blocks=sum(free),
            largest_free=max(free, default=0),
            capacity=min(ceilings),
        )

    def _free_chunk_around(self, address: int) -> Chunk | None:
        for pools in self._pools.values():
            for pool in pools:
                for chunk in pool.chunks.values():
                    if chunk.mapped and chunk.address <= address < chunk.address + chunk.size:
                        return chunk
        return None

    def _adopt(self, chunk: Chunk) -> None:
        """Count a restored chunk in."""
        if not chunk.mapped:
            return
        self._device.reserved += chunk.size
        if chunk.state == FREE:
            chunk.pool.add(chunk)
            return
        self.active += chunk.size
        self.requested += chunk.requested
        if chunk.state == LIVE:
            self.allocated += chunk.size
            self._live[chunk.address] = chunk
        else:
            self._pending[chunk.address] = chunk

    def _log_block(self, action: Action, chunk: Chunk) -> None:
        pool, tick = chunk.pool.ident, self._device.tick
        self.log.append(AllocatorEvent(action, chunk.address, chunk.requested, chunk.stream, pool, chunk.owner, tick))


def _no_block(address: int, state: str) -> UsageError:
    return UsageError(f"no block that is {state} begins at address {address:#x}")
