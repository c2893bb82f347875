"""The result of an export: what it takes on the device, where it is, and whether it is proven."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from memplan._bytes import format_bytes
from memplan._display import Displayed
from memplan.exporting.device_plan import DevicePlan
from memplan.exporting.rounding import Rounding
from memplan.exporting.trials.cortex import CortexRun
from memplan.exporting.trials.proving import NOT_VERIFIED, Verdict
from memplan.exporting.update_search import UpdateChoice
from memplan.planning.plan.budget_error import Holder, budget_error
from memplan.planning.schedule.to_trace import timeline_of
from memplan.simulation.timeline import Timeline

_OF_CORE = ("core", "text", "rodata", "data", "stack", "instructions")


@dataclass(frozen=True, repr=False)
class Exported(Displayed):
    """What was written."""

    name: str
    """Of files and functions: a C identifier."""
    given_name: str
    """Name that was asked for, or the model's class."""
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
    smallest_budget: int
    """Bytes of RAM of the smallest plan that was found."""
    levers: tuple[tuple[str, int], ...]
    """What was done one after another, and the bytes of the arena that are in use at once with it."""
    held_by: tuple[Holder, ...]
    """What is in RAM at the peak, the largest first."""
    timeline: Timeline
    """RAM over the step."""
    rounding: Rounding | None = None
    """What eight bits change, where frozen weights were asked for in these."""
    choice: UpdateChoice | None = None
    """What is trained, where a search chose it."""
    verdict: Verdict = NOT_VERIFIED
    core: CortexRun | None = None
    """What it takes and does on an emulated core, where that was asked for."""

    @property
    def ram(self) -> int:
        """Bytes of RAM, all in all; not the stack."""
        return self.arena + self.state + self.inputs

    @classmethod
    def made(
        cls, plan: DevicePlan, given_name: str, folder: Path, budget: int, rounding: Rounding | None = None,
        choice: UpdateChoice | None = None,
    ) -> Exported:  # fmt: skip
        """Gather the figures of a plan."""
        layout, step = plan.layout, plan.layout.step
        memory, graph = layout.memory, step.device.graph
        return cls(
            layout.name, given_name, folder, budget, layout.arena, step.lifetimes.peak, layout.state,
            sum(value.bytes for value in graph.values if value.kind == "input"), memory.flash + layout.constants,
            memory.floats("trained"), memory.floats("frozen") + memory.floats("int8"),
            sum(action.recomputed for action in step.schedule.backward), len(step.device.fused),
            plan.smallest, plan.levers, budget_error(step.schedule, plan.around, budget).held_by,
            timeline_of(step.schedule, plan.around), rounding, choice,
        )  # fmt: skip

    def proven(self, verdict: Verdict, core: CortexRun | None = None) -> Exported:
        """Return the same with what the proof found."""
        return replace(self, verdict=verdict, core=core)

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain data. Bytes."""
        names = ("name", "given_name", "budget", "ram", "arena", "live", "state", "inputs", "flash", "smallest_budget")
        counts = ("trained", "frozen", "recomputed", "fused")
        return {
            **{name: getattr(self, name) for name in (*names, *counts)},
            "folder": str(self.folder),
            "levers": [{"what": what, "live": size} for what, size in self.levers],
            "held_by": [{"what": str(one), "bytes": one.bytes} for one in self.held_by],
            "proven": self.verdict.proven,
            "verdict": str(self.verdict),
            "choice": None if self.choice is None else {"share": self.choice.share, **asdict(self.choice)},
            "rounding": None if self.rounding is None else asdict(self.rounding),
            "core": None if self.core is None else {name: getattr(self.core, name) for name in _OF_CORE},
        }

    def __str__(self) -> str:
        parts = {"arena": self.arena, "weights and state": self.state, "inputs": self.inputs}
        held = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
        return (
            f"{self.folder / self.name}.c: a training step in {format_bytes(self.ram)} of RAM ({held}); {self.verdict}"
        )
