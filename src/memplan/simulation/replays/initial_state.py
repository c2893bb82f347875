"""The state at the start of a snapshot's history: its last state, with every event undone, the last one first.

Two things are not recorded and have to be found. How large a block was that is gone by the end: as its request
rounds, unless a gap of at most 1 MiB ever lay behind it in a segment of the large pool; no free block of that pool is
so small, so the gap was the block's own, left over when it was cut. And of which pool a segment was that is gone by
the end: as the blocks that were seen in it tell, else as its size does.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from memplan.simulation.allocator.allocator import CachingAllocator
from memplan.simulation.allocator.device_memory import ascending
from memplan.simulation.allocator.expandable_segments import UNKNOWN_CARD
from memplan.simulation.allocator.rounding import LARGEST_SMALL, SMALL_SEGMENT, block_size
from memplan.simulation.allocator.settings import AllocatorSettings
from memplan.simulation.snapshots.read import Entry, Snapshot
from memplan.simulation.timeline import DEFAULT_POOL, Block, Pool, Segment


@dataclass(frozen=True, slots=True)
class Start:
    """What was held before the first event of a history."""

    segments: tuple[Segment, ...]
    """A live block's owner is its number: one beyond the events' indices, counted in order of address."""
    stacks: tuple[int, ...]
    """Of each of these blocks the stack that it was allocated from, where it lived to the end; else 0."""
    conflicts: tuple[tuple[int, str], ...]
    """Index of an event and what it says that cannot be, given what came after it."""
    below: tuple[Segment, ...] = ()
    """Of expandable segments that had no memory at their lowest addresses, which they got later: the first page."""

    uncertain: frozenset[int] = frozenset()
    """Owners of blocks that may be larger than they are here, at the cost of the free block behind them."""

    def enlarged(self, owner: int, more: int) -> Start:
        """Return the same with one block larger, and the free block behind it smaller, by so many bytes."""
        segments = tuple(_enlarged(segment, owner, more) for segment in self.segments)
        return replace(self, segments=segments)

    def allocator(
        self,
        settings: AllocatorSettings,
        *,
        capacity: int | None = None,
        place: Callable[[int], int] | None = None,
    ) -> CachingAllocator:
        """Return a caching allocator that holds this, with an empty log."""
        held = (*self.segments, *self.below)
        if place is None:  # above all that is held, and what is reserved behind it for expandable segments
            end = max((segment.address + segment.size for segment in held), default=0)
            place = ascending(end + (2 * (capacity or UNKNOWN_CARD) if any(one.expandable for one in held) else 0))
        allocator = CachingAllocator(settings, capacity=capacity, place=place)
        allocator.restore(held)
        for segment in self.below:
            allocator.unmap(segment.address, segment.size)
        allocator.log.clear()
        return allocator


class _Held:
    """A segment while the history is undone."""

    __slots__ = ("address", "expandable", "live", "pool", "size", "small", "stream")

    def __init__(self, segment: Segment) -> None:
        self.address = segment.address
        self.size = segment.size
        self.stream = segment.stream
        self.small = segment.small
        self.pool = segment.pool
        self.expandable = segment.expandable
        self.live: list[int] = []
        """Addresses of the blocks in it, in order; not kept for expandable ones, which leave no small gaps."""

    @property
    def end(self) -> int:
        return self.address + self.size


class _Live:
    """A block while the history is undone. ``cut`` is its size in bytes where that is known, else 0."""

    __slots__ = ("cut", "pending", "requested", "rounded", "stack")

    def __init__(self, requested: int, rounded: int, cut: int, pending: bool, stack: int) -> None:
        self.requested = requested
        self.rounded = rounded
        self.cut = cut
        self.pending = pending
        self.stack = stack


def rewind(snapshot: Snapshot) -> Start:
    """Undo the history of a snapshot.

    Example:
        >>> allocator.restore(rewind(read_snapshot("oom.pickle")).segments)
    """
    undone = _Rewind(snapshot)
    for index in range(len(snapshot.entries) - 1, -1, -1):
        undone.undo(index, snapshot.entries[index])
    return undone.start()


class _Rewind:
    def __init__(self, snapshot: Snapshot) -> None:
        self.count = len(snapshot.entries)
        self.settings: AllocatorSettings = snapshot.settings
        self.held: dict[int, _Held] = {}
        self.starts: list[int] = []
        self.live: dict[int, _Live] = {}
        self.conflicts: list[tuple[int, str]] = []
        self.lowest: dict[tuple[int, bool, Pool], int] = {}
        """Of the expandable segments of a kind, the lowest address that got memory while others of it had some."""
        self._undo: dict[str, Callable[[int, Entry], None]] = {
            "alloc": self._undo_alloc,
            "free_requested": self._undo_free_requested,
            "free_completed": self._undo_free_completed,
            "segment_alloc": self._undo_segment_alloc,
            "segment_free": self._undo_segment_free,
            "segment_map": self._undo_map,
            "segment_unmap": self._undo_unmap,
            "oom": lambda index, entry: None,
        }
        for segment in snapshot.segments:
            held = self._add(_Held(segment))
            for block in segment.blocks:
                if block.state != "inactive":
                    pending, stack = block.state == "active_pending_free", snapshot.block_stacks.get(block.address, 0)
                    rounded = block_size(self.settings, block.requested)
                    self.live[block.address] = _Live(block.requested, rounded, block.size, pending, stack)
                    if not held.expandable:
                        held.live.append(block.address)

    def undo(self, index: int, entry: Entry) -> None:
        self._undo[entry.action](index, entry)

    # Blocks

    def _undo_alloc(self, index: int, entry: Entry) -> None:
        live = self.live.pop(entry.address, None)
        if live is None:
            self._conflict(index, f"the block at {entry.address:#x} is not there afterwards")
            return
        held = self._around(entry.address)
        if held is not None and not held.expandable:
            del held.live[bisect_left(held.live, entry.address)]

    def _undo_free_requested(self, index: int, entry: Entry) -> None:
        live = self.live.get(entry.address)
        if live is None:
            self._conflict(index, f"the block at {entry.address:#x} is given back without ever being free")
        else:
            live.pending = False

    def _undo_free_completed(self, index: int, entry: Entry) -> None:
        held = self._around(entry.address)
        rounded = block_size(self.settings, entry.size)
        if held is None or entry.address + rounded > held.end or entry.address in self.live:
            self._conflict(index, f"no block of {entry.size} bytes can have been at {entry.address:#x}")
            return
        held.small = rounded <= LARGEST_SMALL
        live = self.live[entry.address] = _Live(entry.size, rounded, 0, True, 0)
        if held.expandable:
            return
        at = bisect_left(held.live, entry.address)
        held.live.insert(at, entry.address)
        if held.small or self.settings.expandable_segments:
            return
        after = held.live[at + 1] if at + 1 < len(held.live) else held.end
        self._take_gap(live, entry.address, after)
        if at:
            self._take_gap(self.live[held.live[at - 1]], held.live[at - 1], entry.address)

    def _take_gap(self, live: _Live, address: int, after: int) -> None:
        """What lies between a block and the next is its own, where it is too little for a free block."""
        gap = after - (address + live.rounded)
        split = self.settings.max_split_size
        if not live.cut and (0 < gap <= LARGEST_SMALL or (split is not None and live.rounded >= split and gap > 0)):
            live.cut = after - address

    # Segments

    def _undo_segment_alloc(self, index: int, entry: Entry) -> None:
        held = self.held.get(entry.address)
        if held is None or held.size != entry.size or held.live:
            self._conflict(index, f"the segment at {entry.address:#x} is not there afterwards, or not empty before")
        else:
            self._drop(held)

    def _undo_segment_free(self, index: int, entry: Entry) -> None:
        self._add_segment(index, entry, entry.size == SMALL_SEGMENT, expandable=False)

    def _undo_map(self, index: int, entry: Entry) -> None:
        """Take a range of pages out of the expandable segment around it."""
        held, end = self._around(entry.address), entry.address + entry.size
        if held is None or not held.expandable or end > held.end:
            self._conflict(index, f"the pages at {entry.address:#x} are not there afterwards")
            return
        self._drop(held)
        for start, stop in ((held.address, entry.address), (end, held.end)):
            if start < stop:
                self._add(_Held(Segment(start, stop - start, held.stream, held.small, held.pool, True, ())))
        kind = _kind(held)
        if any(other.expandable and _kind(other) == kind for other in self.held.values()):
            self.lowest[kind] = min(entry.address, self.lowest.get(kind, entry.address))

    def _undo_unmap(self, index: int, entry: Entry) -> None:
        before = self._around(entry.address - 1)
        behind = self.held.get(entry.address + entry.size)
        sides = [side for side in (before, behind) if side and side.expandable and side.stream == entry.stream]
        small = sides[0].small if sides else bool(entry.size % self.settings.large_segment_size)
        added = self._add_segment(index, entry, small, expandable=True)
        if added is None:
            return
        for side in sides:
            if side.small == added.small:
                self._drop(side)
                self._drop(added)
                first, last = sorted((side, added), key=lambda part: part.address)
                first.size += last.size
                added = self._add(first)

    def _add_segment(self, index: int, entry: Entry, small: bool, *, expandable: bool) -> _Held | None:
        at = bisect_right(self.starts, entry.address)
        if (at and self.held[self.starts[at - 1]].end > entry.address) or (
            at < len(self.starts) and self.starts[at] < entry.address + entry.size
        ):
            self._conflict(index, f"the {entry.size} bytes at {entry.address:#x} are held already")
            return None
        pool = entry.pool or DEFAULT_POOL
        segment = Segment(entry.address, entry.size, entry.stream, small, pool, expandable, ())
        return self._add(_Held(segment))

    def _add(self, held: _Held) -> _Held:
        self.held[held.address] = held
        insort(self.starts, held.address)
        return held

    def _drop(self, held: _Held) -> None:
        del self.held[held.address]
        self._forget(held.address)

    def _forget(self, address: int) -> None:
        del self.starts[bisect_left(self.starts, address)]

    def _around(self, address: int) -> _Held | None:
        """Return the segment that an address lies in."""
        at = bisect_right(self.starts, address)
        held = self.held[self.starts[at - 1]] if at else None
        return held if held is not None and address < held.end else None

    def _conflict(self, index: int, text: str) -> None:
        self.conflicts.append((index, text))

    # What is left

    def start(self) -> Start:
        addresses = sorted(self.live)
        segments: list[Segment] = []
        stacks: list[int] = []
        at = 0
        for start in self.starts:
            held = self.held[start]
            at = bisect_left(addresses, held.address, at)
            upto = bisect_left(addresses, held.end, at)
            blocks = self._blocks(held, addresses[at:upto], self.count + len(stacks))
            stacks += [self.live[address].stack for address in addresses[at:upto]]
            at = upto
            segments.append(
                Segment(held.address, held.size, held.stream, held.small, held.pool, held.expandable, tuple(blocks))
            )
        conflicts = tuple(reversed(self.conflicts))
        return Start(
            tuple(segments),
            tuple(stacks),
            conflicts,
            tuple(self._below(segments)),
            frozenset(self._uncertain(segments)),
        )

    def _uncertain(self, segments: list[Segment]) -> Iterator[int]:
        if self.settings.expandable_segments:
            return
        for segment in segments:
            if not segment.small and not segment.expandable:
                for block in segment.blocks:
                    if block.owner is not None and not self.live[block.address].cut:
                        yield block.owner

    def _below(self, segments: list[Segment]) -> Iterator[Segment]:
        for (stream, small, pool), low in self.lowest.items():
            first = min((s.address for s in segments if s.expandable and _kind(s) == (stream, small, pool)), default=0)
            page = SMALL_SEGMENT if small else self.settings.large_segment_size
            if low + page <= first and not any(s.address < low + page and low < s.address + s.size for s in segments):
                yield Segment(low, page, stream, small, pool, True, (Block(low, page, 0, "inactive"),))

    def _blocks(self, held: _Held, addresses: list[int], owner: int) -> list[Block]:
        blocks: list[Block] = []
        at = held.address
        for number, (address, after) in enumerate(zip(addresses, (*addresses[1:], held.end), strict=False)):
            live = self.live[address]
            if address > at:
                blocks.append(Block(at, address - at, 0, "inactive"))
            state = "active_pending_free" if live.pending else "active_allocated"
            size = min(live.cut or live.rounded, after - address)
            blocks.append(Block(address, size, min(live.requested, size), state, owner + number))
            at = address + size
        if at < held.end:
            blocks.append(Block(at, held.end - at, 0, "inactive"))
        return blocks


def _enlarged(segment: Segment, owner: int, more: int) -> Segment:
    blocks = list(segment.blocks)
    at = next((at for at, block in enumerate(blocks) if block.owner == owner), None)
    if at is None:
        return segment
    behind = blocks[at + 1]
    blocks[at] = replace(blocks[at], size=blocks[at].size + more)
    blocks[at + 1] = replace(behind, address=behind.address + more, size=behind.size - more)
    return replace(segment, blocks=tuple(blocks))


def _kind(held: _Held | Segment) -> tuple[int, bool, Pool]:
    """Expandable segments of one kind share a range of addresses."""
    return held.stream, held.small, held.pool
