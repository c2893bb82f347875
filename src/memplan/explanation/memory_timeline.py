"""The memory timeline by cause and the storages live at the peak, as data for pictures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from memplan._json import SignedInt, Unreadable


@dataclass(frozen=True, slots=True)
class OpRow:
    """An op of a `MemoryTimeline`. ``step`` is 0-based, -1 during the build."""

    name: str
    layer: str
    where: str | None
    phase: str
    step: SignedInt


@dataclass(frozen=True, slots=True)
class Span:
    """A phase of a step: its ticks are ``start < tick <= end``."""

    phase: str
    step: SignedInt
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class LiveStorage:
    """A storage live at the allocated peak. ``born`` and ``died`` are ticks; ``died`` is None if it is never freed."""

    name: str
    layer: str
    where: str | None
    cause: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    born: int
    died: int | None
    engine: str | None = None
    """cuDNN's engine, if the storage is its workspace."""


@dataclass(frozen=True, slots=True)
class PeakBlock:
    """A block of a segment, in bytes. ``alive``: index of its storage in `MemoryTimeline.alive`, -1 if not listed."""

    offset: int
    size: int
    requested: int
    state: str
    cause: str
    alive: SignedInt


@dataclass(frozen=True, slots=True)
class PeakSegment:
    """A segment of the caching allocator at the allocated peak, in bytes."""

    size: int
    stream: int
    small: bool
    blocks: tuple[PeakBlock, ...]


@dataclass(frozen=True, slots=True)
class MemoryTimeline:
    """Bytes over time: each column has a value for every tick of ``ticks``, after the allocation or free at that tick.

    The columns of ``causes`` (with rounding) add up to ``allocated``. ``ops`` has the index in ``op_rows`` of the
    running op, -1 before the first op. ``total`` is the number of ticks before thinning. ``alive`` and ``segments`` are
    of the allocated peak; ``segments`` is empty without a caching allocator.
    """

    ticks: tuple[int, ...]
    allocated: tuple[int, ...]
    reserved: tuple[int, ...]
    causes: Mapping[str, tuple[int, ...]]
    ops: tuple[SignedInt, ...]
    op_rows: tuple[OpRow, ...]
    spans: tuple[Span, ...]
    total: int
    alive: tuple[LiveStorage, ...] = ()
    segments: tuple[PeakSegment, ...] = ()

    AS_ROWS: ClassVar[bool] = True

    def _check(self) -> None:
        """Raise Unreadable if columns of a loaded file contradict each other."""
        count = len(self.ticks)
        columns = [*(getattr(self, name) for name in _COLUMNS), *self.causes.values()]
        if any(len(column) != count for column in columns):
            raise Unreadable("has columns of different lengths")
        if (self.alive or self.segments) and not self.ticks:
            raise Unreadable("has storages at the peak, and no moments")
        if any(index >= len(self.op_rows) for index in self.ops):
            raise Unreadable("has ops that are not in op_rows")
        sums = [sum(parts) for parts in zip(*self.causes.values(), strict=True)] if self.causes else [0] * count
        if sums != list(self.allocated):
            raise Unreadable("has causes that do not add up to what is allocated")
        if any(block.alive >= len(self.alive) for segment in self.segments for block in segment.blocks):
            raise Unreadable("has segments with a storage that is not in alive")

    def step(self, number: int) -> MemoryTimeline:
        """Return the timeline of a single step, without the storages at the overall peak.

        Without such a step, the timeline is returned unchanged.
        """
        spans = [span for span in self.spans if span.step == number]
        if not spans:
            return self
        indices = [i for i, tick in enumerate(self.ticks) if spans[0].start < tick <= spans[-1].end]
        causes = {name: tuple(column[i] for i in indices) for name, column in self.causes.items()}
        columns = {name: tuple(getattr(self, name)[i] for i in indices) for name in _COLUMNS}
        return replace(self, **columns, causes=causes, spans=tuple(spans), alive=(), segments=())

    def plus(self, sizes: Mapping[str, int]) -> MemoryTimeline:
        """Return the timeline with ``sizes``, bytes by cause, added at every tick."""
        added = {cause: size for cause, size in sizes.items() if size}
        zeros = (0,) * len(self.ticks)
        causes = {
            cause: tuple(size + added.get(cause, 0) for size in self.causes.get(cause, zeros))
            for cause in (*self.causes, *added)
        }
        total = sum(added.values())
        levels = {name: tuple(size + total for size in getattr(self, name)) for name in ("allocated", "reserved")}
        return replace(self, causes=causes, **levels)


_COLUMNS = ("ticks", "allocated", "reserved", "ops")
