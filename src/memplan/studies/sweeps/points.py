"""Record and simulate a step, and return its figures. Safe to run in another process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from memplan.devices.model import Device
from memplan.errors import InputError, MemplanError
from memplan.explanation.explain import LARGEST_WORKSPACE, explain_trace
from memplan.explanation.layers import origin_word
from memplan.explanation.model import Answer
from memplan.simulation.simulate import live_at
from memplan.studies.axes.sliding_window import aggregation_bytes
from memplan.studies.axes.subject import Subject
from memplan.trace.record import record_for
from memplan.trace.recording.session import Target
from memplan.trace.records import CAUSES, Assumption, loud
from memplan.trace.trace import Trace

_OF_RANKS: Mapping[str, str] = {"gathered_weight": "weight", "communication": "temporary"}
"""Causes of steps with several ranks -> the cause that they count as."""
KNOWN = tuple(cause for cause in CAUSES if cause != "workspace" and cause not in _OF_RANKS)
"""Causes that do not depend on the algorithms that cuDNN chooses."""

PARTS: Mapping[str, tuple[str, ...]] = {
    "weights": ("weight", "buffer"),
    "inputs": ("input",),
    "saved": ("saved",),
    "gradients": ("parameter_gradient", "activation_gradient"),
    "optimizer": ("optimizer_state",),
    "temporaries": ("activation", "temporary"),
    "workspace": ("workspace_low",),
    "rounding": ("rounding",),
}
"""Groups of causes in tables, charts and crossings; they add up to the peak."""


@dataclass(frozen=True)
class Bytes:
    """Bytes of a step, for the lower bounds of its workspaces, and with ``_high`` for the upper bounds. These are equal
    if every workspace is known or expected, as on the CPU."""

    peak: int
    peak_high: int
    reserved: int
    reserved_high: int
    needs: int
    """Memory needed from the device: reserved bytes and the CUDA context on a card, else the peak."""
    needs_high: int
    workspace_low: int
    workspace_high: int
    """Bytes of workspaces at the peak."""
    causes: Mapping[str, int]
    """Bytes at the peak by cause, and ``rounding``; without workspaces. With ``workspace_low`` they sum to ``peak``."""
    answer: Answer | None = None
    """Whether it fits on its card; None on the CPU."""
    aggregation: int = 0
    """Bytes of the aggregation buffers of inference in patches, part of the causes."""
    needs_band: tuple[int, int] | None = None
    """What holds the memory needed from the card in 95 % of steps; None where its bytes are an interval."""

    @property
    def fragmentation(self) -> int:
        """Bytes reserved but not allocated at the peak."""
        return self.reserved - self.peak

    def row(self) -> dict[str, int]:
        """Return the bytes as a row of a table."""
        return {
            "peak": self.peak,
            "peak_high": self.peak_high,
            "reserved": self.reserved,
            "reserved_high": self.reserved_high,
            "needs": self.needs,
            "needs_high": self.needs_high,
            **self.causes,
            "workspace_low": self.workspace_low,
            "workspace_high": self.workspace_high,
            "fragmentation": self.fragmentation,
        }


@dataclass(frozen=True, slots=True)
class PlannedWorkspace:
    """Engine and workspace that cuDNN plans for a convolution, or for one of its gradients."""

    op: str
    engine: str
    bytes: int
    at_peak: bool
    """Whether it is allocated at the peak."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of recording a point: its bytes, or an error."""

    bytes: Bytes | None = None
    error: MemplanError | None = None
    notes: tuple[str, ...] = field(default=())
    trace: Trace | None = field(default=None, repr=False)
    """The recorded step, with ``keep=True``."""
    planned: tuple[PlannedWorkspace, ...] = ()
    """Workspaces planned by an installed cuDNN, in the order of the ops."""


def record_point(subject: Subject, target: Target, settings: str | None = None, *, keep: bool = False) -> Outcome:
    """Record and simulate a step. Errors are returned in the outcome. ``keep``: whether the outcome has the trace."""
    try:
        trace = record_trace(subject, target)
        aggregation = aggregation_bytes(trace) if subject.window is not None else 0
        return outcome_of(trace, target.card, settings, keep=keep, aggregation=aggregation)
    except MemplanError as error:
        return Outcome(error=error)


def outcome_of(
    trace: Trace, card: Device | None, settings: str | None = None, *, keep: bool = False, aggregation: int = 0
) -> Outcome:
    """Simulate a recorded step.

    Args:
        card: the card that the step was recorded for; None for the CPU.
        settings: of the caching allocator, as in PYTORCH_ALLOC_CONF.
        keep: whether the outcome has the trace.
        aggregation: bytes of the stitched output of sliding windows, among the temporaries.

    Raises:
        MemplanError: the step cannot be explained.
    """
    explanation = explain_trace(trace, card=card, settings=settings)
    causes = {cause: explanation.by_cause[cause] for cause in (*KNOWN, "rounding")}
    for cause, counted in _OF_RANKS.items():
        causes[counted] += explanation.by_cause[cause]
    timeline, low = explanation.timeline, explanation.by_cause["workspace"]
    notes = (
        *(note for note in explanation.notes if not note.startswith(LARGEST_WORKSPACE)),  # differs between points
        *map(_assumption_note, loud(trace.assumptions)),
    )
    peak, reserved = timeline.peak_allocated, timeline.peak_reserved
    on_card = explanation.card
    if on_card is None:
        figures = Bytes(
            peak=peak, peak_high=peak, reserved=reserved, reserved_high=reserved, needs=reserved, needs_high=reserved,
            workspace_low=low, workspace_high=low, causes=causes, answer=None, aggregation=aggregation,
        )  # fmt: skip
        return Outcome(figures, error=None, notes=notes, trace=trace if keep else None)
    charges = {charge.name: charge for charge in on_card.charges}
    fragmentation = charges["fragmentation"]
    verdict, high = on_card.verdict, on_card.peak_allocated_high
    figures = Bytes(
        peak, high, peak + fragmentation.low, high + fragmentation.high, verdict.low, verdict.high, low,
        charges["workspace"].high, causes, verdict.answer, aggregation, verdict.band,
    )  # fmt: skip
    planned = _planned_workspaces(trace, timeline.peak_tick)
    return Outcome(figures, error=None, notes=notes, trace=trace if keep else None, planned=planned)


def record_trace(subject: Subject, target: Target) -> Trace:
    """Record a subject's step. Raises MemplanError."""
    try:
        trace = record_for(subject.build(on_card=target.card is not None), target)
    except SystemExit as error:  # the user's code
        raise InputError(f"{subject.title} called sys.exit({error.code!r})", expected="code that returns") from error
    if subject.changes:  # building first makes the original layers, which a model written that way would not
        return without_build_temporaries(trace)
    return trace


def _planned_workspaces(trace: Trace, peak_tick: int) -> tuple[PlannedWorkspace, ...]:
    """Return cuDNN's choice for each convolution of a trace, and whether its workspace is live at the peak."""
    live = {storage.id for storage in live_at(trace, peak_tick)}
    planned: list[PlannedWorkspace] = []
    for choice in trace.engines:
        op, plan = trace.ops[trace.storages[choice.storage].op or 0], choice.plans[0]
        name = origin_word(op, trace) + (f" of {op.layer}" if op.layer else "")
        planned.append(PlannedWorkspace(name, plan.engine, plan.workspace, choice.storage in live))
    return tuple(planned)


def _assumption_note(assumption: Assumption) -> str:
    """Return the note of an assumption without its numbers, which differ between points."""
    where = f", at {assumption.where}" if assumption.where else ""
    return f"assumed: {assumption.text.split(':')[0]}{where}"


def without_build_temporaries(trace: Trace) -> Trace:
    """Return the trace with storages that are freed before the first step emptied, so that the peak is in a step."""
    start = trace.steps[0]
    storages = tuple(
        replace(storage, bytes=0, low=None) if storage.died is not None and storage.died <= start else storage
        for storage in trace.storages
    )
    expected = tuple(size for size in trace.expected if storages[size.storage].bytes)
    return replace(trace, storages=storages, expected=expected)
