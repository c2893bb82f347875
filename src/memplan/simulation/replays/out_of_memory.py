"""Explain why a request ran out of memory: which free blocks did not fit, who owns the others, which settings help."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memplan._bytes import format_bytes_as_torch
from memplan.simulation.allocator.rounding import LARGEST_SMALL, SMALL_SEGMENT, segment_size
from memplan.simulation.allocator.settings import AllocatorSettings, parse_settings
from memplan.simulation.replays.exact import OutOfMemoryEvent
from memplan.simulation.replays.replayed import Replay
from memplan.simulation.replays.what_if import Capacity, recorded_capacity, what_if
from memplan.simulation.snapshots.read import Frame
from memplan.simulation.timeline import DEFAULT_POOL, Block, Pool, Segment

REMEDIES = (
    "expandable_segments:True",
    "max_split_size_mb:64",
    "max_split_size_mb:128",
    "max_split_size_mb:256",
    "max_split_size_mb:512",
    "garbage_collection_threshold:0.8,per_process_memory_fraction:0.99",
    "roundup_power2_divisions:8",
    "large_segment_size_mb:64",
    "expandable_segments:True,roundup_power2_divisions:8",
)
"""Settings to try, in this order: first settings without a cost, last those that help rarely. Garbage is collected only
where the process is limited to a share of the memory."""

_SIZE_CLASSES = tuple(step << 20 for step in (0, 1, 2, 10, 20, 100, 500))
_TORCH_FILE = re.compile(r"(^|[/\\])(site|dist)-packages[/\\]torch[/\\]|[/\\]pytorch[/\\]torch[/\\]|^torch[/\\]")


@dataclass(frozen=True, slots=True)
class FreeBlocks:
    """Free blocks of the same pool, stream and size class, in bytes, and why none could serve the request."""

    pool: Pool
    stream: int
    small: bool
    least: int
    """The lower end of the size class."""
    count: int
    bytes: int
    largest: int
    why: str


@dataclass(frozen=True, slots=True)
class Holder:
    """Blocks in use that were allocated from the same line, in bytes."""

    frame: Frame | None
    """The innermost frame outside of torch, else the innermost of all; None if no stack is recorded."""
    count: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Remedy:
    """Settings under which all requests of the history fit, and the peaks under them, in bytes."""

    settings: AllocatorSettings
    peak_reserved: int
    fragmentation: int


@dataclass(frozen=True, slots=True)
class OomExplanation:
    """Why a request ran out of memory. Bytes throughout."""

    oom: OutOfMemoryEvent
    needed: int
    """Bytes that the allocator had to reserve on the card for this request."""
    capacity: Capacity | None
    stack: tuple[Frame, ...]
    """Of the request, the innermost frame first."""
    free: tuple[FreeBlocks, ...]
    """First the blocks that came closest to serving the request."""
    waiting: int
    """Bytes of freed blocks that are still in use on other streams."""
    largest_free: int
    largest_why: str
    holders: tuple[Holder, ...]
    """Those with the most bytes first."""
    remedies: tuple[Remedy, ...]
    tried: tuple[str, ...]
    shortfall: int
    """Additional bytes that the card would have needed for this request."""
    beyond: int
    """Bytes by which the blocks in use and the request exceed the card. If above 0, no setting can help."""

    @property
    def frame(self) -> Frame | None:
        """Return the innermost frame of the stack outside of torch, as `innermost`."""
        return innermost(self.stack)


def explain_oom(replay: Replay, oom: OutOfMemoryEvent | None = None, tried: Sequence[str] = REMEDIES) -> OomExplanation:
    """Explain why a request of a replay ran out of memory.

    Each of the settings is tried by a replay of the whole history on a card of the same capacity.

    Args:
        replay: a replay that ran out of memory.
        oom: the event to explain; by default the last of ``replay.ooms``.
        tried: settings to try, as in PYTORCH_ALLOC_CONF.

    Example:
        >>> explain_oom(memplan.replay("oom.pickle")).remedies[0].settings
        AllocatorSettings(..., expandable_segments=True, ...)
    """
    oom = replay.ooms[-1] if oom is None else oom
    capacity = recorded_capacity(replay) if replay.compared else None
    if replay.capacity is not None:
        capacity = Capacity(replay.capacity, is_card=True)
    blocks = [(segment, block) for segment in oom.segments for block in segment.blocks]
    free = [(segment, block) for segment, block in blocks if block.state == "inactive"]
    largest = max(free, key=lambda pair: pair[1].size, default=None)
    needed = _new_memory(replay.settings, oom.requested)
    left = max(oom.free or 0, 0) if capacity is None or capacity.is_card else 0
    remedies = tuple(_remedies(replay, tried, capacity.bytes)) if capacity is not None else ()
    return OomExplanation(
        oom=oom,
        needed=needed,
        capacity=capacity,
        stack=tuple(_stack_at(replay, oom)),
        free=tuple(_free_groups(free, oom)),
        waiting=sum(block.size for _, block in blocks if block.state == "active_pending_free"),
        largest_free=0 if largest is None else largest[1].size,
        largest_why="" if largest is None else _why_not(largest[0], largest[1].size, oom),
        holders=tuple(holders(replay, oom.segments)),
        remedies=remedies,
        tried=tuple(tried) if capacity is not None else (),
        shortfall=max(needed - left, 1),
        beyond=0 if capacity is None else max(oom.allocated + oom.requested - capacity.bytes, 0),
    )


def _new_memory(settings: AllocatorSettings, size: int) -> int:
    """Return the bytes that the allocator reserves on the card for a block of ``size`` if no free block fits."""
    if not settings.expandable_segments:
        return segment_size(settings, size)
    page = SMALL_SEGMENT if size <= LARGEST_SMALL else settings.large_segment_size
    return -(-size // page) * page


def holders(replay: Replay, segments: Iterable[Segment]) -> list[Holder]:
    """Group the blocks in use by the innermost frame outside of torch, those with the most bytes first."""
    totals: dict[Frame | None, tuple[int, int]] = {}
    for segment in segments:
        for block in segment.blocks:
            if block.state != "inactive":
                frame = innermost(replay.stack_of(block.owner))
                count, size = totals.get(frame, (0, 0))
                totals[frame] = count + 1, size + block.size
    rows = [Holder(frame, count, size) for frame, (count, size) in totals.items()]
    return sorted(rows, key=lambda row: -row.bytes)


def innermost(stack: Sequence[Frame]) -> Frame | None:
    """Return the innermost Python frame outside of torch, else the innermost of all; None for an empty stack."""
    for frame in stack:
        if frame.filename.endswith(".py") and not _TORCH_FILE.search(frame.filename):
            return frame
    return stack[0] if stack else None


def _stack_at(replay: Replay, oom: OutOfMemoryEvent) -> Sequence[Frame]:
    """Return the stack of the failed request; () if the request is not in the history."""
    entries = replay.snapshot.entries
    return replay.snapshot.stacks[entries[oom.index].stack] if 0 <= oom.index < len(entries) else ()


def _remedies(replay: Replay, tried: Sequence[str], capacity: int) -> Iterable[Remedy]:
    """Yield those of the tried settings under which all requests of the history fit."""
    for text in tried:
        settings = parse_settings(text)
        if settings == replay.settings:
            continue
        changed = what_if(replay, settings, capacity)
        if changed.fits:
            yield Remedy(settings, changed.peak_reserved, changed.fragmentation)


def _free_groups(free: Sequence[tuple[Segment, Block]], oom: OutOfMemoryEvent) -> list[FreeBlocks]:
    """Group free blocks by pool, stream and size class. Groups whose pool, stream and kind of segment (small or
    large) are those of the failed request come first; then those with the largest blocks."""
    groups: dict[tuple[Pool, int, bool, int], list[int]] = {}
    for segment, block in free:
        size_class = max(least for least in _SIZE_CLASSES if least <= block.size)
        groups.setdefault((segment.pool, segment.stream, segment.small, size_class), []).append(block.size)
    rows: list[FreeBlocks] = []
    for (pool, stream, small, size_class), sizes in groups.items():
        # any of the group, to name the reason
        segment = Segment(address=0, size=0, stream=stream, small=small, pool=pool, expandable=False, blocks=())
        why = _why_not(segment, max(sizes), oom)
        rows.append(FreeBlocks(pool, stream, small, size_class, len(sizes), sum(sizes), max(sizes), why))
    usable = (oom.pool, oom.stream, oom.requested <= LARGEST_SMALL)
    return sorted(rows, key=lambda row: ((row.pool, row.stream, row.small) != usable, -row.largest))


def _why_not(segment: Segment, size: int, oom: OutOfMemoryEvent) -> str:
    """Return why a free block of a segment did not serve the request, as text of the report."""
    if segment.pool != oom.pool:
        return "of another memory pool" if segment.pool == DEFAULT_POOL else "of a private memory pool"
    if segment.stream != oom.stream:
        return "of another stream"
    if segment.small != (oom.requested <= LARGEST_SMALL):
        return "kept for requests up to 1 MiB" if segment.small else "kept for requests above 1 MiB"
    if size < oom.requested:
        return f"{format_bytes_as_torch(oom.requested - size)} too small"
    return "above max_split_size, so kept whole for larger requests"
