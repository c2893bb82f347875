"""Between the allocator's own records and `Segment`s: what is held, and how to begin with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from memplan.errors import UsageError
from memplan.simulation.allocator.expandable_segments import ExpandableSegments
from memplan.simulation.allocator.free_lists import FREE, LIVE, PENDING, Chunk, ChunkPool
from memplan.simulation.timeline import Block, BlockState, Pool, Segment

_STATES: Final[dict[int, BlockState]] = {
    FREE: "inactive",
    LIVE: "active_allocated",
    PENDING: "active_pending_free",
}
_CODES: Final = {state: code for code, state in _STATES.items()}

FindPool = Callable[[Pool, bool], ChunkPool]


def segment_of(first: Chunk) -> Segment:
    """Return the segment that begins with a chunk; of an expandable one, as far as there is memory."""
    blocks: list[Block] = []
    chunk: Chunk | None = first
    while chunk is not None and chunk.mapped:
        blocks.append(Block(chunk.address, chunk.size, chunk.requested, _STATES[chunk.state], chunk.owner))
        chunk = chunk.right
    size = sum(block.size for block in blocks)
    expandable = first.reservation is not None
    return Segment(first.address, size, first.stream, first.pool.small, first.pool.ident, expandable, tuple(blocks))


def restored(segments: Iterable[Segment], expandable: ExpandableSegments, find: FindPool) -> list[Chunk]:
    """Return the first chunk of every segment, and of every reservation of expandable ones, with its neighbours linked.

    Free chunks with memory are in no pool yet.

    Raises:
        UsageError: blocks do not fill their segment, or segments overlap.
    """
    firsts: list[Chunk] = []
    ordered = sorted(segments, key=lambda segment: segment.address)
    for before, segment in zip([None, *ordered], ordered, strict=False):
        if before is not None and before.address + before.size > segment.address:
            raise UsageError(
                f"the segments at {before.address:#x} and {segment.address:#x} overlap", expected="each byte once"
            )
    for index, segment in enumerate(ordered):
        if not segment.expandable:
            firsts.append(_linked(segment, find))
        elif not _joins(ordered, index, firsts, expandable, find):
            firsts.append(_reserved(ordered, index, expandable, find))
    return firsts


def _linked(segment: Segment, find: FindPool) -> Chunk:
    """Chunks for the blocks of a segment; free neighbours become one."""
    pool = find(segment.pool, segment.small)
    whole = Chunk(pool, segment.stream, segment.address, segment.size, None)
    _fill(whole, segment)
    return whole


def _fill(chunk: Chunk, segment: Segment) -> None:
    """Cut a free chunk that is as large as a segment into the segment's blocks."""
    if not segment.blocks or segment.size <= 0:
        raise UsageError(f"the segment at {segment.address:#x} has no blocks", expected="blocks that fill it")
    at = segment.address
    for index, block in enumerate(segment.blocks):
        last = index == len(segment.blocks) - 1
        if block.address != at or block.size <= 0 or (block.size == chunk.size) != last or block.size > chunk.size:
            raise UsageError(
                f"the blocks of the segment at {segment.address:#x} do not fill it at {at:#x}",
                expected="blocks in order of address, without gaps",
            )
        at += block.size
        rest = None if last else chunk.cut(block.size)
        chunk.state = _CODES[block.state]
        if chunk.state != FREE:
            chunk.requested, chunk.owner = block.requested, block.owner
        elif index and chunk.left is not None and chunk.left.state == FREE:
            chunk.left.absorb_right()
        if rest is not None:
            chunk = rest


def _joins(
    ordered: list[Segment], index: int, firsts: list[Chunk], expandable: ExpandableSegments, find: FindPool
) -> bool:
    """Put an expandable segment into the reservation before it, if it is of the same kind and lies in it."""
    segment = ordered[index]
    last = firsts[-1] if firsts else None
    if last is None or last.reservation is None or segment.stream != last.stream:
        return False
    reservation = last.reservation
    if last.pool is not find(segment.pool, segment.small) or reservation.pages_to(segment.address) != segment.address:
        return False
    if segment.address + segment.size > reservation.base + reservation.size:
        return False
    tail = last
    while tail.right is not None:
        tail = tail.right
    _place_in(tail, segment)
    return True


def _reserved(ordered: list[Segment], index: int, expandable: ExpandableSegments, find: FindPool) -> Chunk:
    """Return a reservation that begins with this segment, and ends before the next one of another kind."""
    segment = ordered[index]
    pool = find(segment.pool, segment.small)
    size = expandable.reservation_size(pool)
    page = expandable.page(pool)
    for other in ordered[index + 1 :]:
        same = other.expandable and (other.stream, other.pool, other.small) == (
            segment.stream,
            segment.pool,
            segment.small,
        )
        if not same or (other.address - segment.address) % page:
            size = min(size, (other.address - segment.address) // page * page)
            break
    size = max(size, -(-segment.size // page) * page)
    chunk = expandable.reserve_at(pool, segment.stream, segment.address, size)
    _place_in(chunk, segment)
    return chunk


def _place_in(unmapped: Chunk, segment: Segment) -> None:
    """Give memory to where a segment lies in the unmapped chunk at the end of its reservation."""
    pool = unmapped.pool
    pool.remove_unmapped(unmapped)
    chunk = unmapped
    if segment.address > chunk.address:
        chunk = unmapped.cut(segment.address - unmapped.address)
        pool.add_unmapped(unmapped)
    if segment.size < chunk.size:
        pool.add_unmapped(chunk.cut(segment.size))
    chunk.mapped = True
    _fill(chunk, segment)
