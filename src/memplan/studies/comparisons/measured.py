"""A step measured on a card beside its prediction: torch's own peaks, and the two steps side by side."""

from __future__ import annotations

from dataclasses import dataclass

from memplan.simulation.simulate import simulate
from memplan.simulation.timeline import StepPeak
from memplan.studies.comparisons.comparison import Comparison
from memplan.studies.comparisons.sides import of_trace
from memplan.trace.records import Counters
from memplan.trace.trace import Trace


@dataclass(frozen=True, slots=True)
class Peak:
    """Most bytes that a part of a run held: as predicted, and by torch's own counter."""

    part: str
    """``building``, ``step 1``, ...; with ``, reserved`` for what the caching allocator held."""
    low: int
    """Bytes predicted where workspaces that are not known take the least."""
    predicted: int
    """Bytes predicted where they take the most; the same where all are known."""
    measured: int

    @property
    def off(self) -> float | None:
        """Return how far the prediction is off, as a share of what was measured; of an interval, how far from its
        nearer end, 0 within; None of nothing."""
        nearest = min(max(self.measured, self.low), max(self.low, self.predicted))
        return nearest / self.measured - 1 if self.measured else None


@dataclass(frozen=True, slots=True)
class Beside:
    """A measured step beside its prediction."""

    peaks: tuple[Peak, ...]
    comparison: Comparison
    """Its A is the prediction, its B the measurement."""

    @property
    def same(self) -> bool:
        """Return whether every peak is as predicted, to the byte."""
        return all(peak.low == peak.predicted == peak.measured for peak in self.peaks)


def beside(predicted: Trace, measured: Trace, title: str, *, settings: str | None = None) -> Beside:
    """Return a measured step beside its prediction.

    Args:
        predicted: the step, recorded for the card.
        measured: the step, as it ran there; it has torch's counters.
        title: what to call the step.
        settings: of the caching allocator, in both.
    """
    least, most = (simulate(predicted, settings=settings, workspace=case) for case in ("low", "high"))
    parts = ("building", *(f"step {number + 1}" for number in range(len(measured.counters) - 1)))
    rows = list[Peak]()
    cases = zip((least.build, *least.steps), (most.build, *most.steps), strict=True)
    for part, (low, high), counted in zip(parts, cases, measured.counters, strict=False):
        rows += _rows(part, low, high, counted)
    one, other = (
        of_trace(trace, f"{title}, {name}", settings=settings)
        for name, trace in (("predicted", predicted), ("measured", measured))
    )
    return Beside(tuple(rows), Comparison(one, other))


def _rows(part: str, low: StepPeak, high: StepPeak, counted: Counters) -> list[Peak]:
    return [
        Peak(part, low.peak_allocated, high.peak_allocated, counted.allocated),
        Peak(f"{part}, reserved", low.peak_reserved, high.peak_reserved, counted.reserved),
    ]
