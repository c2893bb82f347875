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
from memplan.planning.schedule.to_trace import timeline_of, trace_of
from memplan.simulation.simulate import live_at
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
    smallest_peak: Schedule, outside_memory: OutsideMemory, budget: int, predicted: Timeline | None = None
) -> BudgetError:
    """Build the error of a budget that no plan meets. ``smallest_peak`` is the schedule with the smallest peak that the
    search reached; ``predicted`` the timeline of a step of fused kernels, whose memory differs from that of the single
    ops."""
    trace = trace_of(smallest_peak, outside_memory)
    timeline = timeline_of(smallest_peak, outside_memory)
    smallest_budget = (predicted or timeline).peak_reserved
    live = sorted(live_at(trace, timeline.peak_tick), key=lambda storage: -storage.bytes)
    storages = tuple(_peak_storage(trace, storage) for storage in live)
    smallest, given = format_bytes(smallest_budget), format_bytes(budget)
    # a remedy that needs as much in the message's digits is none
    helpful = (r for r in _remedies(smallest_peak, live, smallest_budget) if format_bytes(r.bytes) != smallest)
    remedies = tuple(sorted(helpful, key=lambda remedy: remedy.bytes))
    if smallest == given:  # they differ only in further digits
        smallest, given = f"{smallest} ({smallest_budget} bytes)", f"{given} ({budget} bytes)"
    largest_storages = ", ".join(map(str, storages[:3]))
    where = _op_at(trace, timeline.peak_tick)
    return BudgetError(
        f"The budget is {given}",
        expected=f"at least {smallest}, the smallest peak found: {where} it takes {largest_storages}",
        do=_give(smallest_budget) + (f", or {'; or '.join(map(str, remedies))}" if remedies else ""),
        smallest_budget=smallest_budget,
        timeline=predicted or timeline,
        held_by=storages,
        lower_by=remedies,
    )


def with_smallest_budget(error: BudgetError, found: str, expected: str | None, smallest_budget: int) -> BudgetError:
    """Return a copy of the error with another smallest budget in bytes. Its other advice stays."""
    other_advice = (error.do or "").removeprefix(_give(error.smallest_budget))
    return error.but(
        found=found, expected=expected, do=_give(smallest_budget) + other_advice, smallest_budget=smallest_budget
    )


def _give(budget: int) -> str:
    """Return the advice to give a budget in bytes."""
    return f"Give {format_bytes(budget)} ({budget} bytes)"


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


def _remedies(smallest_peak: Schedule, live: list[Storage], peak: int) -> list[Remedy]:
    """Return what users can change to need less, each with an estimate of the smallest budget then. ``live`` are the
    storages at the peak of ``smallest_peak``. For fused kernels the ``peak`` differs from their bytes; the difference
    is assumed to scale with the inputs."""
    scaling = [storage for storage in live if storage.cause in _SCALING]
    live_scaling_bytes = sum(storage.bytes for storage in scaling)
    fixed_bytes = sum(storage.bytes for storage in live) - live_scaling_bytes
    scaling_bytes = max(0, peak - fixed_bytes)
    live_float32_bytes = sum(s.bytes for s in scaling if s.dtype == "float32" and s.cause != "input")
    float32_bytes = live_float32_bytes * scaling_bytes // max(live_scaling_bytes, 1)
    inputs = [value.shape for value in smallest_peak.graph.values if value.kind == "input"]
    remedies = list[Remedy]()
    if scaling_bytes and inputs and inputs[0] and inputs[0][0] > 1:
        remedies.append(Remedy("halve the batch", peak - scaling_bytes // 2))
    spatial_dims = max((len(shape) - 2 for shape in inputs if len(shape) in (4, 5)), default=0)  # (N, C, *spatial)
    if scaling_bytes and spatial_dims:
        remedies.append(Remedy("halve the resolution", peak - scaling_bytes + scaling_bytes // 2**spatial_dims))
    if float32_bytes and not any(value.dtype in _NARROW for value in smallest_peak.graph.values):
        remedies.append(Remedy("run in bfloat16 (autocast)", peak - float32_bytes // 2))
    gradient_bytes = sum(storage.bytes for storage in live if storage.cause == "parameter_gradient")
    if gradient_bytes and not smallest_peak.choices.gradients.frees:
        remedies.append(Remedy(UPDATE_EARLY.remedy, peak - gradient_bytes))
    return remedies
