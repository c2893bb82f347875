"""What a simulation says: bytes over time and, with a caching allocator, every block and segment. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from memplan._bytes import format_bytes
from memplan._display import Displayed

Action = Literal[
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "oom",
]
"""What an allocator does, in the words of torch's memory snapshots."""

BlockState = Literal["active_allocated", "active_pending_free", "inactive"]
Pool = tuple[int, int]
"""Id of a memory pool: (0, 0) is the default one, others belong to CUDA graphs or to the user."""

DEFAULT_POOL: Pool = (0, 0)


class AllocatorEvent(NamedTuple):
    """One thing that the allocator did. Bytes as requested for blocks, as mapped for segments."""

    action: Action
    address: int
    size: int
    stream: int = 0
    pool: Pool = DEFAULT_POOL
    owner: int | None = None
    """Of a block: the storage it was given to, or an id of the replayed snapshot."""
    tick: int = 0
    """The tick of the trace that caused it."""


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a segment. ``size`` is in bytes as cut, ``requested`` as asked for (0: nothing lives here)."""

    address: int
    size: int
    requested: int
    state: BlockState
    owner: int | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """Memory held from the device, in bytes, and its blocks without gaps in order of address."""

    address: int
    size: int
    stream: int
    small: bool
    """Of the pool for requests of at most 1 MiB."""
    pool: Pool
    expandable: bool
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class StepPeak:
    """The most that one step (or the building before the first) holds, in bytes, and the ticks at which it does."""

    start: int
    end: int
    peak_allocated: int
    peak_reserved: int
    peak_tick: int
    reserved_tick: int


@dataclass(frozen=True, slots=True, repr=False)
class Timeline(Displayed):
    """Bytes over time.

    ``events`` are (tick, allocated, reserved), in order; on a device without a caching allocator reserved equals
    allocated. ``peak_tick`` is the first tick at which ``peak_allocated`` is reached, ``reserved_tick`` the first of
    those with ``peak_reserved`` at which the most is allocated. With a caching allocator, ``log`` is all that it did
    and ``segments`` what it held at the end.
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
        steps = ", ".join(f"step {k + 1}: {format_bytes(s.peak_allocated)}" for k, s in enumerate(self.steps))
        reserved = f", {format_bytes(self.peak_reserved)} reserved" if self.log else ""
        return f"peak {format_bytes(self.peak_allocated)}{reserved} on {self.device}" + (f" ({steps})" if steps else "")
