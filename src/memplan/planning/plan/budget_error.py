"""Explain a budget that no plan meets: the bytes it needs, the storages at the peak, and ways to need less."""

from __future__ import annotations

from dataclasses import dataclass

from memplan._bytes import format_bytes
from memplan._display import Printed
from memplan.errors import BudgetError
from memplan.planning.graph.op_schema import short
from memplan.planning.graph.resident import OutsideMemory
from memplan.planning.levers.registry import UPDATE_EARLY
from memplan.planning.schedule.scheduler import Schedule
from memplan.planning.schedule.to_trace import trace_of
from memplan.simulation.simulate import live_at, simulate
from memplan.simulation.timeline import Timeline
from memplan.trace.records import Cause, Op, Storage
from memplan.trace.trace import Trace

_SCALING: tuple[Cause, ...] = ("input", "saved", "activation", "activation_gradient", "temporary", "workspace")
"""Causes whose bytes scale with the inputs' sizes."""
_NARROW = ("bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class PeakStorage(Printed):
    """A storage that is live at the peak of the smallest budget's schedule."""

    bytes: int
    cause: Cause
    name: str
    """Name of the parameter or buffer, else of the op that allocated the storage."""
    layer: str
    where: str | None

    def __str__(self) -> str:
        what = f"{format_bytes(self.bytes)} {self.cause.replace('_', ' ')}"
        whose = " ".join(part for part in (self.name, self.layer and f"of {self.layer}") if part)
        return f"{what} ({whose})" if whose else what


@dataclass(frozen=True, slots=True)
class Remedy(Printed):
    """A way to need less memory. ``bytes`` estimates the smallest budget then, from the storages live at the peak."""

    do: str
    bytes: int

    def __str__(self) -> str:
        return f"{self.do} (about {format_bytes(self.bytes)})"


def budget_error(
    floor: Schedule, outside_memory: OutsideMemory, budget: int, predicted: Timeline | None = None
) -> BudgetError:
    """Build the error of a budget that no plan meets. ``floor`` is the schedule with the smallest peak that the search
    reached; ``predicted`` the timeline of a step of fused kernels, whose memory differs from that of the single ops."""
    trace = trace_of(floor, outside_memory)
    timeline = simulate(trace, settings=outside_memory.home.allocator_conf)
    least = (predicted or timeline).peak_reserved
    live = sorted(live_at(trace, timeline.peak_tick), key=lambda storage: -storage.bytes)
    storages = tuple(_peak_storage(trace, storage) for storage in live)
    peak, wanted = format_bytes(least), format_bytes(budget)
    helpful = (remedy for remedy in _remedies(floor, live, least) if format_bytes(remedy.bytes) != peak)
    remedies = tuple(sorted(helpful, key=lambda remedy: remedy.bytes))
    if peak == wanted:
        peak, wanted = f"{peak} ({least} bytes)", f"{wanted} ({budget} bytes)"
    holding = ", ".join(map(str, storages[:3]))
    return BudgetError(
        f"The budget is {wanted}",
        expected=f"at least {peak}, the smallest peak found: {_op_at(trace, timeline.peak_tick)} it takes {holding}",
        do=f"Give {format_bytes(least)} ({least} bytes)"
        + (f", or {'; or '.join(map(str, remedies))}" if remedies else ""),
        smallest_budget=least,
        timeline=predicted or timeline,
        held_by=storages,
        lower_by=remedies,
    )


def with_remedy(error: BudgetError, remedy: Remedy) -> BudgetError:
    """Return a copy of the error with another way to meet the budget."""
    return error.but(do=f"{error.do}; or {remedy}", lower_by=(*error.lower_by, remedy))


def _peak_storage(trace: Trace, storage: Storage) -> PeakStorage:
    """Describe a storage: a parameter or buffer by its name, others by the op that allocated them."""
    if storage.name or storage.op is None or storage.op >= len(trace.ops):
        return PeakStorage(storage.bytes, storage.cause, storage.name, layer="", where=None)
    op = trace.ops[storage.op]
    return PeakStorage(storage.bytes, storage.cause, short(op.name), op.layer, op.where)


def _op_at(trace: Trace, tick: int) -> str:
    """Describe the op that runs at a tick of the trace: "in backward, at addmm of layer1 (model.py:12)"."""
    op: Op | None = next((op for op in trace.ops if op.start < tick <= op.end), None)
    if op is None:
        return "at its peak"
    layer = f" of {op.layer}" if op.layer else ""
    return f"in {op.phase}, at {short(op.name)}{layer}" + (f" ({op.where})" if op.where else "")


def _remedies(floor: Schedule, live: list[Storage], peak: int) -> list[Remedy]:
    """Return what users can change to need less, each with an estimate of the smallest budget then. ``live`` are the
    storages at the peak of ``floor``. For fused kernels the ``peak`` differs from their bytes; the difference is
    assumed to scale with the inputs."""
    scaling = [storage for storage in live if storage.cause in _SCALING]
    scaling_bytes = sum(storage.bytes for storage in scaling)
    total = max(0, peak - sum(storage.bytes for storage in live) + scaling_bytes)  # what scales with the inputs
    wide = sum(storage.bytes for storage in scaling if storage.dtype == "float32" and storage.cause != "input")
    wide = wide * total // max(scaling_bytes, 1)
    inputs = [value.shape for value in floor.graph.values if value.kind == "input"]
    remedies = list[Remedy]()
    if total and inputs and inputs[0] and inputs[0][0] > 1:
        remedies.append(Remedy("halve the batch", peak - total // 2))
    spatial_dims = max((len(shape) - 2 for shape in inputs if len(shape) in (4, 5)), default=0)
    if total and spatial_dims:
        remedies.append(Remedy("halve the resolution", peak - total + total // 2**spatial_dims))
    if wide and not any(value.dtype in _NARROW for value in floor.graph.values):
        remedies.append(Remedy("run in bfloat16 (autocast)", peak - wide // 2))
    gradients = sum(storage.bytes for storage in live if storage.cause == "parameter_gradient")
    if gradients and not floor.choices.gradients.frees:
        remedies.append(Remedy(UPDATE_EARLY.remedy, peak - gradients))
    return remedies
