"""A slow and obvious caching allocator, the independent source that the real one is held against.

It keeps no free blocks at all: a region is a range of addresses with a set of pages that have memory, and a list of
blocks in use. What is free is worked out anew each time, as the stretches of memory that no block covers; so there
is nothing to cut or to merge, and nothing is looked up other than by going through all there is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from memplan.simulation.allocator.allocator import OutOfMemory
from memplan.simulation.allocator.settings import AllocatorSettings
from memplan.simulation.timeline import AllocatorEvent, Block, Pool, Segment

MIB = 1 << 20


@dataclass(eq=False)
class Used:
    address: int
    size: int
    requested: int
    owner: int | None
    streams: set[int] = field(default_factory=set)
    pending: bool = False

    @property
    def end(self) -> int:
        return self.address + self.size


@dataclass(eq=False)
class Region:
    address: int
    size: int
    stream: int
    pool: Pool
    small: bool
    expandable: bool
    page: int
    pages: set[int]
    """First addresses of the pages with memory."""
    used: list[Used] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.address + self.size

    def stretches(self, mapped: bool) -> list[tuple[int, int]]:
        """From where to where pages have memory, or have none."""
        found: list[tuple[int, int]] = []
        without = (page for page in range(self.address, self.end, self.page) if page not in self.pages)
        for page in sorted(self.pages) if mapped else without:
            if found and found[-1][1] == page:
                found[-1] = found[-1][0], page + self.page
            else:
                found.append((page, page + self.page))
        return found

    def free(self) -> list[tuple[int, int]]:
        """From where to where there is memory and no block."""
        found: list[tuple[int, int]] = []
        used = sorted(self.used, key=lambda block: block.address)
        for start, end in self.stretches(True):
            at = start
            for block in used:
                if start <= block.address < end:
                    found.append((at, block.address))
                    at = block.end
            found.append((at, end))
        return [(start, end) for start, end in found if end > start]

    def empty(self) -> bool:
        return not self.used


class ReferenceAllocator:
    def __init__(
        self,
        settings: AllocatorSettings,
        place: Callable[[int], int],
        *,
        capacity: int | None = None,
        limit: int | None = None,
        total: int = 0,
    ) -> None:
        self.settings, self.place, self.capacity, self.limit, self.total = settings, place, capacity, limit, total
        self.regions: list[Region] = []
        self.log: list[AllocatorEvent] = []
        self.waiting: list[tuple[Region, Used]] = []
        self.retired: list[Pool] = []
        self.asked: dict[tuple[Pool, bool], int] = {}
        self.born: dict[tuple[int, int], int] = {}
        self.tick = 0

    # What is held

    @property
    def reserved(self) -> int:
        return sum(len(region.pages) * region.page for region in self.regions)

    @property
    def blocks(self) -> list[Used]:
        return [block for region in self.regions for block in region.used]

    @property
    def allocated(self) -> int:
        return sum(block.size for block in self.blocks if not block.pending)

    @property
    def active(self) -> int:
        return sum(block.size for block in self.blocks)

    @property
    def requested(self) -> int:
        return sum(block.requested for block in self.blocks)

    def segments(self) -> tuple[Segment, ...]:
        found: list[Segment] = []
        for region in self.regions:
            for start, end in region.stretches(True):
                blocks = [Block(a, b - a, 0, "inactive") for a, b in region.free() if start <= a < end]
                for block in region.used:
                    if start <= block.address < end:
                        state: Any = "active_pending_free" if block.pending else "active_allocated"
                        blocks.append(Block(block.address, block.size, block.requested, state, block.owner))
                blocks.sort(key=lambda block: block.address)
                found.append(
                    Segment(
                        start, end - start, region.stream, region.small, region.pool, region.expandable, tuple(blocks)
                    )
                )
        return tuple(sorted(found, key=lambda segment: segment.address))

    def free_list(self, pool: Pool, small: bool) -> list[tuple[int, int, int, Region]]:
        """Stream, size, address of the free stretches of a pool, in torch's order."""
        found = [
            (region.stream, end - start, start, region)
            for region in self.regions
            if region.pool == pool and region.small == small
            for start, end in region.free()
        ]
        return sorted(found, key=lambda entry: entry[:3])

    def note(self, action: Any, address: int, size: int, stream: int, pool: Pool, owner: int | None = None) -> None:
        self.log.append(AllocatorEvent(action, address, size, stream, pool, owner, self.tick))

    def settle(self) -> None:
        """Give each free stretch that was not there before its time of birth."""
        born: dict[tuple[int, int], int] = {}
        for region in self.regions:
            for stretch in region.free():
                born[stretch] = self.born.get(stretch, self.asked.get((region.pool, region.small), 0))
        self.born = born

    # Sizes

    def rounded(self, size: int) -> int:
        parts = dict(self.settings.roundup_power2_divisions)
        divisions = 0
        if parts:
            bucket = 1
            while bucket < 32768 and bucket * 2 * MIB <= size:
                bucket *= 2
            divisions = parts[bucket]
        if divisions > 1 and size > 512 * divisions:
            power = 1
            while power * 2 <= size:
                power *= 2
            return next(
                power + k * power // divisions for k in range(divisions + 1) if power + k * power // divisions >= size
            )
        result = 512
        while result < size:
            result += 512 * max(1, (size - result) // 512)
        return result

    def segment_bytes(self, size: int) -> int:
        if size <= MIB:
            return 2 * MIB
        if size < 10 * MIB:
            return self.settings.large_segment_size
        return -(-size // (2 * MIB)) * 2 * MIB

    # Requests

    def malloc(self, size: int, stream: int, pool: Pool, owner: int | None, tick: int) -> int:
        if size == 0:
            return 0
        self.tick = tick
        rounded = self.rounded(size)
        small = rounded <= MIB
        if self.limit is not None and self.settings.garbage_collection_threshold:
            self.asked[pool, small] = self.asked.get((pool, small), 0) + 1
        place = self.search(pool, small, stream, rounded)
        if place is None:
            place = self.grow(pool, small, stream, rounded, size)
        region, start = place
        room = next(b - a for a, b in region.free() if a == start)
        left = room - rounded
        if small or self.settings.expandable_segments:
            cut = left >= 512
        else:
            split = self.settings.max_split_size
            cut = left > MIB and (split is None or rounded < split)
        block = Used(start, rounded if cut else room, size, owner)
        region.used.append(block)
        self.note("alloc", start, size, stream, pool, owner)
        self.settle()
        return start

    def search(self, pool: Pool, small: bool, stream: int, size: int) -> tuple[Region, int] | None:
        fits = [entry for entry in self.free_list(pool, small) if entry[0] == stream and entry[1] >= size]
        if not self.settings.expandable_segments:
            fits = [entry for entry in fits if not entry[3].expandable]
        if not fits:
            return None
        at = 0
        while fits[at][3].expandable and at + 1 < len(fits) and self.growth(fits[at + 1]) < self.growth(fits[at]):
            at += 1
        _, room, start, region = fits[at]
        split = self.settings.max_split_size
        if split is not None:
            spare = self.settings.max_non_split_rounding
            if spare is None:
                spare = self.settings.large_segment_size
            if size < split <= room or (size >= split and room >= size + spare):
                return None
        return region, start

    def growth(self, entry: tuple[int, int, int, Region]) -> int:
        _, size, start, region = entry
        if region.expandable:
            size += sum(b - a for a, b in region.stretches(False) if a == start + size)
        return size

    def grow(self, pool: Pool, small: bool, stream: int, size: int, requested: int) -> tuple[Region, int]:
        split = self.settings.max_split_size
        if self.limit is not None and self.settings.garbage_collection_threshold:
            self.collect()
        over = self.limit is not None and self.reserved + self.segment_bytes(size) > self.limit
        place = self.from_device(pool, small, stream, size)
        if place is None and not (self.settings.reject_over_limit and over):
            if split is not None and self.release_oversize(pool, small, stream, max(size, split), split):
                place = self.from_device(pool, small, stream, size)
            if place is None and pool == (0, 0):
                self.release_unused()
                place = self.from_device(pool, small, stream, size)
        if place is not None:
            return place
        ceiling = min(c for c in (self.capacity, self.limit) if c is not None)
        self.settle()
        self.note("oom", max(ceiling - self.reserved, 0), size, stream, pool)
        free = [end - start for region in self.regions for start, end in region.free()]
        raise OutOfMemory(
            requested=requested,
            segment=self.segment_bytes(size),
            reserved=self.reserved,
            allocated=self.allocated,
            free_in_blocks=sum(free),
            largest_free=max(free, default=0),
            capacity=ceiling,
        )

    def from_device(self, pool: Pool, small: bool, stream: int, size: int) -> tuple[Region, int] | None:
        segment = self.segment_bytes(size)
        if self.limit is not None and self.reserved + segment > self.limit:
            return None
        if self.settings.expandable_segments:
            return self.expand(pool, small, stream, size)
        if self.capacity is not None and self.reserved + segment > self.capacity:
            return None
        region = Region(self.place(segment), segment, stream, pool, small, False, segment, set())
        region.pages.add(region.address)
        self.regions.append(region)
        self.note("segment_alloc", region.address, segment, stream, pool)
        return region, region.address

    def expand(self, pool: Pool, small: bool, stream: int, size: int) -> tuple[Region, int] | None:
        region, start = self.room(pool, small, stream, size)
        for a, b in region.stretches(False):
            if b > start and a < start + size:
                end = min(b, start + size)
                pages = [page for page in range(a, b, region.page) if page < end]
                # Each stretch on its own: what was had before the device ran out stays.
                if self.capacity is not None and self.reserved + len(pages) * region.page > self.capacity:
                    self.settle()
                    return None
                region.pages |= set(pages)
                self.note("segment_map", a, len(pages) * region.page, stream, pool)
        return region, start

    def room(self, pool: Pool, small: bool, stream: int, size: int) -> tuple[Region, int]:
        """The lowest address from which on so much is free or without memory, at or just before some of the latter."""
        for region in sorted(self.regions, key=lambda region: region.address):
            if not region.expandable or (region.pool, region.small, region.stream) != (pool, small, stream):
                continue
            for a, _ in region.stretches(False):
                start = next((begin for begin, end in region.free() if end == a), a)
                end = min((block.address for block in region.used if block.address >= a), default=region.end)
                if end - start >= size:
                    return region, start
        page = 2 * MIB if small else self.settings.large_segment_size
        wanted = max(self.total + self.total // 8, size)
        wanted += -wanted % page
        region = Region(self.place(wanted), wanted, stream, pool, small, True, page, set())
        self.regions.append(region)
        return region, region.address

    def find(self, address: int, pending: bool) -> tuple[Region, Used]:
        return next(
            (region, block)
            for region in self.regions
            for block in region.used
            if block.address == address and block.pending is pending
        )

    def free(self, address: int, tick: int) -> None:
        if address == 0:
            return
        self.tick = tick
        region, block = self.find(address, False)
        self.note("free_requested", address, block.requested, region.stream, region.pool, block.owner)
        if block.streams:
            block.pending = True
            self.waiting.append((region, block))
        else:
            self.finish(region, block)

    def finish(self, region: Region, block: Used) -> None:
        self.note("free_completed", block.address, block.requested, region.stream, region.pool, block.owner)
        region.used.remove(block)
        self.settle()

    def record_stream(self, address: int, stream: int) -> None:
        region, block = self.find(address, False)
        if stream != region.stream:
            block.streams.add(stream)

    def complete(self, address: int, tick: int) -> None:
        self.tick = tick
        region, block = self.find(address, True)
        self.waiting.remove((region, block))
        self.finish(region, block)

    def synchronize(self, tick: int) -> None:
        self.tick = tick
        for region, block in self.waiting:
            self.finish(region, block)
        self.waiting.clear()

    # Releases

    def empty_cache(self, tick: int) -> None:
        self.tick = tick
        self.release_unused()

    def retire(self, pool: Pool) -> None:
        if pool != (0, 0) and pool not in self.retired:
            self.retired.append(pool)

    def release(self, region: Region) -> None:
        self.regions.remove(region)
        self.note("segment_free", region.address, region.size, region.stream, region.pool)

    def release_unused(self) -> None:
        self.synchronize(self.tick)
        pools = [((0, 0), False), ((0, 0), True)]
        for pool in self.retired:
            pools += [(pool, True), (pool, False)]
        for pool, small in pools:
            entries = self.free_list(pool, small)
            for _, _, _, region in entries:
                if not region.expandable and region.empty():
                    self.release(region)
            for _, size, start, region in entries:
                if region.expandable:
                    self.unmap(region, start, start + size)
        self.settle()

    def unmap(self, region: Region, start: int, end: int) -> None:
        pages = sorted(page for page in region.pages if start <= page and page + region.page <= end)
        if pages:
            region.pages -= set(pages)
            self.note("segment_unmap", pages[0], len(pages) * region.page, region.stream, region.pool)
            if not region.pages:
                self.regions.remove(region)

    def release_oversize(self, pool: Pool, small: bool, stream: int, needed: int, split: int) -> bool:
        entries = [entry for entry in self.free_list(pool, small) if entry[0] == stream]
        large = [entry for entry in entries if entry[1] >= needed]
        if large and not large[0][3].expandable:
            if large[0][3].empty():
                self.release(large[0][3])
                return True
            return False
        released = 0
        for _, size, _, region in reversed([entry for entry in entries if split <= entry[1] < needed]):
            if released >= needed:
                break
            if not region.expandable and region.empty():
                self.release(region)
                released += size
        return released >= needed

    def collect(self) -> None:
        assert self.limit is not None
        target = self.reserved - int(self.settings.garbage_collection_threshold * float(self.limit))
        reclaimed = 0
        whole = [
            (self.asked.get(((0, 0), False), 0) - self.born[start, start + size], region)
            for _, size, start, region in self.free_list((0, 0), False)
            if region.empty() and size == region.size
        ]
        while reclaimed < target and whole:
            average = sum(age for age, _ in whole) / len(whole)
            old = [(age, region) for age, region in whole if age >= average and not region.expandable]
            if not old:
                break
            for entry in old:
                reclaimed += entry[1].size
                self.release(entry[1])
                whole.remove(entry)
