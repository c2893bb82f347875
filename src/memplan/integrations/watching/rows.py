"""Results of a watch as plain data: a row for each step, leaks, and growth of the peak."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from memplan._bytes import format_bytes
from memplan._display import Printed

Source = Literal["allocator", "profiler", ""]


@dataclass(frozen=True, slots=True)
class Row:
    """Memory of a step in bytes; None: not measured, or not predicted yet.

    On a card the allocator's counters measure every step. The CPU's allocator has no counters: there torch's profiler
    measures the steps of the first window, unless another profiler is active.
    """

    DERIVED: ClassVar[tuple[str, ...]] = ("drift",)

    step: int
    """From 1."""
    seconds: float
    """Since the end of the previous step."""
    peak: int | None
    """Peak of allocated bytes within the step."""
    held: int | None
    """Allocated at its end."""
    predicted: int | None
    """Its peak as simulated from the ops of an observed step."""
    resident: int | None
    """Resident set of the process at its end; on Linux, at most 20 times a second."""
    source: Source = ""
    observed: bool = False
    """Whether the step ran in a window, with every op recorded."""

    @property
    def drift(self) -> int | None:
        """Bytes by which the peak exceeds the prediction."""
        return None if self.peak is None or self.predicted is None else self.peak - self.predicted


@dataclass(frozen=True, slots=True)
class Leak(Printed):
    """A place whose tensors outlive their step, step after step."""

    where: str | None
    """``file:line`` of the user's code that created them."""
    layer: str
    op: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    """Tensors a step."""
    bytes: int
    """Bytes a step, with what the autograd graphs of these tensors save."""
    steps: tuple[int, ...]
    """The observed steps whose tensors were not freed, or only by Python's garbage collector."""
    held_by: str
    """Their owner, in words."""
    kept_at: str | None
    """``file:line`` of the user's code that stores them there; None: unknown."""
    noticed: int
    """The step at whose end the leak was detected."""
    cycle: bool = False
    """Whether only a reference cycle keeps them, until Python's garbage collector runs."""
    ended: int | None = None
    """The step by whose end they were freed after all, such as those in a list of bounded length."""

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "scalar"
        tensors = f"a tensor ({shape}, {self.dtype})" if self.count == 1 else f"{self.count} tensors"
        origin = " ".join(
            part for part in (self.where and f"at {self.where}", self.layer and f"in {self.layer}") if part
        )
        stored = f"; stored at {self.kept_at}" if self.kept_at else ""
        ended = f"; gone by step {self.ended}" if self.ended is not None else ""
        return (
            f"leak: {tensors}, {format_bytes(self.bytes)} a step, made {origin or f'by {self.op}'} outlives its step: "
            f"held by {self.held_by}{stored}{ended}"
        )


@dataclass(frozen=True, slots=True)
class Growth(Printed):
    """A step whose peak rose above the prediction, and the place that grew most."""

    step: int
    peak: int
    predicted: int
    layer: str
    where: str | None
    bytes: int
    """Growth of that place at the peak since the step on which the prediction is based; 0: no place grew."""

    def __str__(self) -> str:
        owner = " ".join(part for part in (self.layer, self.where and f"({self.where})") if part) or "no layer"
        more = f"; the most of it, {format_bytes(self.bytes)}, is held by {owner}" if self.bytes > 0 else ""
        predicted = format_bytes(self.predicted)
        return f"drift: step {self.step} peaks at {format_bytes(self.peak)}, predicted {predicted}{more}"
