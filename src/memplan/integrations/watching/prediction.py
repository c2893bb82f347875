"""What a watch predicts of the steps to come: the simulated peaks of the steps that it observed."""

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
    """The observed steps, simulated: `memplan.simulate` adds what kernels take, and a card's blocks, to their tensors.

    It rests on the ops of these steps as they really ran: losses, hooks and optimizers are in it.
    """

    trace: Trace
    timeline: Timeline

    @classmethod
    def of(cls, trace: Trace) -> Prediction:
        """Simulate a trace, where workspaces are an interval in the low case."""
        lowest = at_least(trace)
        return cls(lowest, simulate(lowest))

    @property
    def peak(self) -> int:
        """Return the peak of the last observed step, in bytes: that of the steps to come."""
        return self.timeline.steps[-1].peak_allocated

    def peaks(self) -> list[int]:
        """Return the peak of each observed step."""
        return [step.peak_allocated for step in self.timeline.steps]

    def holders(self) -> tuple[HolderRow, ...]:
        """Return what is alive at the last step's peak."""
        return holders_at(self.trace, self.timeline.steps[-1].peak_tick)

    def explanation(self) -> Explanation:
        """Explain the steps."""
        return explain_trace(self.trace, title="the watched step")


def grown(before: Prediction, after: Prediction) -> tuple[str, str | None, int]:
    """Return layer, line and bytes of the place that holds the most more at the second one's peak."""
    sizes: dict[tuple[str, str | None], int] = {}
    for sign, prediction in ((-1, before), (1, after)):
        for row in prediction.holders():
            place = row.layer, row.where
            sizes[place] = sizes.get(place, 0) + sign * row.bytes
    (layer, where), size = max(sizes.items(), key=lambda item: item[1], default=(("", None), 0))
    return layer, where, size
