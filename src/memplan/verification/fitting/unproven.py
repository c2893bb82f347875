"""Fit a model inside a recording, where nothing runs: costs are estimated, and nothing is proven."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from fractions import Fraction

import torch

from memplan import _torch
from memplan.errors import BudgetError, MemplanError
from memplan.planning.capture.flat_call import Call, call_of
from memplan.planning.capture.loss_module import WithLoss, differentiable
from memplan.planning.plan.plan import Plan
from memplan.planning.planner import Planner
from memplan.planning.request import Request
from memplan.planning.study import Planned
from memplan.rewriting.install import Installed, install
from memplan.rewriting.update_early import update_early
from memplan.simulation.simulate import simulate
from memplan.trace.record import record_for
from memplan.trace.recording.session import Running, Target, recording_suspended
from memplan.trace.spec import like
from memplan.trace.structure import take_apart
from memplan.verification.fitting.fitted import Fitted, optimizer_note
from memplan.verification.fitting.plan_cache import Plans, Reused
from memplan.verification.measurement.state_copies import attributes_restored
from memplan.verification.proof.proof import Proof, nothing_compared

COSTS = "roofline"
"""Source of the seconds of ops: estimates, since recordings measure nothing and must not vary between runs."""


def plan_recorded(request_of: Callable[[], Request], recording: Running, undo: ExitStack) -> Fitted:
    """Plan a model that a recorded program fits, so that the recording shows its calls as planned.

    Plans for a CUDA card and for fused kernels are made but not installed, since a recording does not run their
    kernels. The recording notes that. ``request_of()`` checks the user's arguments and returns the request; ``undo``
    receives the callbacks that uninstall the plan. Raises BudgetError, RecordingError and UsageError as `memplan.fit`.
    """
    with recording_suspended():
        request = request_of()
        request = replace(request, call=_with_assumed_values(request.call))
        with attributes_restored(request.step), request.under_autocast():
            planner = Planner(request.step)
            request = planner.bounded(request, key=0)
            planned, fits = _plan_step(planner, request)
    name, proof = type(request.model).__name__, _empty_proof(planned.plan, request)
    loss, notes = None if request.step is request.model else request.step, [*request.notes]
    obstacle = _obstacle(request, recording)
    if fits or obstacle is not None:
        if obstacle is not None and not fits:
            recording.notes[f"{name} is shown as it runs without memplan.fit: {obstacle}"] = None
        return Fitted(request.model, loss, planned.plan, proof, changed=False, optimizer=None, notes=notes, _undo=undo)
    recording.notes[
        f"{name} runs as memplan.fit plans it, by estimated seconds and without its proof: with measured ones the "
        "plan can differ"
    ] = None
    settings = request.settings
    # later plans, those of the model's own calls too, have the precision of this one, whose optimizer is in use
    settings = replace(settings, precision=planned.plan.precision)
    plans = Plans(request.step, settings, request.bytes, lambda text: None)
    plans.expect(planned)
    installed = _install_in_recording(request.step, plans, undo)
    with (
        attributes_restored(request.step),
        request.under_autocast(),
    ):  # the program may change the model before it calls
        installed.prepare(request.call, settings.gradients.accumulates)
    calls = [installed.calls]
    if request.step is not request.model:
        settings_with_loss = replace(settings, plan=None, loss_bytes_ratio=_loss_bytes_ratio(request))
        plans_of_model = Plans(request.model, settings_with_loss, request.bytes, lambda text: None, joint=planned)
        calls.append(_install_in_recording(request.model, plans_of_model, undo).calls)
    optimizer = None
    early, counted = settings.gradients.updates_early, settings.counted_optimizer
    if counted is not None and (early or counted is not settings.optimizer):
        optimizer = counted(list(request.step.parameters()))
        if counted is not settings.optimizer:
            notes.append(optimizer_note(optimizer))
        if early:
            undo.callback(update_early(optimizer).undo)
    return Fitted(
        request.model, loss, planned.plan, proof, changed=True, optimizer=optimizer, notes=notes, _undo=undo,
        _calls=calls,
    )  # fmt: skip


def _loss_bytes_ratio(request: Request) -> Fraction:
    """Return the temporary bytes of the loss for each byte of the gradients of the model's outputs.

    These are the peak bytes of its forward and backward, as recorded, in addition to the outputs and their gradients.
    Outside of recordings they are measured (own_call.py).
    """
    step = request.step
    assert isinstance(step, WithLoss)
    args, kwargs = request.call.rebuild(request.call.tensors)
    inputs = len(args) - step.targets
    targets = call_of(args[inputs:], {})
    with recording_suspended(), attributes_restored(step), request.under_autocast():
        with torch.no_grad():
            outputs, structure = take_apart(step.model(*args[:inputs], **kwargs))
        used_by_loss = {id(output) for output in differentiable(structure.rebuild(outputs))}
        gradient_bytes = sum(o.nbytes for o in outputs if id(o) in used_by_loss and o.is_floating_point())

        def build() -> Callable[[], None]:
            """Return forward and backward of the loss, on new copies of the outputs and targets."""
            leaves = [like(output).requires_grad_(output.is_floating_point()) for output in outputs]
            copied_targets, _ = targets.rebuild(map(like, targets.tensors))

            def run() -> None:
                step.loss(structure.rebuild([leaf.clone() for leaf in leaves]), *copied_targets).backward()

            return run

        try:
            trace = record_for(build, Target("cpu"), steps=1)
        except MemplanError:  # for example a loss with weights, which belong to the outer recording
            return Fraction(0)
    if not gradient_bytes:
        return Fraction(0)
    target_bytes = sum(tensor.nbytes for tensor in targets.tensors)
    output_bytes = sum(output.nbytes for output in outputs)
    # `run` holds the outputs twice: the leaves and their clones
    temporaries = simulate(trace).peak_allocated - target_bytes - 2 * output_bytes - 2 * gradient_bytes
    return Fraction(max(0, temporaries), gradient_bytes)


def _empty_proof(plan: Plan, request: Request) -> Proof:
    """Return the proof of a step that did not run: nothing is compared, and the peak is the plan's."""
    return replace(
        nothing_compared(), early=request.settings.gradients.updates_early, resident=sum(plan.resident.values()),
        peak=plan.peak, reference_peak=plan.eager_peak, predicted=plan.peak, budget=request.bytes,
        torch=torch.__version__,
    )  # fmt: skip


def _plan_step(planner: Planner, request: Request) -> tuple[Planned, bool]:
    """Return a plan, and whether the step fits without it. If so, the plan may exceed the budget."""
    settings = request.settings
    may_stay_unplanned = settings.plan is None and not settings.gradients.updates_early and settings.engine == "graph"
    if not may_stay_unplanned:
        return planner.planned(request.call, settings, request.bytes, key=0), False
    study = planner.study(request.call, settings, key=0)
    fits = study.eager_peak(settings) <= request.bytes
    try:
        return planner.planned(request.call, settings, request.bytes, key=0), fits
    except BudgetError as error:
        if not fits:
            raise
        return study.planned(settings, error.smallest_budget), True


def _obstacle(request: Request, recording: Running) -> str | None:
    """Return why a recording cannot show the plan, or None if it can."""
    if recording.target.card is not None:  # measurements run with the card's own tensors
        return f"a plan for {recording.target.name} is made on that card, with its kernels"
    if request.settings.engine == "inductor":
        return "a recording runs no fused kernels"
    return None


def _install_in_recording(step: torch.nn.Module, plans: Plans, undo: ExitStack) -> Installed:
    """Make calls of a module run as planned within a recording, on fake tensors. ``undo`` uninstalls the plans."""
    plans.handed_over = True

    def plan_call(call: Call, accumulate: bool, _: ExitStack = undo) -> Planned | Reused:  # keeps `undo` alive
        """The planner: the plan of a call, without the guards that need the values of its tensors."""
        with recording_suspended():
            planned = plans(_with_assumed_values(call), accumulate)
        if not any(isinstance(tensor, _torch.FakeTensor) for tensor in call.tensors):
            return planned
        # Guards and conditions read values, which fake tensors lack: the recording assumes a branch by itself.
        return replace(planned, captured=replace(planned.captured, conditions=(), guards=()))

    installed = install(step, plan_call)
    undo.callback(installed.undo)
    return installed


def _with_assumed_values(call: Call) -> Call:
    """Replace fake integer and bool tensors of a call by real ones, since a capture branches on their values.

    The values are those that a recording assumes: the known constant, else ones.
    """

    def real(tensor: torch.Tensor) -> torch.Tensor:
        """Return the assumed values of a fake integer or bool tensor; other tensors unchanged."""
        floating = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        if floating or not isinstance(tensor, _torch.FakeTensor):
            return tensor
        return torch.ones(tensor.shape, dtype=tensor.dtype) if tensor.constant is None else tensor.constant

    return replace(call, tensors=tuple(map(real, call.tensors)))
