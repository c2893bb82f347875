"""Memory over time by cause, and what is alive at the peak: immutable data that pictures draw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from memplan._json import SignedInt, Unreadable, from_plain


@dataclass(frozen=True, slots=True)
class OpRow:
    """An op that runs at some of the moments. ``step`` is 0-based, -1 while building."""

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
class Alive:
    """A storage at the allocated peak; ``born`` and ``died`` are ticks, ``died`` None where it stays."""

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
    """Of a workspace: what cuDNN runs in it."""


@dataclass(frozen=True, slots=True)
class PeakBlock:
    """A piece of a segment, in bytes; ``alive`` is its storage's place in `Course.alive`, -1 where it is not listed."""

    offset: int
    size: int
    requested: int
    state: str
    cause: str
    alive: SignedInt


@dataclass(frozen=True, slots=True)
class PeakSegment:
    """Memory that the allocator holds from the card at the allocated peak, in bytes."""

    size: int
    stream: int
    small: bool
    blocks: tuple[PeakBlock, ...]


@dataclass(frozen=True, slots=True)
class Course:
    """Bytes after each moment. The causes, rounding among them, add up to ``allocated`` at each.

    ``ops`` has for each moment the place in ``op_rows`` of the op that was running, -1 where none had begun. ``total``
    is the number of moments before thinning. ``segments`` are empty without a caching allocator.
    """

    ticks: tuple[int, ...]
    allocated: tuple[int, ...]
    reserved: tuple[int, ...]
    causes: Mapping[str, tuple[int, ...]]
    ops: tuple[SignedInt, ...]
    op_rows: tuple[OpRow, ...]
    spans: tuple[Span, ...]
    total: int
    alive: tuple[Alive, ...] = ()
    segments: tuple[PeakSegment, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON: columns and rows by their names, each row a list."""
        return {field.name: _rows(getattr(self, field.name)) for field in fields(self)}

    def step(self, number: int) -> Course:
        """Return one step of it alone: its moments and spans, without what is alive at the peak of all."""
        spans = [span for span in self.spans if span.step == number]
        if not spans:
            return self
        places = [at for at, tick in enumerate(self.ticks) if spans[0].start < tick <= spans[-1].end]
        cut = {name: tuple(column[at] for at in places) for name, column in self.causes.items()}
        columns = {name: tuple(getattr(self, name)[at] for at in places) for name in _COLUMNS}
        return replace(self, **columns, causes=cut, spans=tuple(spans), alive=(), segments=())

    def beside(self, others: Mapping[str, int]) -> Course:
        """Return it with bytes by cause that are there at every moment besides."""
        more = {cause: size for cause, size in others.items() if size}
        total = sum(more.values())
        found = {name: self.causes.get(name, (0,) * len(self.ticks)) for name in (*self.causes, *more)}
        causes = {name: tuple(one + more.get(name, 0) for one in column) for name, column in found.items()}
        levels = {name: tuple(one + total for one in getattr(self, name)) for name in ("allocated", "reserved")}
        return replace(self, causes=causes, **levels)


_COLUMNS = ("ticks", "allocated", "reserved", "ops")


def course_from(plain: Any, place: str) -> Course:
    """Return the course of `Course.to_dict`.

    Raises:
        Unreadable: it is none, or its columns do not belong together.
    """
    names = [field.name for field in fields(Course)]
    if not isinstance(plain, Mapping) or set(plain) != set(names):
        raise Unreadable(f"{place} is no mapping of {', '.join(names)}")
    course = from_plain(Course, [plain[name] for name in names], place, rows=True)
    count = len(course.ticks)
    columns = [*(getattr(course, name) for name in _COLUMNS), *course.causes.values()]
    if any(len(column) != count for column in columns):
        raise Unreadable(f"{place} has columns of different lengths")
    if (course.alive or course.segments) and not course.ticks:
        raise Unreadable(f"{place} has storages at the peak, and no moments")
    if any(at >= len(course.op_rows) for at in course.ops):
        raise Unreadable(f"{place}.ops names an op that is not in op_rows")
    sums = [sum(parts) for parts in zip(*course.causes.values(), strict=True)] if course.causes else [0] * count
    if sums != list(course.allocated):
        raise Unreadable(f"{place} has causes that do not add up to what is allocated")
    if any(block.alive >= len(course.alive) for segment in course.segments for block in segment.blocks):
        raise Unreadable(f"{place}.segments names a storage that is not in alive")
    return course


def _rows(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return [_rows(getattr(value, field.name)) for field in fields(value)]
    if isinstance(value, Mapping):
        return {name: _rows(part) for name, part in value.items()}
    return [_rows(part) for part in value] if isinstance(value, tuple) else value
