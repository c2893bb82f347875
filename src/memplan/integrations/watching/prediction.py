"""Predict the memory of future steps by simulating the observed steps."""

from __future__ import annotations

from dataclasses import dataclass

from memplan.explanation.explain import explain_trace
from memplan.explanation.model import Explanation, OwnerRow
from memplan.explanation.owners import owners_at
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
        """Peak of the last observed step in bytes: the prediction for the following steps."""
        return self.timeline.steps[-1].peak_allocated

    def peaks(self) -> list[int]:
        """Return the peak of each observed step in bytes."""
        return [step.peak_allocated for step in self.timeline.steps]

    def owners(self) -> tuple[OwnerRow, ...]:
        """Return the owners of the storages live at the last step's peak."""
        return owners_at(self.trace, self.timeline.steps[-1].peak_tick)

    def explanation(self) -> Explanation:
        """Explain the observed steps."""
        return explain_trace(self.trace, title="the watched step")


def grown(before: Prediction, after: Prediction) -> tuple[str, str | None, int]:
    """Return (layer, line, growth in bytes) of the owner that grew most between the peaks of two predictions."""
    sizes: dict[tuple[str, str | None], int] = {}
    for sign, prediction in ((-1, before), (1, after)):
        for row in prediction.owners():
            owner = row.layer, row.where
            sizes[owner] = sizes.get(owner, 0) + sign * row.bytes
    (layer, where), size = max(sizes.items(), key=lambda item: item[1], default=(("", None), 0))
    return layer, where, size
