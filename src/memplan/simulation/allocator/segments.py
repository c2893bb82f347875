"""Convert the allocator's linked chunks to `Segment`s, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Final

from memplan.errors import UsageError
from memplan.simulation.allocator.expandable_segments import ExpandableSegments
from memplan.simulation.allocator.free_lists import FREE, LIVE, PENDING, Chunk, ChunkPool
from memplan.simulation.timeline import Block, BlockState, Pool, Segment

_STATES: Final[dict[int, BlockState]] = {FREE: "inactive", LIVE: "active_allocated", PENDING: "active_pending_free"}
_CODES: Final = {state: code for code, state in _STATES.items()}

FindPool = Callable[[Pool, bool], ChunkPool]


def segment_of(first: Chunk) -> Segment:
    """Return the segment that begins with a chunk, up to its end or the next unmapped chunk."""
    blocks: list[Block] = []
    chunk: Chunk | None = first
    while chunk is not None and chunk.mapped:
        blocks.append(Block(chunk.address, chunk.size, chunk.requested, _STATES[chunk.state], chunk.owner))
        chunk = chunk.right
    size = sum(block.size for block in blocks)
    expandable = first.reservation is not None
    return Segment(first.address, size, first.stream, first.pool.small, first.pool.ident, expandable, tuple(blocks))


def build_chunks(segments: Iterable[Segment], expandable: ExpandableSegments, find_pool: FindPool) -> list[Chunk]:
    """Build linked chunks for segments. Return the first chunk of each segment, or of each expandable reservation.

    Free mapped chunks are in no pool yet.

    Args:
        segments: in any order.
        expandable: gets the reservations of expandable segments.
        find_pool: returns the free chunks of (memory pool, whether for small requests).

    Raises:
        UsageError: blocks do not fill their segment, or segments overlap.
    """
    firsts: list[Chunk] = []
    ordered = sorted(segments, key=lambda segment: segment.address)
    for left, right in pairwise(ordered):
        if left.address + left.size > right.address:
            raise UsageError(
                f"the segments at {left.address:#x} and {right.address:#x} overlap", expected="each byte once"
            )
    for index, segment in enumerate(ordered):
        pool = find_pool(segment.pool, segment.small)
        if not segment.expandable:
            first = Chunk(pool, segment.stream, segment.address, segment.size, reservation=None)
            _split_into_blocks(first, segment)
            firsts.append(first)
        elif not (firsts and _map_into_reservation(firsts[-1], segment, pool)):
            firsts.append(_reserve(segment, ordered[index + 1 :], expandable, pool))
    return firsts


def _split_into_blocks(chunk: Chunk, segment: Segment) -> None:
    """Split a free chunk of the segment's size into the segment's blocks; adjacent free blocks are merged."""
    if not segment.blocks or segment.size <= 0:
        raise UsageError(f"the segment at {segment.address:#x} has no blocks", expected="blocks that fill it")
    address = segment.address
    for index, block in enumerate(segment.blocks):
        is_last = index == len(segment.blocks) - 1
        fits = block.size == chunk.size if is_last else 0 < block.size < chunk.size  # `chunk`: the remaining bytes
        if block.address != address or not fits:
            raise UsageError(
                f"the blocks of the segment at {segment.address:#x} do not fill it at {address:#x}",
                expected="blocks in order of address, without gaps",
            )
        address += block.size
        remainder = None if is_last else chunk.split(block.size)
        chunk.state = _CODES[block.state]
        if chunk.state != FREE:
            chunk.requested, chunk.owner = block.requested, block.owner
        elif index and chunk.left is not None and chunk.left.state == FREE:
            chunk.left.merge_right()
        if remainder is not None:
            chunk = remainder


def _map_into_reservation(last: Chunk, segment: Segment, pool: ChunkPool) -> bool:
    """Map an expandable segment in the reservation of ``last``, if it is of the same kind and lies in it."""
    reservation = last.reservation
    if reservation is None or segment.stream != last.stream or last.pool is not pool:
        return False
    if reservation.pages_to(segment.address) != segment.address:
        return False
    if segment.address + segment.size > reservation.base + reservation.size:
        return False
    tail = last
    while tail.right is not None:
        tail = tail.right
    _map_segment(tail, segment)
    return True


def _reserve(segment: Segment, following: list[Segment], expandable: ExpandableSegments, pool: ChunkPool) -> Chunk:
    """Reserve a range that begins with an expandable segment and ends before the next segment of another kind."""
    size = expandable.reservation_size(pool)
    page = expandable.page(pool)
    kind = (segment.stream, segment.pool, segment.small)
    for other in following:
        same_kind = other.expandable and (other.stream, other.pool, other.small) == kind
        if not same_kind or (other.address - segment.address) % page:
            size = min(size, (other.address - segment.address) // page * page)
            break
    size = max(size, -(-segment.size // page) * page)
    chunk = expandable.reserve_at(pool, segment.stream, segment.address, size)
    _map_segment(chunk, segment)
    return chunk


def _map_segment(unmapped: Chunk, segment: Segment) -> None:
    """Map the part of the last, unmapped chunk of a reservation that a segment covers."""
    pool = unmapped.pool
    pool.remove_unmapped(unmapped)
    chunk = unmapped
    if segment.address > chunk.address:
        chunk = unmapped.split(segment.address - unmapped.address)
        pool.add_unmapped(unmapped)
    if segment.size < chunk.size:
        pool.add_unmapped(chunk.split(segment.size))
    chunk.mapped = True
    _split_into_blocks(chunk, segment)
