"""Fit a step in a byte budget: plan it, put the plan in the place of the module's call, prove it, return the result."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from memplan._bytes import format_bytes
from memplan._display import Displayed
from memplan._interrupts import deferred
from memplan.dry.card import CARD
from memplan.errors import BudgetError, RecordingError, UsageError, VerificationError
from memplan.planning.graph.precision import EXACT
from memplan.planning.levers.lever import GradientUse
from memplan.planning.plan.plan import Plan
from memplan.planning.planner import Planner
from memplan.planning.request import Request, request
from memplan.planning.search.search import Heuristics
from memplan.planning.settings import Allow, Engine, PlanOptions
from memplan.planning.study import Planned
from memplan.rewriting.calls import Calls, CallStats, together
from memplan.rewriting.compiled import compiled
from memplan.rewriting.install import install
from memplan.rewriting.update_early import update_early
from memplan.trace.naming.step_parts import Loss, Optimizer
from memplan.trace.recording.place import exception_of_user
from memplan.trace.recording.session import Running, alone, called, collector_held, running_recording
from memplan.trace.step import StepOptions
from memplan.verification.fitting.own_call import plan_own_call
from memplan.verification.fitting.plan_cache import Plans, say
from memplan.verification.fitting.prover import Prover
from memplan.verification.fitting.unproven import COSTS, no_proof, put_in_place
from memplan.verification.measurement.state_copies import attributes_kept, on_its_own
from memplan.verification.proof.proof import Proof

_ATTEMPTS = 4
"""Number of plans, each for a smaller budget, whose measured peak may be over the budget."""

_HOW_NEAR = {"exact": "bit for bit", "reordered": "but for rounding", "lossy": "as near as plain autocast comes to it"}


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
) -> Fitted:
    """Make a training step run within a budget of bytes, with the same result bit for bit.

    The planned step runs beside the unplanned one, on copies of the model's state; results are compared, the peak is
    measured. Only then do the model's calls run as planned. Nothing is trained; gradients and random state stay.

    Args:
        model, inputs, kwargs, targets, loss, autocast: as for `memplan.explain`; an autocast around the call works too.
        budget: bounds everything on the device at any moment of the step: bytes, a size ("6 GiB"), a card's name, or of
            the step without a plan "70%" or "-2 GiB". On a CUDA card it bounds what torch's allocator reserves.
        optimizer: a name ("adamw") or a callable of the parameters: its state and update become part of the step.
        device: a card whose kernels' seconds are predicted, instead of the seconds on this machine.
        allow: ``"exact"``: the same bits, except for the engine's rounding; ``"lossy"``: see `plan`.
        engine: ``"graph"``, torch's kernels in planned order; ``"inductor"``, fused kernels, which a C++ compiler (for
            a card, Triton) makes first: faster, and the same except for rounding, which is checked against float64.
        early: update each parameter in the backward pass, as soon as its gradient is complete, and free the gradient.
        accumulate: micro-batches between two updates; with more than one, gradients are held when a step begins.
        clip_norm: the global norm that gradients are clipped at, if they are: then no update can be early.
        plan, heuristics: a plan made before for this model and these inputs; switches of the search otherwise.
        pairs: how many times the step is timed, with and without the plan.

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
    options = PlanOptions(
        budget=budget, device=device, allow=allow, engine=engine, gradients=GradientUse(updates=early),
        accumulate=accumulate, clip_norm=clip_norm, plan=plan, heuristics=heuristics or Heuristics(),
        costs=None if running is None else COSTS,
    )  # fmt: skip
    step = StepOptions(inputs, kwargs, targets, loss, optimizer, autocast)
    if running is not None:
        return _recorded(lambda: request(model, step, options, fake=True), running)
    return _fitted(lambda: request(model, step, options, fake=False), pairs)


def _fitted(request_of: Callable[[], Request], pairs: int) -> Fitted:
    """Fit; an exception that the user's own code raised comes out as it is, also where that ran to be traced.

    Whatever is raised, Ctrl-C while the result is handed back, too: nothing stays in place that nobody holds.
    """
    placed = list[_Fitting]()
    try:
        with called("memplan.fit", profiles=True), alone():
            placed.append(_Fitting(request_of(), pairs))
            fitted = placed[0].run()
            placed[0].forget()
            return fitted
    except BaseException as error:
        for one in placed:
            one.undo.close()
        own = exception_of_user(error) if isinstance(error, RecordingError) else None
        if own is None:
            raise
    raise own  # here it keeps its own context


def _recorded(request_of: Callable[[], Request], running: Running) -> Fitted:
    """Fit within a recording, which runs nothing: planned, and not proven."""
    undo = ExitStack()
    try:
        asked, found = put_in_place(request_of, running, undo)
    except BaseException:
        undo.close()
        raise
    loss = None if asked.step is asked.model else asked.step
    proof = no_proof(found.plan, asked)
    return Fitted(asked.model, loss, found.plan, proof, found.changed, found.optimizer, found.notes, undo, found.calls)


def _check_provable() -> None:
    if CARD in os.environ:
        raise UsageError(
            "fit on an emulated card, whose kernels compute nothing that could be compared",
            expected="a machine that the step really runs on",
            do="Plan without a proof: memplan.plan, or torch.compile with the backend 'memplan'",
        )


@dataclass(repr=False)
class Fitted(Displayed):
    """A model whose step runs within a budget."""

    model: nn.Module
    """The user's model; its calls run as planned."""
    loss: nn.Module | None
    """``(*inputs, *targets) -> loss``: model and loss as one planned graph, where a loss was given. Plan and proof are
    then about this call, not about the model's own."""
    plan: Plan
    proof: Proof
    changed: bool
    """False where the step fits unplanned: then nothing was changed."""
    optimizer: Any = None
    """The live optimizer where updates are early, to read and set its learning rate and state; its ``step()`` has
    nothing left to do."""
    notes: list[str] = field(default_factory=list)
    """Notes for the user; later calls that are planned anew add theirs."""
    _undo: ExitStack = field(default_factory=ExitStack, repr=False)
    _calls: list[Calls] = field(default_factory=list, repr=False)

    @property
    def stats(self) -> CallStats:
        """Counts of the calls since `fit`, of the model and of ``loss``: as planned, unplanned and why, without grad.
        Where the step fits unplanned nothing is counted."""
        return together(one.stats() for one in self._calls)

    def undo(self) -> None:
        """Make the model run as before. An ordinary update finds its gradients again."""
        with deferred():
            self._undo.close()
        self.changed = False

    def __copy__(self) -> Fitted:
        return replace(self)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a pickle or a deep copy has: its model runs unplanned, as copies of planned models do."""
        state = dict(vars(self), _undo=ExitStack(), _calls=[])
        if self.changed:
            again = (
                "a copy of a fitted model runs unplanned: memplan.fit(..., plan=fitted.plan) fits it without a search"
            )
            state |= {"changed": False, "notes": [*self.notes, again]}
        return state

    def __str__(self) -> str:
        if self.changed:
            head = f"{type(self.model).__name__} runs as planned"
        else:
            head = f"{type(self.model).__name__} runs unplanned: nothing is changed"
        return "\n".join([head, str(self.plan), str(self.proof), *(f"note: {note}" for note in self.notes)])


class _Fitting:
    """One call of `fit`."""

    def __init__(self, asked: Request, pairs: int) -> None:
        self.settings, self.planner = asked.settings, Planner(asked.step)
        self.asked = asked
        with on_its_own(asked.step, draws=False), self._tracing():
            self.asked = self.planner.bounded(asked, key=0)
        self.budget, self.notes = self.asked.bytes, list(self.asked.notes)
        self.prover = Prover(self.asked, pairs)
        self.undo = ExitStack()
        """Takes away what is in place."""
        self.handed_over = False
        self.relaid = False
        """Whether the last plan convolves in channels last, and the step itself does not."""
        self.lost = EXACT
        """Precision that the last plan really lost, of what it was allowed to lose."""
        if not asked.step.training:
            self.notes.append("planned in evaluation mode, as the model is: call model.train() first to train it")

    def run(self) -> Fitted:
        """Change nothing where the step fits; else plan until the measured peak keeps the budget.

        A relaxation whose proof fails (channels last, a lower precision) is left out of the next plan.
        """
        with on_its_own(self.asked.step, draws=self._draws()):
            return self._run()

    def _draws(self) -> bool:
        """Whether the step may draw random numbers."""
        with self._tracing():
            captured = self.planner.study(self.asked.call, self.settings, key=0).captured
        return bool(captured.opaque) or any(op.random for op in captured.graph.ops)

    def forget(self) -> None:
        """Drop the call's tensors and what was measured with them: what is in place still tells its notes here."""
        del self.asked, self.planner, self.prover

    def _run(self) -> Fitted:
        unchanged = self._unplanned()
        if unchanged is not None:
            return unchanged
        asked, failed = self.settings, None
        while True:
            try:
                return self._until_it_fits()
            except (BudgetError, RecordingError) as error:  # without the relaxation there is no plan
                if failed is None or (isinstance(error, BudgetError) and not self.settings.relaid):
                    raise  # that a layout of our choice rounds too much is nothing that the user asked about
                raise failed from None
            except VerificationError as error:
                lost = self.settings.settled
                if self.relaid and asked.plan is None:  # other kernels round otherwise, and some steps amplify that
                    tried, self.settings = "convolving in channels last", replace(self.settings, relaid=False)
                elif lost.lossy and asked.undecided:
                    without = *self.settings.without, lost, self.lost
                    tried, self.settings = str(self.lost), replace(asked, without=without)
                else:
                    raise
                failed = error
                self.notes.append(f"{tried} was tried and not taken: {error.found}")

    def _until_it_fits(self) -> Fitted:
        """Plan, and where the measured peak is over the budget, plan again for less."""
        budget, lowest = self.budget, None
        for left in reversed(range(_ATTEMPTS)):
            planned = self._planned(budget)
            self.relaid, self.lost = planned.captured.relaid, planned.plan.lost
            fitted = self._tried(planned, budget)
            if fitted.proof.within_budget:
                self.handed_over = True
                return fitted
            fitted.undo()
            lowest = fitted.proof if lowest is None or fitted.proof.peak < lowest.peak else lowest
            peak = planned.plan.peak
            floor = planned.plan.floor if self.settings.engine == "graph" else 0  # fused: only the smallest tried
            if self.settings.plan is not None or peak <= floor or not left:
                break
            self.notes.append(
                f"a plan for {format_bytes(budget)} was measured at {format_bytes(fitted.proof.peak)}: "
                "planned again for as much less"
            )
            over = fitted.proof.peak - self.budget
            budget = floor if left == 1 and floor else max(min(budget, peak) - over, floor)
        assert lowest is not None
        raise self._over(lowest)

    def _unplanned(self) -> Fitted | None:
        """Return the answer where the step fits without a plan, predicted and measured; None where it does not."""
        if not self._may_stay_unplanned:
            return None
        with self._tracing():
            study = self.planner.study(self.asked.call, self.settings, key=0)
            if study.eager_peak(self.settings) > self.budget:
                return None
            try:
                plan = study.planned(self.settings, self.budget).plan
            except BudgetError as error:  # the step takes less without a plan than with any
                plan = study.planned(self.settings, error.smallest_budget).plan
        proof = self.prover.unplanned(plan)
        if not proof.within_budget:
            return None
        self.notes.append("it fits already: nothing is changed")
        loss = None if self.asked.step is self.asked.model else self.asked.step
        return Fitted(self.asked.model, loss, plan, proof, False, None, self.notes)

    @property
    def _may_stay_unplanned(self) -> bool:
        """Whether nothing but the budget calls for a change: no plan, early updates or fused kernels were asked for."""
        return self.settings.plan is None and not self.settings.gradients.updates and self.settings.engine == "graph"

    @contextmanager
    def _tracing(self) -> Iterator[None]:
        with attributes_kept(self.asked.step), self.asked.under_autocast(), collector_held():
            yield

    def _planned(self, budget: int) -> Planned:
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
                planned = self.planner.planned(self.asked.call, self.settings, budget, key=0)
        except BudgetError as error:
            raise self._too_little(error, budget) from None
        if self.settings.undecided:  # plans after this one, for later calls too, lose what this one does
            self.settings = replace(self.settings, precision=planned.plan.precision)
        return planned

    def _too_little(self, error: BudgetError, budget: int) -> BudgetError:
        """Return the error with the measured peak of the smallest plan, or of the step without one if that is less.

        ``budget``: the one planned for; it is less than the user's once a plan was measured above that.
        """
        found, asked = error.found, format_bytes(self.budget)
        if budget != self.budget:
            found = f"The budget is {asked}; a plan for it was measured above it, and for {budget} bytes there is none"
        floor, ways = error.smallest_budget, "".join(f"; or {way}" for way in error.lower_by)
        self.settings = replace(self.settings, precision=error.precision or self.settings.precision)
        with self._tracing():
            planned = self.planner.planned(self.asked.call, self.settings, floor, key=0)
            eager = self.planner.study(self.asked.call, self.settings, key=0).eager_peak(self.settings)
        with ExitStack() as undo:
            self._put_in_place(planned, floor, undo)
            measured = max(floor, self.prover.peak(floor, planned) or 0)
        least, expected = floor, error.expected
        if measured > floor:
            least = _with_spare(measured, floor)
            expected = f"{expected}. That plan was measured at {format_bytes(measured)}"
        if eager < least and self._may_stay_unplanned:
            eager = max(eager, self.prover.peak(eager, None) or 0)
            if eager < least:
                least, expected = eager, f"at least {format_bytes(eager)}, which the step takes without a plan"
        do = f"Give {format_bytes(least)} ({least} bytes){ways}"
        return error.but(found=found, expected=expected, do=do, smallest_budget=least)

    def _over(self, lowest: Proof) -> BudgetError:
        least = _with_spare(lowest.peak, lowest.predicted)
        return BudgetError(
            f"The budget is {format_bytes(self.budget)}, and the planned step was measured above it",
            expected=f"at least {format_bytes(lowest.peak)}, at which it ran",
            do=f"Give {format_bytes(least)} ({least} bytes), or look for what the plan does not know: a kernel that "
            "allocates more than its results",
            smallest_budget=least,
        )

    def _tried(self, planned: Planned, budget: int) -> Fitted:
        """Put the plan in place and prove it. On any error the module is as before."""
        undo = self.undo = ExitStack()
        try:
            proof = self.prover.proof(planned, lambda: self._put_in_place(planned, budget, undo))
            if not proof.same:
                raise self._differs(proof)
            return self._handed_over(planned, proof, budget, undo)
        except BaseException:
            undo.close()
            raise

    def _put_in_place(self, planned: Planned, budget: int, undo: ExitStack) -> None:
        if planned.fused is not None:
            compiled(planned.fused)  # raises an error of which a call would only warn
        plans = self.plans = Plans(self.asked.step, self.settings, budget, self._told)
        plans.expect(planned)
        self.installed = install(self.asked.step, plans)
        undo.callback(self.installed.undo)

    def _handed_over(self, planned: Planned, proof: Proof, budget: int, undo: ExitStack) -> Fitted:
        asked, settings = self.asked, self.settings
        loss = optimizer = None
        installed = [self.installed]
        if asked.step is not asked.model:
            loss = asked.step
            if proof.within_budget:
                own, note = plan_own_call(asked, settings, planned, self._told, undo)
                installed.append(own)
                self.notes += [] if note is None else [note]
        if settings.gradients.updates and settings.optimizer is not None and proof.within_budget:
            optimizer = settings.optimizer(list(asked.step.parameters()))
            undo.callback(update_early(optimizer).undo)
        self.plans.theirs = True
        self.plans.release()
        for one in installed:  # calls of the proof do not count, and ran with copies of the weights
            one.calls.restart()
            one.release()
        calls = [one.calls for one in installed]
        return Fitted(asked.model, loss, planned.plan, proof, True, optimizer, self.notes, undo, calls)

    def _differs(self, proof: Proof) -> VerificationError:
        return VerificationError(
            f"The planned step is {str(proof).splitlines()[0]}",
            expected=f"the step without a plan, {_HOW_NEAR[proof.grade]}",
            do="The model is as before. Please report this; a step that differs from run to run cannot be proven",
            proof=proof,
        )

    def _told(self, text: str) -> None:
        if self.handed_over:  # before that, calls are planned for the proof
            self.notes.append(text)
            say(text)


def _with_spare(measured: int, predicted: int | None) -> int:
    """Return a budget that a plan will keep, after one was measured above its predicted peak. Costs are measured anew
    next time: then another plan of the same peak, which calls other kernels, can be the fastest."""
    return measured + max(0, measured - (measured if predicted is None else predicted))
