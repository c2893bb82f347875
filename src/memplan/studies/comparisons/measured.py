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
    predicted: int
    measured: int

    @property
    def off(self) -> float | None:
        """Return how far the prediction is off, as a share of what was measured; None of nothing."""
        return self.predicted / self.measured - 1 if self.measured else None


@dataclass(frozen=True, slots=True)
class Beside:
    """A measured step beside its prediction."""

    peaks: tuple[Peak, ...]
    comparison: Comparison
    """Its A is the prediction, its B the measurement."""

    @property
    def same(self) -> bool:
        """Return whether every peak is as predicted, to the byte."""
        return all(peak.predicted == peak.measured for peak in self.peaks)


def beside(predicted: Trace, measured: Trace, title: str, *, settings: str | None = None) -> Beside:
    """Return a measured step beside its prediction.

    Args:
        predicted: the step, recorded for the card.
        measured: the step, as it ran there; it has torch's counters.
        title: what to call the step.
        settings: of the caching allocator, in both.
    """
    timeline = simulate(predicted, settings=settings)
    parts = ("building", *(f"step {number + 1}" for number in range(len(measured.counters) - 1)))
    rows = list[Peak]()
    for part, found, counted in zip(parts, (timeline.build, *timeline.steps), measured.counters, strict=False):
        rows += _rows(part, found, counted)
    one, other = (
        of_trace(trace, f"{title}, {name}", settings=settings)
        for name, trace in (("predicted", predicted), ("measured", measured))
    )
    return Beside(tuple(rows), Comparison(one, other))


def _rows(part: str, found: StepPeak, counted: Counters) -> list[Peak]:
    return [
        Peak(part, found.peak_allocated, counted.allocated),
        Peak(f"{part}, reserved", found.peak_reserved, counted.reserved),
    ]
