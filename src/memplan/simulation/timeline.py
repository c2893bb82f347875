"""The result of a simulation: bytes over time and, with a caching allocator, every block and segment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from memplan._bytes import format_bytes
from memplan._display import Displayed

Action = Literal[
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap", "oom"
]
"""Actions of an allocator, as in torch's memory snapshots."""

BlockState = Literal["active_allocated", "active_pending_free", "inactive"]
Pool = tuple[int, int]
"""Id of a memory pool: (0, 0) is the default pool, others belong to CUDA graphs or to the user."""

DEFAULT_POOL: Pool = (0, 0)


class AllocatorEvent(NamedTuple):
    """An event of the allocator. ``size`` is the requested bytes of a block, or the bytes of a segment."""

    action: Action
    address: int
    size: int
    stream: int = 0
    pool: Pool = DEFAULT_POOL
    owner: int | None = None
    """Of a block: its storage in the trace, or its id in a replayed snapshot."""
    tick: int = 0
    """The tick of the trace at which it happened."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a segment, in bytes: ``size`` is rounded, ``requested`` is not (0 for a free block)."""

    address: int
    size: int
    requested: int
    state: BlockState
    owner: int | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment that the allocator reserved, in bytes, and its blocks in order of address without gaps."""

    address: int
    size: int
    stream: int
    small: bool
    """Whether it serves requests of at most 1 MiB."""
    pool: Pool
    expandable: bool
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class StepPeak:
    """The peaks of a step (or of the building before the first step), in bytes, and their ticks."""

    start: int
    end: int
    """Ticks at which the step begins and ends."""
    peak_allocated: int
    peak_reserved: int
    peak_tick: int
    reserved_tick: int
    """Tick of the reserved peak at which the most is allocated."""


@dataclass(frozen=True, slots=True, repr=False)
class Timeline(Displayed):
    """Bytes over time.

    ``events`` are (tick, allocated, reserved), in order; on a device without a caching allocator reserved equals
    allocated. ``peak_tick`` is the first tick with ``peak_allocated``. ``reserved_tick`` is the tick with
    ``peak_reserved`` at which the most is allocated (the first of these). With a caching allocator, ``log`` has all its
    events and ``segments`` its segments at the end.
    """

    device: str
    events: tuple[tuple[int, int, int], ...]
    build: StepPeak
    steps: tuple[StepPeak, ...]
    peak_allocated: int
    peak_reserved: int
    peak_tick: int
    reserved_tick: int
    log: tuple[AllocatorEvent, ...] = ()
    segments: tuple[Segment, ...] = ()

    def __str__(self) -> str:
        peaks = [f"step {number}: {format_bytes(step.peak_allocated)}" for number, step in enumerate(self.steps, 1)]
        steps = ", ".join(peaks)
        reserved = f", {format_bytes(self.peak_reserved)} reserved" if self.log else ""
        return f"peak {format_bytes(self.peak_allocated)}{reserved} on {self.device}" + (f" ({steps})" if steps else "")
