"""Reconstruct the allocator's state before a snapshot's history, by undoing the recorded events from the last one.

Two facts are not recorded and have to be inferred. The size of a block that was freed before the snapshot: its request
rounded to the allocator's blocks, plus any gap of at most 1 MiB that ever lay behind it in a segment of the large pool.
That pool has no free blocks so small, so such a gap is a remainder that was not split off. And the pool of a segment
that was released before the snapshot: inferred from the sizes of the blocks in it, else from the segment's size.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from memplan.simulation.allocator.allocator import CachingAllocator
from memplan.simulation.allocator.occupied import restored
from memplan.simulation.allocator.rounding import LARGEST_SMALL, SMALL_SEGMENT, block_size
from memplan.simulation.allocator.settings import AllocatorSettings
from memplan.simulation.snapshots.read import Entry, Snapshot
from memplan.simulation.timeline import DEFAULT_POOL, Block, Pool, Segment


@dataclass(frozen=True, slots=True)
class Start:
    """The allocator's state before the first event of a history."""

    segments: tuple[Segment, ...]
    """The owner of a live block is len(history) + its rank among the live blocks in order of address."""
    stacks: tuple[int, ...]
    """For each live block, the index of its allocation stack; 0 (the empty stack) if it was freed later."""
    conflicts: tuple[tuple[int, str], ...]
    """Events that contradict the later ones: (index of the event, what is wrong)."""
    below: tuple[Segment, ...] = ()
    """For expandable segments whose lowest pages were mapped during the history: the first page of their range."""

    uncertain: frozenset[int] = frozenset()
    """Owners of blocks that may extend into the free block behind them."""

    def with_larger_block(self, owner: int, extra: int) -> Start:
        """Return this state with the block of ``owner`` ``extra`` bytes larger and the free block behind it smaller."""
        segments = tuple(_with_larger_block(segment, owner, extra) for segment in self.segments)
        return replace(self, segments=segments)

    def allocator(
        self, settings: AllocatorSettings, *, capacity: int | None = None, place: Callable[[int], int] | None = None
    ) -> CachingAllocator:
        """Return a caching allocator in this state, with an empty log."""
        segments = (*self.segments, *self.below)
        allocator = restored(segments, settings, capacity=capacity, place=place)
        for segment in self.below:
            allocator.unmap(segment.address, segment.size)
        allocator.log.clear()
        return allocator


@dataclass(eq=False, slots=True)
class _Segment:
    """A segment while the history is undone."""

    address: int
    size: int
    stream: int
    small: bool
    pool: Pool
    expandable: bool
    block_addresses: list[int] = field(default_factory=list)
    """Sorted addresses of its live blocks; empty for expandable segments, which leave no small gaps."""

    @property
    def end(self) -> int:
        return self.address + self.size


@dataclass(eq=False, slots=True)
class _Block:
    """A live block while the history is undone. ``size`` is 0 if it is not known; ``rounded`` is its lower bound."""

    requested: int
    rounded: int
    size: int
    pending: bool
    """Whether it was freed and is still in use on another stream."""
    stack: int
    """Index of the stack that allocated it."""


def rewind(snapshot: Snapshot) -> Start:
    """Return the state before the history of a snapshot.

    Example:
        >>> allocator.restore(rewind(read_snapshot("oom.pickle")).segments)
    """
    rewinder = _Rewinder(snapshot)
    for index in range(len(snapshot.entries) - 1, -1, -1):
        rewinder.undo(index, snapshot.entries[index])
    return rewinder.start()


class _Rewinder:
    """The allocator's state while events are undone, from the last one on."""

    def __init__(self, snapshot: Snapshot) -> None:
        """Begin in the state at the end of the snapshot's history."""
        self.event_count = len(snapshot.entries)
        self.settings: AllocatorSettings = snapshot.settings
        self.segments: dict[int, _Segment] = {}
        """By address."""
        self.segment_addresses: list[int] = []
        """Sorted."""
        self.blocks: dict[int, _Block] = {}
        """Live blocks by address."""
        self.conflicts: list[tuple[int, str]] = []
        """(index of an event, why it cannot follow the earlier events)."""
        self.lowest_map: dict[tuple[int, bool, Pool], int] = {}
        """For each kind of expandable segment (`_kind`), the lowest address mapped while another part of the kind was
        mapped."""
        self._undo_by_action: dict[str, Callable[[int, Entry], None]] = {
            "alloc": self._undo_alloc,
            "free_requested": self._undo_free_requested,
            "free_completed": self._undo_free_completed,
            "segment_alloc": self._undo_segment_alloc,
            "segment_free": self._undo_segment_free,
            "segment_map": self._undo_map,
            "segment_unmap": self._undo_unmap,
            "oom": lambda index, entry: None,
        }
        """By action of an event: the method that undoes the event at an index."""
        for recorded in snapshot.segments:
            segment = self._insert(
                _Segment(
                    recorded.address, recorded.size, recorded.stream, recorded.small, recorded.pool, recorded.expandable
                )
            )
            for block in recorded.blocks:
                if block.state != "inactive":
                    pending, stack = block.state == "active_pending_free", snapshot.block_stacks.get(block.address, 0)
                    rounded = block_size(self.settings, block.requested)
                    self.blocks[block.address] = _Block(block.requested, rounded, block.size, pending, stack)
                    if not segment.expandable:
                        segment.block_addresses.append(block.address)

    def undo(self, index: int, entry: Entry) -> None:
        """Restore the state before an event."""
        self._undo_by_action[entry.action](index, entry)

    # Blocks

    def _undo_alloc(self, index: int, entry: Entry) -> None:
        """Remove the block that the event allocated."""
        block = self.blocks.pop(entry.address, None)
        if block is None:
            self._conflict(index, f"the block at {entry.address:#x} is not there afterwards")
            return
        segment = self._segment_at(entry.address)
        if segment is not None and not segment.expandable:
            del segment.block_addresses[bisect_left(segment.block_addresses, entry.address)]

    def _undo_free_requested(self, index: int, entry: Entry) -> None:
        """Make a pending block a live block."""
        block = self.blocks.get(entry.address)
        if block is None:
            self._conflict(index, f"the block at {entry.address:#x} is given back without ever being free")
        else:
            block.pending = False

    def _undo_free_completed(self, index: int, entry: Entry) -> None:
        """Insert the freed block again, as pending; the gap behind it may show its size."""
        segment = self._segment_at(entry.address)
        rounded = block_size(self.settings, entry.size)
        if segment is None or entry.address + rounded > segment.end or entry.address in self.blocks:
            self._conflict(index, f"no block of {entry.size} bytes can have been at {entry.address:#x}")
            return
        segment.small = rounded <= LARGEST_SMALL
        block = self.blocks[entry.address] = _Block(entry.size, rounded, size=0, pending=True, stack=0)
        if segment.expandable:
            return
        addresses = segment.block_addresses
        position = bisect_left(addresses, entry.address)
        addresses.insert(position, entry.address)
        if segment.small or self.settings.expandable_segments:  # then torch splits off even the smallest remainder
            return
        next_address = addresses[position + 1] if position + 1 < len(addresses) else segment.end
        self._claim_gap(block, entry.address, next_address)
        if position:
            previous = addresses[position - 1]
            self._claim_gap(self.blocks[previous], previous, entry.address)

    def _claim_gap(self, block: _Block, address: int, next_address: int) -> None:
        """Set the size of a block of the large pool to include the gap up to the next block, if that cannot be a free
        block: it is too small, or the block is above the split limit."""
        gap = next_address - (address + block.rounded)
        limit = self.settings.max_split_size
        is_never_split = limit is not None and block.rounded >= limit
        if not block.size and gap > 0 and (gap <= LARGEST_SMALL or is_never_split):
            block.size = next_address - address

    # Segments

    def _undo_segment_alloc(self, index: int, entry: Entry) -> None:
        """Remove the segment that event ``index`` allocated."""
        segment = self.segments.get(entry.address)
        if segment is None or segment.size != entry.size or segment.block_addresses:
            self._conflict(index, f"the segment at {entry.address:#x} is not there afterwards, or not empty before")
        else:
            self._remove(segment)

    def _undo_segment_free(self, index: int, entry: Entry) -> None:
        self._insert_range(index, entry, entry.size == SMALL_SEGMENT, expandable=False)

    def _undo_map(self, index: int, entry: Entry) -> None:
        """Cut the mapped pages out of the expandable segment that contains them."""
        segment, end = self._segment_at(entry.address), entry.address + entry.size
        if segment is None or not segment.expandable or end > segment.end:
            self._conflict(index, f"the pages at {entry.address:#x} are not there afterwards")
            return
        self._remove(segment)
        for start, stop in ((segment.address, entry.address), (end, segment.end)):
            if start < stop:
                self._insert(
                    _Segment(start, stop - start, segment.stream, segment.small, segment.pool, expandable=True)
                )
        kind = _kind(segment)
        if any(other.expandable and _kind(other) == kind for other in self.segments.values()):
            self.lowest_map[kind] = min(entry.address, self.lowest_map.get(kind, entry.address))

    def _undo_unmap(self, index: int, entry: Entry) -> None:
        """Insert the unmapped pages again and merge them with the expandable segments that they touch."""
        left = self._segment_at(entry.address - 1)
        right = self.segments.get(entry.address + entry.size)
        neighbors = [side for side in (left, right) if side and side.expandable and side.stream == entry.stream]
        # without neighbors: only pages of pools for small requests are smaller than large_segment_size
        small = neighbors[0].small if neighbors else bool(entry.size % self.settings.large_segment_size)
        merged = self._insert_range(index, entry, small, expandable=True)
        if merged is None:
            return
        for neighbor in neighbors:
            if neighbor.small == merged.small:
                self._remove(neighbor)
                self._remove(merged)
                first, last = sorted((neighbor, merged), key=lambda segment: segment.address)
                first.size += last.size
                merged = self._insert(first)

    def _insert_range(self, index: int, entry: Entry, small: bool, *, expandable: bool) -> _Segment | None:
        """Insert a segment at the addresses of an event; record a conflict and return None if they are in use."""
        addresses = self.segment_addresses
        position = bisect_right(addresses, entry.address)
        overlaps_left = position > 0 and self.segments[addresses[position - 1]].end > entry.address
        overlaps_right = position < len(addresses) and addresses[position] < entry.address + entry.size
        if overlaps_left or overlaps_right:
            self._conflict(index, f"the {entry.size} bytes at {entry.address:#x} are held already")
            return None
        pool = entry.pool or DEFAULT_POOL
        return self._insert(_Segment(entry.address, entry.size, entry.stream, small, pool, expandable))

    def _insert(self, segment: _Segment) -> _Segment:
        """Add a segment, and return it."""
        self.segments[segment.address] = segment
        insort(self.segment_addresses, segment.address)
        return segment

    def _remove(self, segment: _Segment) -> None:
        del self.segments[segment.address]
        del self.segment_addresses[bisect_left(self.segment_addresses, segment.address)]

    def _segment_at(self, address: int) -> _Segment | None:
        """Return the segment that contains an address, or None."""
        index = bisect_right(self.segment_addresses, address)
        segment = self.segments[self.segment_addresses[index - 1]] if index else None
        return segment if segment is not None and address < segment.end else None

    def _conflict(self, index: int, text: str) -> None:
        self.conflicts.append((index, text))

    # The result

    def start(self) -> Start:
        """Return the present state: the state before the history, once all events are undone."""
        block_addresses = sorted(self.blocks)
        segments: list[Segment] = []
        stacks: list[int] = []
        end = 0
        for address in self.segment_addresses:
            segment = self.segments[address]
            begin = bisect_left(block_addresses, segment.address, end)
            end = bisect_left(block_addresses, segment.end, begin)
            inside = block_addresses[begin:end]
            # an event's index is the owner of the block that it allocates; blocks from before are numbered after these
            blocks = tuple(self._blocks_of(segment, inside, first_owner=self.event_count + len(stacks)))
            stacks += [self.blocks[block].stack for block in inside]
            segments.append(
                Segment(
                    segment.address, segment.size, segment.stream, segment.small, segment.pool, segment.expandable,
                    blocks,
                )
            )  # fmt: skip
        return Start(
            tuple(segments),
            tuple(stacks),
            conflicts=tuple(reversed(self.conflicts)),
            below=tuple(self._first_pages_mapped_later(segments)),
            uncertain=frozenset(self._uncertain_owners(segments)),
        )

    def _uncertain_owners(self, segments: list[Segment]) -> Iterator[int]:
        """Yield the owners of the live blocks in segments of the large pool of which only the least size is known."""
        if self.settings.expandable_segments:
            return
        for segment in segments:
            if not segment.small and not segment.expandable:
                for block in segment.blocks:
                    if block.owner is not None and not self.blocks[block.address].size:
                        yield block.owner

    def _first_pages_mapped_later(self, segments: list[Segment]) -> Iterator[Segment]:
        """Yield, for each range of expandable segments that existed before the history, its first page, if the history
        mapped below the lowest of ``segments``: a replay must know that the range begins there, to map there again."""
        lowest: dict[tuple[int, bool, Pool], int] = {}
        for segment in segments:
            if segment.expandable:
                lowest[_kind(segment)] = min(segment.address, lowest.get(_kind(segment), segment.address))
        for kind, begin in self.lowest_map.items():
            stream, small, pool = kind
            page = SMALL_SEGMENT if small else self.settings.large_segment_size
            end = begin + page
            if kind not in lowest or lowest[kind] < end:
                continue
            if not any(segment.address < end and begin < segment.address + segment.size for segment in segments):
                yield Segment(
                    begin, page, stream, small, pool, expandable=True,
                    blocks=(Block(begin, page, requested=0, state="inactive"),),
                )  # fmt: skip

    def _blocks_of(self, segment: _Segment, addresses: list[int], first_owner: int) -> list[Block]:
        """Return the live blocks at ``addresses``, whose owners count from ``first_owner``, and the free blocks between
        them."""
        blocks: list[Block] = []
        end = segment.address  # of the blocks so far
        next_addresses = (*addresses[1:], segment.end)
        for owner, (address, next_address) in enumerate(zip(addresses, next_addresses, strict=False), first_owner):
            block = self.blocks[address]
            if address > end:
                blocks.append(Block(end, address - end, requested=0, state="inactive"))
            state = "active_pending_free" if block.pending else "active_allocated"
            size = min(block.size or block.rounded, next_address - address)
            blocks.append(Block(address, size, min(block.requested, size), state, owner))
            end = address + size
        if end < segment.end:
            blocks.append(Block(end, segment.end - end, requested=0, state="inactive"))
        return blocks


def _with_larger_block(segment: Segment, owner: int, extra: int) -> Segment:
    """Return a segment with the block of ``owner`` ``extra`` bytes larger and the free block behind it smaller; without
    such a block, unchanged."""
    blocks = list(segment.blocks)
    index = next((index for index, block in enumerate(blocks) if block.owner == owner), None)
    if index is None:
        return segment
    block, free = blocks[index : index + 2]
    blocks[index] = replace(block, size=block.size + extra)
    blocks[index + 1] = replace(free, address=free.address + extra, size=free.size - extra)
    return replace(segment, blocks=tuple(blocks))


def _kind(segment: _Segment | Segment) -> tuple[int, bool, Pool]:
    """Return the kind of an expandable segment; those of the same kind share a range of addresses."""
    return segment.stream, segment.small, segment.pool
