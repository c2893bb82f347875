"""The result of an export: what it takes on the device, where it is, and whether it is proven."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from memplan._bytes import format_bytes
from memplan.exporting.source.step_layout import StepLayout
from memplan.exporting.trials.proving import Verdict
from memplan.planning.graph.resident import Surroundings
from memplan.planning.schedule.to_trace import timeline_of
from memplan.simulation.timeline import Timeline


@dataclass(frozen=True)
class Exported:
    """What was written."""

    name: str
    folder: Path
    budget: int
    arena: int
    """Bytes of the arena."""
    live: int
    """Most bytes of it that are in use at once."""
    state: int
    """Bytes of weights that are trained, what the optimizer holds, and statistics."""
    inputs: int
    """Bytes of the inputs, which are the caller's."""
    flash: int
    """Bytes of weights in flash, initial ones among them."""
    trained: int
    """Number of weights that are trained."""
    frozen: int
    """Number of those that are not."""
    recomputed: int
    """Results that are made again in the backward pass."""
    fused: int
    """Parameters that are updated element by element, without a gradient in memory."""
    timeline: Timeline
    verdict: Verdict = Verdict("not verified")

    @property
    def ram(self) -> int:
        """Bytes of RAM, all in all; not the stack."""
        return self.arena + self.state + self.inputs

    @classmethod
    def of(cls, layout: StepLayout, around: Surroundings, folder: Path, budget: int) -> Exported:
        """Gather the figures of a layout."""
        memory, step = layout.memory, layout.step
        graph = step.device.graph
        floats = {kind: memory.floats(kind) for kind in ("trained", "statistics", "frozen")}
        constants = sum(array.size for of in (step, layout.infer) for array in of.device.constants.values())
        return cls(
            layout.name, folder, budget, layout.arena, step.lifetimes.peak, layout.state,
            sum(value.bytes for value in graph.values if value.kind == "input"), 4 * (sum(floats.values()) + constants),
            floats["trained"], floats["frozen"],
            sum(action.recomputed for action in step.schedule.backward), len(step.device.fused),
            timeline_of(step.schedule, around),
        )  # fmt: skip

    def with_verdict(self, verdict: Verdict) -> Exported:
        """Return the same with what the proof found."""
        return replace(self, verdict=verdict)

    def __str__(self) -> str:
        held = f"{format_bytes(self.arena)} arena, {format_bytes(self.state)} weights and state, {format_bytes(self.inputs)} inputs"
        lines = [
            f"{self.folder / self.name}.c: a training step in {format_bytes(self.ram)} of RAM ({held})",
            f"flash: {format_bytes(self.flash)} of weights, beside the code; {self.trained} trained, {self.frozen} frozen",
            f"{self.recomputed} results made again, {self.fused} weights updated element by element",
            str(self.verdict),
        ]
        return "\n".join(lines)
