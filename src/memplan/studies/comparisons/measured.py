"""Compare a step measured on a card with its prediction: peaks by torch's counters, and bytes by cause and layer."""

from __future__ import annotations

from dataclasses import dataclass

from memplan.simulation.simulate import simulate
from memplan.studies.comparisons.comparison import Comparison
from memplan.studies.comparisons.sides import of_trace
from memplan.trace.trace import Trace


@dataclass(frozen=True, slots=True)
class Peak:
    """Predicted and measured peak bytes of a part of a run."""

    part: str
    """``building``, ``step 1``, ...; with ``, reserved`` for reserved instead of allocated bytes."""
    low: int
    """Prediction with the lower bounds of unknown workspaces."""
    predicted: int
    """Prediction with the upper bounds of unknown workspaces; equal to ``low`` if all workspaces are known."""
    measured: int
    """Peak by torch's own counter."""

    @property
    def off(self) -> float | None:
        """Relative error of the prediction's nearer bound, 0 between the bounds; None if 0 bytes were measured."""
        if not self.measured:
            return None
        nearest = min(max(self.measured, self.low), max(self.low, self.predicted))  # clamped to the bounds
        return nearest / self.measured - 1


@dataclass(frozen=True, slots=True)
class MeasuredComparison:
    """A measured step compared with its prediction."""

    peaks: tuple[Peak, ...]
    comparison: Comparison
    """A is the prediction, B the measurement."""

    @property
    def same(self) -> bool:
        """Whether every measured peak equals its prediction."""
        return all(peak.low == peak.predicted == peak.measured for peak in self.peaks)


def compare_with_prediction(
    predicted: Trace, measured: Trace, title: str, *, settings: str | None = None
) -> MeasuredComparison:  # fmt: skip
    """Compare a measured step with its prediction."""
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
    return MeasuredComparison(tuple(peaks), Comparison(prediction, measurement))
