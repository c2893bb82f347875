"""The result of `memplan.export`: the files, their memory on the device, and their verification."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from memplan._display import Displayed
from memplan._json import Written, named
from memplan.exporting.device_plan import DevicePlan
from memplan.exporting.frozen_int8 import Int8Frozen
from memplan.exporting.int8_training import Int8Trained
from memplan.exporting.rounding import Rounding
from memplan.exporting.trials.cortex import CortexRun
from memplan.exporting.trials.proving import NOT_VERIFIED, Verdict
from memplan.exporting.update_search import UpdateChoice
from memplan.planning.plan.budget_error import PeakStorage, budget_error
from memplan.planning.schedule.to_trace import timeline_of
from memplan.simulation.timeline import Timeline

_OF_CORE = ("core", "text", "rodata", "data", "stack", "instructions")


@dataclass(frozen=True, repr=False)
class Exported(Written, Displayed):
    """An exported training step, and its memory on the device."""

    FORMAT: ClassVar[str] = "memplan.export"

    name: str
    """Name of files and functions: a C identifier."""
    given_name: str
    """The `name` argument, or the name of the model's class."""
    folder: Path
    budget: int
    arena: int
    """Bytes of the arena."""
    live: int
    """Most bytes of the arena that are live at once."""
    state: int
    """Bytes of trained weights, optimizer state and running statistics."""
    inputs: int
    """Bytes of the inputs, which the caller owns, without one that lies in the arena."""
    flash: int
    """Bytes of weights in flash, with the initial values of those in RAM."""
    trained: int
    """Number of trained weights."""
    frozen: int
    """Number of frozen weights."""
    recomputed: int
    """Number of ops that the backward pass recomputes."""
    fused: int
    """Number of parameters whose updates are fused: no gradient is stored."""
    smallest_budget: int
    """Bytes of RAM of the smallest plan."""
    levers: tuple[tuple[str, int], ...]
    """The memory techniques, each on top of those before, with the most bytes of the arena then live."""
    held_by: tuple[PeakStorage, ...]
    """The largest owners of RAM at the peak, in order of size."""
    timeline: Timeline
    """RAM over the step."""
    byte_inputs: tuple[tuple[str, bool], ...] = ()
    """C arguments in uint8 or int8, and whether a buffer of each in float32 is computed: else the ops that read it
    normalize each element."""
    in_arena: tuple[str, int] | None = None
    """C argument that lies in the arena, and its bytes, which are RAM besides if the caller passes it from elsewhere;
    None without `input_in_arena`."""
    rounding: Rounding | None = None
    """The effect of int8 weights; None without `frozen_weights="int8"`."""
    choice: UpdateChoice | None = None
    """The parameters that a search chose to train; None without `search_update`."""
    int8: Int8Frozen | None = None
    """The effect of computing the frozen part in eight bits; None without `frozen_layers="int8"`, or where no layer is
    before the first trained one."""
    int8_trained: Int8Trained | None = None
    """The effect of training in eight bits; None without `trained_weights="int8"`, or where no trained weight is one of
    a convolution or a linear layer."""
    verdict: Verdict = NOT_VERIFIED
    core: CortexRun | None = None
    """The run on an emulated core; None without `device`."""

    @property
    def ram(self) -> int:
        """Bytes of RAM in total, without the stack."""
        return self.arena + self.state + self.inputs

    @classmethod
    def of_plan(
        cls, plan: DevicePlan, given_name: str, folder: Path, budget: int, rounding: Rounding | None = None,
        choice: UpdateChoice | None = None, int8: Int8Frozen | None = None, int8_trained: Int8Trained | None = None,
    ) -> Exported:  # fmt: skip
        """Return the result of a plan before verification."""
        layout, step = plan.layout, plan.layout.step
        memory, graph = layout.memory, step.device.graph
        # weights of integer layers are constants of the graph, not tensors of `Memory`
        integer_layer_weights = 0 if int8 is None else int8.weights
        # the error that says what a budget is too small for: here its list of owners alone is of use
        peak_owners = budget_error(step.schedule, plan.outside_memory, budget).held_by
        return cls(
            name=layout.name,
            given_name=given_name,
            folder=folder,
            budget=budget,
            arena=layout.arena_bytes,
            live=step.lifetimes.peak_bytes,
            state=layout.state_bytes,
            inputs=sum(value.bytes for value in graph.values if value.kind == "input"),
            flash=memory.flash_bytes + layout.constant_bytes,
            trained=memory.elements("trained") + memory.elements("trained_int8"),
            frozen=memory.elements("frozen") + memory.elements("int8") + integer_layer_weights,
            recomputed=sum(action.recomputed for action in step.schedule.backward),
            fused=len(step.device.fused_gradients),
            smallest_budget=plan.smallest_bytes,
            levers=plan.lever_peaks,
            held_by=tuple(owner for owner in peak_owners if owner.bytes),
            timeline=timeline_of(step.schedule, plan.outside_memory),
            byte_inputs=layout.byte_inputs,
            in_arena=layout.arena_input,
            rounding=rounding,
            choice=choice,
            int8=int8,
            int8_trained=int8_trained,
        )

    def with_verdict(self, verdict: Verdict, core: CortexRun | None = None) -> Exported:
        """Return a copy with the results of verification."""
        return replace(self, verdict=verdict, core=core)

    def _plain(self) -> dict[str, Any]:
        """Return the result as JSON has it, without the timeline."""
        names = (
            "name", "given_name", "budget", "ram", "arena", "live", "state", "inputs", "flash", "smallest_budget",
            "trained", "frozen", "recomputed", "fused", "folder", "choice", "rounding", "int8",
            "int8_trained",
        )  # fmt: skip
        return named(self, *names) | {
            "byte_inputs": [{"name": name, "buffer": buffer} for name, buffer in self.byte_inputs],
            "in_arena": None if self.in_arena is None else dict(zip(("name", "bytes"), self.in_arena, strict=True)),
            "levers": [{"what": what, "live": size} for what, size in self.levers],
            "held_by": [{"what": str(owner), "bytes": owner.bytes} for owner in self.held_by],
            "proven": self.verdict.proven,
            "verdict": str(self.verdict),
            "core": None if self.core is None else named(self.core, *_OF_CORE),
        }
