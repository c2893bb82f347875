"""Plan a model for a recording, in which nothing can run: no costs are measured, and nothing is proven."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch

from memplan import _torch
from memplan.errors import BudgetError, MemplanError
from memplan.planning.capture.flat_call import Call, call_of
from memplan.planning.capture.loss_module import WithLoss, differentiable
from memplan.planning.plan.plan import Plan
from memplan.planning.planner import Planner
from memplan.planning.request import Request
from memplan.planning.study import Planned
from memplan.rewriting.calls import Calls
from memplan.rewriting.install import Installed, install
from memplan.rewriting.update_early import update_early
from memplan.simulation.simulate import simulate
from memplan.trace.record import record_for
from memplan.trace.recording.session import Running, Target, recording_suspended
from memplan.trace.spec import like
from memplan.trace.structure import take_apart
from memplan.verification.fitting.plan_cache import Plans, Reused
from memplan.verification.measurement.state_copies import attributes_kept
from memplan.verification.proof.proof import Proof, nothing_compared

COSTS = "roofline"
"""Estimates of seconds: a recording is the same every time, and measures nothing."""


@dataclass(frozen=True)
class Unproven:
    """A plan that is in place in a recording."""

    plan: Plan
    changed: bool
    optimizer: Any
    calls: list[Calls]
    notes: list[str]


def put_in_place(request_of: Callable[[], Request], running: Running, undo: ExitStack) -> tuple[Request, Unproven]:
    """Plan a model that a recorded program fits, and let its calls run as planned in the recording.

    On a card, and for fused kernels, the plan is made and not put in place: its kernels are not those of a recording.
    The recording says so.

    Args:
        request_of: makes the request.
        running: the recording.
        undo: takes what undoes it.

    Raises:
        BudgetError, RecordingError, UsageError: as `memplan.fit`.
    """
    with recording_suspended():
        asked = request_of()
        asked = replace(asked, call=with_values(asked.call))
        with attributes_kept(asked.step), asked.under_autocast():
            planner = Planner(asked.step)
            asked = planner.bounded(asked, key=0)
            found, fits = _planned(planner, asked)
    name = type(asked.model).__name__
    notes = [*asked.notes]
    skipped = _not_recorded(asked, running)
    if fits or skipped is not None:
        if skipped is not None and not fits:
            running.notes[f"{name} is shown as it runs without memplan.fit: {skipped}"] = None
        return asked, Unproven(found.plan, False, None, [], notes)
    running.notes[
        f"{name} runs as memplan.fit plans it, by estimated seconds and without its proof: with measured ones the "
        "plan can differ"
    ] = None
    settings = replace(asked.settings, precision=found.plan.precision) if asked.settings.undecided else asked.settings
    plans = Plans(asked.step, settings, asked.bytes, lambda text: None)
    plans.expect(found)
    placed = _installed(asked.step, plans, undo)
    with attributes_kept(asked.step), asked.under_autocast():
        placed.prepare(asked.call, settings.gradients.adds)  # now, as by a proof: the program may change the model
    calls = [placed.calls]
    if asked.step is not asked.model:
        outside = replace(settings, plan=None, outside=_outside(asked))
        plans_of_model = Plans(asked.model, outside, asked.bytes, lambda text: None, joint=found)
        calls.append(_installed(asked.model, plans_of_model, undo).calls)
    optimizer = None
    if settings.gradients.updates and settings.optimizer is not None:
        optimizer = settings.optimizer(list(asked.step.parameters()))
        undo.callback(update_early(optimizer).undo)
    return asked, Unproven(found.plan, True, optimizer, calls, notes)


def _outside(asked: Request) -> Fraction:
    """Return what the loss by itself holds at its peak, beside the outputs and their gradients, for each byte of these:
    recorded, where a fit measures it."""
    step = asked.step
    assert isinstance(step, WithLoss)
    args, kwargs = asked.call.rebuild(asked.call.tensors)
    cut = len(args) - step.targets
    targets = call_of(args[cut:], {})
    with recording_suspended(), attributes_kept(step), asked.under_autocast():
        with torch.no_grad():
            outputs, structure = take_apart(step.model(*args[:cut], **kwargs))
        read = {id(one) for one in differentiable(structure.rebuild(outputs))}
        size = sum(one.numel() * one.element_size() for one in outputs if id(one) in read and one.is_floating_point())

        def build() -> Callable[[], None]:
            leaves = [like(one).requires_grad_(one.is_floating_point()) for one in outputs]
            theirs, _ = targets.rebuild(map(like, targets.tensors))

            def run() -> None:
                step.loss(structure.rebuild([leaf.clone() for leaf in leaves]), *theirs).backward()

            return run

        try:
            trace = record_for(build, Target("cpu"), steps=1)
        except MemplanError:  # such as a loss with weights: they are of the recording that runs
            return Fraction(0)
    there = sum(one.numel() * one.element_size() for one in (*outputs, *targets.tensors))
    peak = simulate(trace).peak_allocated - there
    clones = sum(one.numel() * one.element_size() for one in outputs)
    return Fraction(max(0, peak - clones - 2 * size), size) if size else Fraction(0)


def no_proof(plan: Plan, asked: Request) -> Proof:
    """Return the proof of a step that did not run: it compares nothing, and its peak is the plan's."""
    return replace(
        nothing_compared(), early=asked.settings.gradients.updates, resident=sum(plan.resident.values()),
        peak=plan.peak, reference_peak=plan.eager_peak, predicted=plan.peak, budget=asked.bytes,
        torch=torch.__version__,
    )  # fmt: skip


def _planned(planner: Planner, asked: Request) -> tuple[Planned, bool]:
    """Return the plan, and whether the step fits without it."""
    settings = asked.settings
    may_stay = settings.plan is None and not settings.gradients.updates and settings.engine == "graph"
    if not may_stay:
        return planner.planned(asked.call, settings, asked.bytes, key=0), False
    study = planner.study(asked.call, settings, key=0)
    fits = study.eager_peak(settings) <= asked.bytes
    try:
        return planner.planned(asked.call, settings, asked.bytes, key=0), fits
    except BudgetError as error:
        if not fits:
            raise
        return study.planned(settings, error.smallest_budget), True


def _not_recorded(asked: Request, running: Running) -> str | None:
    """Return why a recording cannot show a plan; None where it can."""
    if running.target.card is not None:  # else a measurement, which has the card's own tensors
        return f"a plan for {running.target.name} is made on that card, with its kernels"
    if asked.settings.engine == "inductor":
        return "a recording runs no fused kernels"
    return None


def _installed(step: torch.nn.Module, plans: Plans, undo: ExitStack) -> Installed:
    plans.theirs = True

    def planned(call: Call, held: bool, _: ExitStack = undo) -> Planned | Reused:  # undone when nothing holds it
        with recording_suspended():
            found = plans(with_values(call), held)
        if not any(isinstance(one, _torch.FakeTensor) for one in call.tensors):
            return found
        # which branch values take is the recording's own assumption, and guards read values that it does not have
        return replace(found, captured=replace(found.captured, conditions=(), guards=()))

    installed = install(step, planned)
    undo.callback(installed.undo)
    return installed


def with_values(call: Call) -> Call:
    """Return a call with values for the small tensors of integers that a recording has none of: ones, as it reads them.
    A capture takes its branches by them."""
    return replace(call, tensors=tuple(map(_with_values, call.tensors)))


def _with_values(tensor: torch.Tensor) -> torch.Tensor:
    whole = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
    if not whole or not isinstance(tensor, _torch.FakeTensor):
        return tensor
    if tensor.constant is not None:
        return tensor.constant
    return torch.ones(tensor.shape, dtype=tensor.dtype)
