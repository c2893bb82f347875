"""Fit a step in a byte budget: plan it, install the plan in the module, prove it, and return the result."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Literal, overload

import torch

from memplan._bytes import format_bytes
from memplan.dry.card import CARD
from memplan.errors import BudgetError, MemplanError, RecordingError, UsageError, VerificationError
from memplan.planning.graph.precision import EXACT
from memplan.planning.levers.lever import GradientUse
from memplan.planning.plan.budget_error import with_smallest_budget
from memplan.planning.plan.plan import Plan
from memplan.planning.planner import Planner
from memplan.planning.request import Request, request
from memplan.planning.search.search import Heuristics
from memplan.planning.settings import Allow, Engine, PlanOptions
from memplan.planning.study import Planned
from memplan.rewriting.compiled import compile_parts
from memplan.rewriting.install import install
from memplan.rewriting.update_early import update_early
from memplan.trace.naming.step_parts import Loss, Optimizer
from memplan.trace.recording.place import exception_of_user
from memplan.trace.recording.session import Running, alone, called, collector_held, running_recording
from memplan.trace.step import StepOptions
from memplan.verification.fitting.fitted import Fitted, optimizer_note
from memplan.verification.fitting.inference import FittedInference, fit_inference
from memplan.verification.fitting.own_call import plan_own_call
from memplan.verification.fitting.plan_cache import Plans, warn
from memplan.verification.fitting.prover import Prover
from memplan.verification.fitting.sharded import fit_sharded, is_sharded
from memplan.verification.fitting.unproven import COSTS, plan_recorded
from memplan.verification.measurement.state_copies import (
    ModuleCopy,
    attributes_restored,
    copy_tensors,
    isolated,
)
from memplan.verification.proof.proof import Proof

_ATTEMPTS = 4
"""Number of plans to try, each for a smaller budget, until a measured peak keeps the budget."""

_REQUIRED_AGREEMENT = {
    "exact": "bit for bit",
    "reordered": "but for rounding",
    "lossy": "as near as plain autocast comes to it",
}


@overload
def fit(model: Any, *inputs: Any, budget: Any, train: Literal[False]) -> FittedInference: ...
@overload
def fit(
    model: Any, *inputs: Any, kwargs: Mapping[str, Any] = {}, targets: Any = (), loss: Loss | None = None,
    budget: Any = None, optimizer: Optimizer | None = None, autocast: torch.dtype | str | None = None,
    device: str | torch.device | None = None, allow: Allow = "exact", engine: Engine = "graph", early: bool = False,
    accumulate: int = 1, clip_norm: float | None = None, plan: Plan | None = None,
    heuristics: Heuristics | None = None, pairs: int = 3, train: Literal[True] = True,
) -> Fitted: ...  # fmt: skip
def fit(
    model: Any,
    *inputs: Any,
    kwargs: Mapping[str, Any] = {},  # read only
    targets: Any = (),
    loss: Loss | None = None,
    budget: Any = None,
    optimizer: Optimizer | None = None,
    autocast: torch.dtype | str | None = None,
    device: str | torch.device | None = None,
    allow: Allow = "exact",
    engine: Engine = "graph",
    early: bool = False,
    accumulate: int = 1,
    clip_norm: float | None = None,
    plan: Plan | None = None,
    heuristics: Heuristics | None = None,
    pairs: int = 3,
    train: bool = True,
) -> Any:
    """Make a training step run within a budget of bytes, with the same result bit for bit.

    The planned step runs beside the unplanned one, on copies of the model's state; results are compared, the peak is
    measured. Only then do the model's calls run as planned. Nothing is trained; gradients and random state stay.

    Args:
        model, inputs, kwargs, targets, loss, autocast: as for `memplan.explain`; an autocast around the call works too.
        budget: bounds everything on the device at any moment of the step: bytes, a size ("6 GiB"), a card's name, or of
            the step without a plan "70%" or "-2 GiB". On a CUDA card it bounds what torch's allocator reserves.
        optimizer: a name ("adamw") or a callable of the parameters: its state and update become part of the step.
        device: a card whose kernels' seconds are predicted, instead of the seconds on this machine.
        allow: ``"exact"``: the same bits, except for the engine's rounding; ``"reordered"``, ``"lossy"``: see `plan`.
        engine: ``"graph"``, torch's kernels in planned order; ``"inductor"``, fused kernels, which a C++ compiler (for
            a card, Triton) makes first: faster, and the same except for rounding, which is checked against float64.
        early: update each parameter in the backward pass, as soon as its gradient is complete, and free the gradient.
        accumulate: micro-batches between two updates; with more than one, gradients are held when a step begins.
        clip_norm: the global norm that gradients are clipped at, if they are: then no update can be early.
        plan, heuristics: a plan made before for this model and these inputs; switches of the search otherwise.
        pairs: how many times the step is timed, with and without the plan; runs of the proof of a second or more count.
        train: False for inference of a model in evaluation mode: it runs on parts of its input along space, with the
            border that each needs, to the same result but for rounding. Only ``budget`` is used of the other options.

    Returns:
        ``fitted.model`` is the model, its calls planned. Where the step fits unplanned, ``fitted.changed`` is False.

    Raises:
        BudgetError: no plan fits; its ``smallest_budget`` is the smallest one for which a plan was found.
        VerificationError: the planned step does not give the same results.
        UsageError, RecordingError: an argument is wrong, or the step cannot be captured; the model's own, as it is.

    Example:
        >>> memplan.fit(model, images, targets=labels, loss=F.cross_entropy, budget="1.5 MiB").proof.ok
        True
    """
    running = running_recording()
    if running is None:
        _check_provable()
    if not train:
        with called("memplan.fit", profiles=True), alone():
            return fit_inference(model, inputs, kwargs, budget)
    options = PlanOptions(
        budget=budget, device=device, allow=allow, engine=engine, gradients=GradientUse(updates_early=early),
        accumulate=accumulate, clip_norm=clip_norm, plan=plan, heuristics=heuristics or Heuristics(),
        costs=None if running is None else COSTS,
    )  # fmt: skip
    step = StepOptions(inputs, kwargs, targets, loss, optimizer, autocast)
    if running is not None:
        return _fit_in_recording(lambda: request(model, step, options, fake=True), running)
    if is_sharded(model):
        with called("memplan.fit", profiles=True), alone():
            return fit_sharded(request(model, step, options, fake=False), options)
    return _fit(lambda: request(model, step, options, fake=False), pairs)


def _fit(request_of: Callable[[], Request], pairs: int) -> Fitted:
    """Fit the step of a request. On any exception, Ctrl-C during the return included, the model is as before.

    An exception of the user's own code that interrupted tracing is raised in place of memplan's, and so is one that the
    step raises without memplan, too. ``request_of()`` checks the user's arguments and returns the request. The step is
    timed ``pairs`` times, with and without the plan.
    """
    request: Request | None = None
    fitting: _Fitting | None = None
    try:
        with called("memplan.fit", profiles=True), alone():
            request = request_of()
            fitting = _Fitting(request, pairs)
            fitted = fitting.run()
            fitting.release()
            return fitted
    except BaseException as error:
        if fitting is not None:
            fitting.undo.close()
        if not isinstance(error, RecordingError):
            raise
        refusal = error
    # outside of the except block, which would replace the __context__ of the user's exception
    users_error = exception_of_user(refusal)
    if users_error is None and request is not None:
        users_error = _error_without_plan(request, refusal)
    raise users_error or refusal


def _error_without_plan(request: Request, error: RecordingError) -> Exception | None:
    """Return the exception that stopped a trace if the step raises it without memplan, too, such as a loss for targets
    of another shape; None if the step runs, or fails for another reason.

    The step runs forward once on copies of inputs and buffers.
    """
    cause = error.__cause__
    if not isinstance(cause, Exception) or isinstance(cause, MemplanError):
        return None
    try:
        copy = ModuleCopy(request.step, shared=True)
        args, kwargs = request.call.rebuild(copy_tensors(request.call.tensors))
        with isolated(request.step), request.under_autocast(), copy.in_place(), torch.enable_grad():
            request.step(*args, **kwargs)
    except Exception as of_step:
        if type(of_step) is type(cause) and str(of_step) == str(cause):
            return of_step
    return None


def _fit_in_recording(request_of: Callable[[], Request], running: Running) -> Fitted:
    """Fit within a recording: the step is planned, but not proven, as nothing runs. ``request_of`` builds the request,
    and ``running`` is the recording."""
    undo = ExitStack()
    try:
        return plan_recorded(request_of, running, undo)
    except BaseException:
        undo.close()
        raise


def _check_provable() -> None:
    """Raise UsageError in a process with an emulated card."""
    if CARD in os.environ:
        raise UsageError(
            "fit on an emulated card, whose kernels compute nothing that could be compared",
            expected="a machine that the step really runs on",
            do="Plan without a proof: memplan.plan, or torch.compile with the backend 'memplan'",
        )


class _Fitting:
    """A call of `fit`."""

    def __init__(self, request: Request, pairs: int) -> None:
        """``pairs``: how many times the step is timed, with and without the plan."""
        self.settings, self.planner = request.settings, Planner(request.step)
        """Settings of the next plan; they change after a proof that fails."""
        self.request = request
        with isolated(request.step, draws=False), self._tracing():
            self.request = self.planner.bounded(request, key=0)  # a relative budget in bytes
        self.budget, self.notes = self.request.bytes, list(self.request.notes)
        """The user's budget in bytes, and notes for the user."""
        self.prover = Prover(self.request, pairs)
        """Runs and compares the planned and the unplanned step."""
        self.undo = ExitStack()
        """Uninstalls the current plan."""
        self.handed_over = False
        """Whether the user has the model: from then on, calls that are planned anew are reported."""
        self.channels_last = False
        """Whether the last plan converts convolutions to channels last."""
        self.lost = EXACT
        """Precision that the last plan lost, which can be less than it was allowed to lose."""
        if not request.step.training:
            self.notes.append("planned in evaluation mode, as the model is: call model.train() first to train it")

    def run(self) -> Fitted:
        """Return the model unchanged if the step fits; else plan until the measured peak keeps the budget.

        A relaxation whose proof fails (channels last, a lower precision) is excluded from the next plan.
        """
        with self._tracing():
            captured = self.planner.study(self.request.call, self.settings, key=0).captured
        draws = bool(captured.opaque_calls) or any(op.random for op in captured.graph.ops)
        with isolated(self.request.step, draws=draws):
            return self._fit()

    def release(self) -> None:
        """Drop the call's tensors and all measurements; the installed plan still adds notes here."""
        del self.request, self.planner, self.prover

    def _fit(self) -> Fitted:
        """Fit, and after each failed proof fit again without the relaxation that it was due to."""
        unplanned = self._fit_unplanned()
        if unplanned is not None:
            return unplanned
        initial, failed_proof = self.settings, None
        while True:
            try:
                return self._plan_until_it_fits()
            except (BudgetError, RecordingError) as error:  # there is no plan without the relaxation
                if failed_proof is None or (isinstance(error, BudgetError) and not self.settings.channels_last):
                    raise  # the user did not ask for channels last, so its rounding is not worth an error
                raise failed_proof from None
            except VerificationError as error:
                precision = self.settings.fixed_precision
                if self.channels_last and initial.plan is None:  # its kernels round differently
                    relaxation = "convolving in channels last"
                    self.settings = replace(self.settings, channels_last=False)
                elif precision.lossy and initial.chooses_precision:
                    relaxation = str(self.lost)
                    excluded = *self.settings.excluded_precisions, precision, self.lost
                    self.settings = replace(initial, excluded_precisions=excluded)
                else:
                    raise
                failed_proof = error
                self.notes.append(f"{relaxation} was tried and not taken: {error.found}")

    def _plan_until_it_fits(self) -> Fitted:
        """Plan, and while the measured peak is over the budget, plan again for less. Raises BudgetError if each plan
        was measured above the budget, or none is predicted within it."""
        budget, lowest = self.budget, None
        for attempts_left in reversed(range(_ATTEMPTS)):
            planned = self._plan(budget)
            self.channels_last, self.lost = planned.captured.channels_last, planned.plan.lost
            fitted = self._install_and_prove(planned, budget)
            if fitted.proof.within_budget:
                self.handed_over = True
                return fitted
            fitted.undo()
            lowest = fitted.proof if lowest is None or fitted.proof.peak < lowest.peak else lowest
            peak = planned.plan.peak
            floor = planned.plan.floor if self.settings.engine == "graph" else 0  # of fused plans none is known
            if self.settings.plan is not None or peak <= floor or not attempts_left:
                break
            self.notes.append(
                f"a plan for {format_bytes(budget)} was measured at {format_bytes(fitted.proof.peak)}: "
                "planned again for as much less"
            )
            over, is_last = fitted.proof.peak - self.budget, attempts_left == 1
            budget = floor if is_last and floor else max(min(budget, peak) - over, floor)
        assert lowest is not None
        least = _with_spare(lowest.peak, lowest.predicted)
        raise BudgetError(
            f"The budget is {format_bytes(self.budget)}, and the planned step was measured above it",
            expected=f"at least {format_bytes(lowest.peak)}, at which it ran",
            do=f"Give {format_bytes(least)} ({least} bytes), or look for what the plan does not know: a kernel that "
            "allocates more than its results",
            smallest_budget=least,
        )

    def _fit_unplanned(self) -> Fitted | None:
        """Return the result where the step fits without a plan, by prediction and measurement, else None."""
        if not self._may_stay_unplanned:
            return None
        with self._tracing():
            study = self.planner.study(self.request.call, self.settings, key=0)
            if study.eager_peak(self.settings) > self.budget:
                return None
            try:
                plan = study.planned(self.settings, self.budget).plan
            except BudgetError as error:  # every plan takes more than the step without a plan
                plan = study.planned(self.settings, error.smallest_budget).plan
        proof = self.prover.unplanned(plan)
        if not proof.within_budget:
            return None
        self.notes.append("it fits already: nothing is changed")
        loss = None if self.request.step is self.request.model else self.request.step
        return Fitted(self.request.model, loss, plan, proof, changed=False, optimizer=None, notes=self.notes)

    @property
    def _may_stay_unplanned(self) -> bool:
        """Whether the step may run unchanged if it fits: the user passed no plan, early updates or engine."""
        return (
            self.settings.plan is None and not self.settings.gradients.updates_early and self.settings.engine == "graph"
        )

    @contextmanager
    def _tracing(self) -> Iterator[None]:
        """Within this context the step can be traced: under its autocast; its attributes are restored."""
        with attributes_restored(self.request.step), self.request.under_autocast(), collector_held():
            yield

    def _plan(self, budget: int) -> Planned:
        """Plan for a budget in bytes; the precision is fixed from then on."""
        plan = self.settings.plan
        if plan is not None and plan.peak > self.budget:
            raise BudgetError(
                f"The plan needs {format_bytes(plan.peak)}",
                expected=f"one that needs no more than the budget of {format_bytes(self.budget)}",
                do="Give it its budget, or leave the plan out",
                smallest_budget=plan.peak,
            )
        try:
            with self._tracing():
                planned = self.planner.planned(self.request.call, self.settings, budget, key=0)
        except BudgetError as error:
            raise self._with_measured_peak(error, budget) from None
        if self.settings.chooses_precision:  # later plans, those of later calls too, have the same precision
            self.settings = replace(self.settings, precision=planned.plan.precision)
        return planned

    def _with_measured_peak(self, error: BudgetError, budget: int) -> BudgetError:
        """Return an error whose smallest budget is the measured peak of the smallest plan, or of the unplanned step if
        that is less. ``error`` has the predicted peak of the smallest plan; ``budget`` is less than the user's once a
        plan was measured above that."""
        message = error.found
        if budget != self.budget:
            message = (
                f"The budget is {format_bytes(self.budget)}; a plan for it was measured above it, and for {budget} "
                "bytes there is none"
            )
        self.settings = replace(self.settings, precision=error.precision or self.settings.precision)
        with self._tracing():
            error, planned = self._smallest_plan(error)
            floor = error.smallest_budget
            eager = self.planner.study(self.request.call, self.settings, key=0).eager_peak(self.settings)
        with ExitStack() as undo:
            self._install(planned, floor, undo)
            measured = max(floor, self.prover.peak(floor, planned) or 0)  # None: there is no memory to run it
        least, expected = floor, error.expected or f"at least {format_bytes(floor)}"
        if measured > floor:
            least = _with_spare(measured, floor)
            expected = f"{expected}. That plan was measured at {format_bytes(measured)}"
        if eager < least and self._may_stay_unplanned:
            eager = max(eager, self.prover.peak(eager, planned=None) or 0)
            if eager < least:
                least, expected = eager, f"at least {format_bytes(eager)}, which the step takes without a plan"
        return with_smallest_budget(error, message, expected, least)

    def _smallest_plan(self, error: BudgetError) -> tuple[BudgetError, Planned]:
        """Return the plan for the smallest budget of an error, and the error.

        Segments in pieces are chosen by what is above the budget: a search for a smaller budget can reach a peak that a
        search for that peak does not. Then it is the error of the latter, whose smallest budget is larger.
        """
        while True:
            try:
                return error, self.planner.planned(self.request.call, self.settings, error.smallest_budget, key=0)
            except BudgetError as larger:
                if larger.smallest_budget <= error.smallest_budget:
                    raise
                error = larger

    def _install_and_prove(self, planned: Planned, budget: int) -> Fitted:
        """Install the plan and prove it. On any error the module is as before."""
        undo = self.undo = ExitStack()
        try:
            proof = self.prover.proof(planned, lambda: self._install(planned, budget, undo))
            if not proof.same:
                raise VerificationError(
                    f"The planned step is {str(proof).splitlines()[0]}",
                    expected=f"the step without a plan, {_REQUIRED_AGREEMENT[proof.grade]}",
                    do=_advice_on_differences(planned, proof),
                    proof=proof,
                )
            return self._hand_over(planned, self._of_all_micro_batches(planned, proof), undo)
        except BaseException:
            undo.close()
            raise

    def _of_all_micro_batches(self, planned: Planned, proof: Proof) -> Proof:
        """Return the proof of a plan with the predicted peak of all micro-batches. No gradients are held when the first
        begins: it has a plan of its own, which may take more of the budget than ``planned``."""
        highest = max(of_call.plan.peak for of_call in self.plans.plans)
        if highest > planned.plan.peak and proof.within_budget:
            self.notes.append(
                f"the first micro-batch, while no gradients are held, has a plan of its own: predicted peak "
                f"{format_bytes(highest)}"
            )
        return replace(proof, predicted=max(highest, proof.predicted or 0))

    def _install(self, planned: Planned, budget: int, undo: ExitStack) -> Callable[[], None]:
        """Make calls of the step run by a plan; calls of other sizes are planned within ``budget`` bytes. Returns the
        function that uninstalls the plan, which is also a callback of ``undo``."""
        if planned.fused is not None:
            compile_parts(planned.fused)  # compile now: calls only warn of a compile error
        plans = self.plans = Plans(self.request.step, self.settings, budget, self._notify)
        plans.expect(planned)
        self.installed = install(self.request.step, plans)
        return undo.callback(self.installed.undo)

    def _hand_over(self, planned: Planned, proof: Proof, undo: ExitStack) -> Fitted:
        """Return the result for the user after a proof. If a loss was planned with the model, the model's own calls are
        planned, too. For early updates, or moments in 8 bits, the optimizer is built. ``undo`` uninstalls all of it."""
        request, settings = self.request, self.settings
        loss = optimizer = None
        installations = [self.installed]
        if request.step is not request.model:
            loss = request.step
            if proof.within_budget:
                of_model, note = plan_own_call(request, settings, planned, self._notify, undo)
                installations.append(of_model)
                self.notes += [] if note is None else [note]
        early, counted = settings.gradients.updates_early, settings.counted_optimizer
        if counted is not None and (early or counted is not settings.optimizer) and proof.within_budget:
            optimizer = counted(list(request.step.parameters()))
            if counted is not settings.optimizer:
                self.notes.append(optimizer_note(optimizer))
            if early:
                undo.callback(update_early(optimizer).undo)
        self.plans.handed_over = True
        self.plans.release()
        for installed in installations:  # calls of the proof do not count, and ran with copies of the weights
            installed.calls.restart()
            installed.release()
        calls = [installed.calls for installed in installations]
        return Fitted(
            request.model, loss, planned.plan, proof, changed=True, optimizer=optimizer, notes=self.notes, _undo=undo,
            _calls=calls,
        )  # fmt: skip

    def _notify(self, text: str) -> None:
        """Add a note that a call was planned anew, and warn, once the user has the model."""
        if self.handed_over:  # earlier calls are those of the proof
            self.notes.append(text)
            warn(text)


def _advice_on_differences(planned: Planned, proof: Proof) -> str:
    """Return what to do about a proof that failed. A checkpoint's recomputation updates running statistics once more in
    the backward pass; a plan, which calls the function once, does not."""
    reads = planned.captured.reads
    if reads is not None and reads.read_in_backward and any("running_" in failure for failure in proof.failures):
        return (
            "Call the layers without torch.utils.checkpoint, which updates running statistics of batch norms twice in "
            "a step: the plan recomputes what the budget needs, and updates them once. The model is as before"
        )
    return "The model is as before. Please report this; a step that differs from run to run cannot be proven"


def _with_spare(measured: int, predicted: int | None) -> int:
    """Return a budget that the next plan will keep, after a plan was measured above its predicted peak.

    The excess is added twice, since costs are measured anew next time, and a plan with other kernels can be chosen.
    All sizes are bytes; without a prediction nothing is added.
    """
    return measured if predicted is None else measured + max(0, measured - predicted)
