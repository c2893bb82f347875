"""One point of a study: a step recorded and simulated, in numbers. Safe to run in another process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

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

KNOWN = tuple(cause for cause in CAUSES if cause != "workspace")
"""Causes that are the same whatever algorithms cuDNN takes."""

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
"""Groups of causes in tables, charts and crossings; the parts of a point add up to its peak."""


@dataclass(frozen=True)
class Bytes:
    """Bytes of a step. ``peak``, ``reserved`` and ``needs`` are of the case with the smallest workspaces, those with
    ``_high`` of the one with the largest; they are equal where every workspace is known, as on the CPU."""

    peak: int
    peak_high: int
    reserved: int
    reserved_high: int
    needs: int
    """What is taken from the device: on a card, reserved and the CUDA context; else the peak."""
    needs_high: int
    workspace_low: int
    workspace_high: int
    causes: Mapping[str, int]
    """At the peak, by cause, without workspaces; with ``rounding``. With ``workspace_low`` they add up to ``peak``."""
    answer: Answer | None = None
    """Whether it fits on its card, None on the CPU."""
    aggregation: int = 0
    """Of inference in patches: what the aggregation buffers take."""

    @property
    def fragmentation(self) -> int:
        """Bytes that are reserved and not allocated at the peak."""
        return self.reserved - self.peak

    def row(self) -> dict[str, int]:
        """Return a row of a table: everything in bytes."""
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
    """What cuDNN plans for a convolution, or for one of its gradients."""

    op: str
    engine: str
    bytes: int
    at_peak: bool
    """Whether it is allocated at the peak."""


@dataclass(frozen=True)
class Outcome:
    """What became of a point: its bytes, or why there are none."""

    bytes: Bytes | None = None
    error: MemplanError | None = None
    notes: tuple[str, ...] = field(default=())
    trace: Trace | None = field(default=None, repr=False)
    """The step, where asked for."""
    planned: tuple[PlannedWorkspace, ...] = ()
    """Workspaces that cuDNN was asked for, in order of the step."""


def measured(subject: Subject, target: Target, settings: str | None = None, *, keep: bool = False) -> Outcome:
    """Record a step and add up what it takes.

    Args:
        subject: the step.
        target: what it is recorded for.
        settings: of a card's caching allocator.
        keep: the trace, too.
    """
    try:
        trace = record_for(subject.build(on_card=target.card is not None), target)
        if subject.changes:  # layers are made as they were first: no model that was written so holds these
            trace = of_steps(trace)
        explanation = explain_trace(trace, card=target.card, settings=settings)
    except MemplanError as error:
        return Outcome(error=error)
    except SystemExit as error:  # the user's code
        return Outcome(
            error=InputError(f"{subject.title} called sys.exit({error.code!r})", expected="code that returns")
        )
    causes = {cause: explanation.by_cause[cause] for cause in (*KNOWN, "rounding")}
    timeline, low = explanation.timeline, explanation.by_cause["workspace"]
    aggregation = aggregation_bytes(trace) if subject.window is not None else 0
    kept = trace if keep else None
    same = (note for note in explanation.notes if not note.startswith(LARGEST_WORKSPACE))
    notes = (*same, *map(_rests_on, loud(trace.assumptions)))
    planned = _planned(trace, explanation.timeline.peak_tick)
    peak, reserved = timeline.peak_allocated, timeline.peak_reserved
    card = explanation.card
    if card is None:
        found = Bytes(peak, peak, reserved, reserved, reserved, reserved, low, low, causes, None, aggregation)
        return Outcome(found, None, notes, kept)
    high = {charge.name: (charge.low, charge.high) for charge in card.charges}
    reserved_low = peak + high["fragmentation"][0]
    reserved_high = card.peak_allocated_high + high["fragmentation"][1]
    found = Bytes(
        peak, card.peak_allocated_high, reserved_low, reserved_high, card.verdict.low, card.verdict.high,
        low, high["workspace"][1], causes, card.verdict.answer, aggregation,
    )  # fmt: skip
    return Outcome(found, None, notes, kept, planned)


def _planned(trace: Trace, tick: int) -> tuple[PlannedWorkspace, ...]:
    held = {storage.id for storage in live_at(trace, tick)}
    ops = [(one, trace.ops[trace.storages[one.storage].op or 0]) for one in trace.engines]
    return tuple(
        PlannedWorkspace(
            origin_word(op, trace) + (f" of {op.layer}" if op.layer else ""),
            one.plans[0].engine, one.plans[0].workspace, one.storage in held,
        )
        for one, op in ops
    )  # fmt: skip


def _rests_on(assumption: Assumption) -> str:
    """Return what is said of an assumption whatever the point: its numbers differ from point to point."""
    where = f", at {assumption.where}" if assumption.where else ""
    return f"assumed: {assumption.text.split(':')[0]}{where}"


def of_steps(trace: Trace) -> Trace:
    """Return the trace where what was there while building alone takes nothing: its peak is one of the steps."""
    start = trace.steps[0]
    storages = tuple(
        replace(storage, bytes=0, low=None) if storage.died is not None and storage.died <= start else storage
        for storage in trace.storages
    )
    return replace(trace, storages=storages)
