"""Comparison of a step measured on a card with its prediction: torch's own peaks, and the two steps."""

from __future__ import annotations

from dataclasses import dataclass

from memplan.simulation.simulate import simulate
from memplan.studies.comparisons.comparison import Comparison
from memplan.studies.comparisons.sides import of_trace
from memplan.trace.trace import Trace


@dataclass(frozen=True, slots=True)
class Peak:
    """Peak bytes of a part of a run: as predicted, and by torch's own counter."""

    part: str
    """``building``, ``step 1``, ...; with ``, reserved`` for reserved instead of allocated bytes."""
    low: int
    """Predicted with the lower bounds of unknown workspaces."""
    predicted: int
    """Predicted with their upper bounds; equal to ``low`` where all workspaces are known."""
    measured: int

    @property
    def off(self) -> float | None:
        """Return the error of the prediction as a share of the measured bytes: that of the nearer bound, 0 between
        them. None if 0 bytes were measured."""
        nearest = min(max(self.measured, self.low), max(self.low, self.predicted))
        return nearest / self.measured - 1 if self.measured else None


@dataclass(frozen=True, slots=True)
class Beside:
    """A measured step compared with its prediction."""

    peaks: tuple[Peak, ...]
    comparison: Comparison
    """A is the prediction, B the measurement."""

    @property
    def same(self) -> bool:
        """Return whether every peak is as predicted, to the byte."""
        return all(peak.low == peak.predicted == peak.measured for peak in self.peaks)


def compare_with_prediction(predicted: Trace, measured: Trace, title: str, *, settings: str | None = None) -> Beside:
    """Compare a measured step with its prediction.

    Args:
        predicted: the step, recorded for the card.
        measured: the step as it ran there, with torch's counters.
        title: what to call the step.
        settings: of the caching allocator, in both.
    """
    least, most = (simulate(predicted, settings=settings, workspace=case) for case in ("low", "high"))
    parts = ("building", *(f"step {number + 1}" for number in range(len(measured.counters) - 1)))
    peaks = list[Peak]()
    cases = zip((least.build, *least.steps), (most.build, *most.steps), strict=True)
    for part, (low, high), counters in zip(parts, cases, measured.counters, strict=False):
        peaks += [
            Peak(part, low.peak_allocated, high.peak_allocated, counters.allocated),
            Peak(f"{part}, reserved", low.peak_reserved, high.peak_reserved, counters.reserved),
        ]
    prediction = of_trace(predicted, f"{title}, predicted", settings=settings)
    measurement = of_trace(measured, f"{title}, measured", settings=settings)
    return Beside(tuple(peaks), Comparison(prediction, measurement))
