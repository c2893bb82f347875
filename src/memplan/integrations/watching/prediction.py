"""Predicted memory of the coming steps: the simulation of the observed ones."""

from __future__ import annotations

from dataclasses import dataclass

from memplan.explanation.explain import explain_trace
from memplan.explanation.holders import holders_at
from memplan.explanation.model import Explanation, HolderRow
from memplan.simulation.simulate import simulate
from memplan.simulation.timeline import Timeline
from memplan.trace.trace import Trace, at_least


@dataclass(frozen=True)
class Prediction:
    """A trace of observed steps and its simulation, which adds workspaces and the allocator's rounding to the tensors.

    The trace has all ops that really ran: those of the loss, hooks and optimizers as well.
    """

    trace: Trace
    timeline: Timeline

    @classmethod
    def of(cls, trace: Trace) -> Prediction:
        """Simulate a trace with the lower end of each workspace interval."""
        lower = at_least(trace)
        return cls(lower, simulate(lower))

    @property
    def peak(self) -> int:
        """The peak of the last observed step in bytes, which is predicted for the coming ones."""
        return self.timeline.steps[-1].peak_allocated

    def peaks(self) -> list[int]:
        """Return the peak of each observed step in bytes."""
        return [step.peak_allocated for step in self.timeline.steps]

    def holders(self) -> tuple[HolderRow, ...]:
        """Return what is live at the last step's peak."""
        return holders_at(self.trace, self.timeline.steps[-1].peak_tick)

    def explanation(self) -> Explanation:
        """Explain the observed steps."""
        return explain_trace(self.trace, title="the watched step")


def grown(before: Prediction, after: Prediction) -> tuple[str, str | None, int]:
    """Return (layer, line, bytes) of the place that grew most between the peaks of two predictions."""
    sizes: dict[tuple[str, str | None], int] = {}
    for sign, prediction in ((-1, before), (1, after)):
        for row in prediction.holders():
            place = row.layer, row.where
            sizes[place] = sizes.get(place, 0) + sign * row.bytes
    (layer, where), size = max(sizes.items(), key=lambda item: item[1], default=(("", None), 0))
    return layer, where, size
