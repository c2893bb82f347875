"""What a watch gives: rows of steps and leaks, as plain data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from memplan._bytes import format_bytes
from memplan._display import Printed

Source = Literal["allocator", "profiler", ""]


@dataclass(frozen=True, slots=True)
class Row:
    """One step, in bytes. ``None`` where nobody measured it, or nothing is predicted yet.

    On a card every step is measured, by the allocator's own counters. On the CPU, which has none, it is the last step
    of each window, by torch's profiler, where nobody else profiles.
    """

    step: int
    """From 1."""
    seconds: float
    """Since the step before ended."""
    peak: int | None
    """The most that was allocated in the step."""
    held: int | None
    """Allocated when it ended."""
    predicted: int | None
    """Its peak, simulated from the ops of an observed step."""
    resident: int | None
    """Of the process, when it ended; on Linux, 20 times a second at most."""
    source: Source = ""
    observed: bool = False
    """Whether every op of it was noted."""

    @property
    def drift(self) -> int | None:
        """Bytes that the peak is above what was predicted."""
        return None if self.peak is None or self.predicted is None else self.peak - self.predicted

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {**dataclasses.asdict(self), "drift": self.drift}


@dataclass(frozen=True, slots=True)
class Leak(Printed):
    """A place whose tensors outlive their steps, one step after another."""

    where: str | None
    """``file:line`` of the user's code that made them."""
    layer: str
    op: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    """Tensors a step."""
    bytes: int
    """A step, with what the graphs of these tensors hold."""
    steps: tuple[int, ...]
    """The observed steps whose tensors were still there, or were freed by Python's garbage collector alone."""
    held_by: str
    """Who holds them, in words."""
    kept_at: str | None
    """``file:line`` of the user's code that stored them, where it was found."""
    noticed: int
    """The step at whose end it was found."""
    cycle: bool = False
    """Whether a reference cycle holds them: they wait for Python's garbage collector."""
    ended: int | None = None
    """The step by whose end they were gone after all, such as those of a list of bounded length."""

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "scalar"
        what = f"a tensor ({shape}, {self.dtype})" if self.count == 1 else f"{self.count} tensors"
        made = " ".join(part for part in (self.where and f"at {self.where}", self.layer and f"in {self.layer}") if part)
        kept = f"; stored at {self.kept_at}" if self.kept_at else ""
        gone = f"; gone by step {self.ended}" if self.ended is not None else ""
        return (
            f"leak: {what}, {format_bytes(self.bytes)} a step, made {made or f'by {self.op}'} outlives its step: "
            f"held by {self.held_by}{kept}{gone}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class Growth(Printed):
    """A step's peak that moved away from what was predicted, and the place that holds the most more at it."""

    step: int
    peak: int
    predicted: int
    layer: str
    where: str | None
    bytes: int
    """That place holds so much more at the peak than in the step that was predicted from; 0: no such place."""

    def __str__(self) -> str:
        place = " ".join(part for part in (self.layer, self.where and f"({self.where})") if part) or "no layer"
        more = f"; the most of it, {format_bytes(self.bytes)}, is held by {place}" if self.bytes > 0 else ""
        predicted = format_bytes(self.predicted)
        return f"drift: step {self.step} peaks at {format_bytes(self.peak)}, predicted {predicted}{more}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return dataclasses.asdict(self)
