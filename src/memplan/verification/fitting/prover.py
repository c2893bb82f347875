"""Prove a planned step against the unplanned one: with all samples if memory suffices, else with fewer."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from memplan import _torch
from memplan._bytes import format_bytes
from memplan.errors import MemplanError, UsageError
from memplan.planning.capture.flat_call import Call
from memplan.planning.cost.eager_baseline import baseline
from memplan.planning.cost.optimizer_memory import Optimizer
from memplan.planning.levers.eight_bit_moments import EightBitMoments
from memplan.planning.plan.plan import Grade, Plan
from memplan.planning.request import Request
from memplan.planning.study import Planned
from memplan.rewriting.install import Planner, Runnable, install
from memplan.verification.fitting.plan_cache import Plans
from memplan.verification.measurement import card_kernels, free_memory
from memplan.verification.measurement.peak_alone import measure_trial
from memplan.verification.measurement.peak_and_time import storage_bytes
from memplan.verification.measurement.state_copies import attributes_restored, random_state_restored
from memplan.verification.measurement.trial import Trial, Work
from memplan.verification.proof.float64_convolutions import float64_convolutions
from memplan.verification.proof.float64_plan import has_numbers_of_float32, in_float64
from memplan.verification.proof.moments import moments_error
from memplan.verification.proof.near_kinks import NearKinks
from memplan.verification.proof.proof import Cut, Proof
from memplan.verification.proof.rounding import EXACT, LOSSY, NEAR_KINKS, ROUNDING
from memplan.verification.proof.verify import Baselines, InFloat64, compare, with_times

_log = logging.getLogger("memplan")
_STEPS = 3
"""Number of steps in which a plan is compared bit for bit."""
_FEWER_STEPS = _STEPS - 1
"""Number of steps where that takes longer (each is run in float64 and by the yardstick, too) or proves less (the
unplanned step is compared with itself)."""


@dataclass(frozen=True)
class _Memory:
    """Predicted bytes of a call's trials."""

    eager: int
    """Of the step without a plan, while it runs."""
    planned: int
    """Of the step as it is to be proven, at most, while it runs."""
    idle: int
    """Of a trial that waits while another runs."""
    copies: int = 1
    """Number of copies of weights, gradients and state beside a running step: one of another trial, two where moments
    in 8 bits are compared."""
    recorded: int = 0
    """Of copies of the gradients that the early updates of the planned step free."""

    @property
    def peak(self) -> int:
        """Bytes while the step runs: planned or not, whichever takes more; the planned with copies of its gradients."""
        return max(self.eager, self.planned + self.recorded)

    @property
    def beside(self) -> int:
        """Bytes of the step with these copies beside it."""
        return self.peak + self.copies * self.idle

    @property
    def beside_float64(self) -> int:
        """Bytes of the step in float64, while the other trials wait."""
        return 2 * self.peak + 5 * self.idle


class _NoRoomError(UsageError):
    """There is not enough memory for a proof, or for a comparison of it."""

    def __init__(self, needed: int, free: int) -> None:
        self.needed = needed
        super().__init__(
            f"The proof runs the unplanned step beside the planned one, which takes {format_bytes(needed)}, and "
            f"{format_bytes(free)} are available",
            expected="that much memory, or inputs that can be cut along their first dimension, to prove fewer samples",
            do="Free memory, or plan without a proof: memplan.plan, and torch.compile with the backend 'memplan'",
        )


class Prover:
    """Prove plans for a request. Both steps are timed ``pairs`` times."""

    def __init__(self, request: Request, pairs: int) -> None:
        self._request, self._step, self._settings, self._pairs = request, request.step, request.settings, pairs
        self._home = request.settings.home
        self._narrow = set[torch.dtype]()
        """Floating-point dtypes other than float64 that were seen in the unplanned step in float64, on the CPU."""

    def unplanned(self, plan: Plan) -> Proof:
        """Compare the unplanned step with itself, and measure whether it keeps the budget.

        ``plan``: any plan of the step, which predicts bytes.
        """
        return self._prove(plan, planned=None, install_plan=lambda: lambda: None)

    def proof(self, planned: Planned, install_plan: Callable[[], Callable[[], None]]) -> Proof:
        """Compare the planned step with the unplanned one. ``install_plan`` makes calls of the step run as planned, and
        returns what undoes it; it is called after the reference was built, and a second time where fewer samples have
        to be compared after all.

        Raises:
            UsageError: there is not enough memory, and the step cannot be proven for fewer samples.
        """
        return self._prove(planned.plan, planned, install_plan)

    def peak(self, predicted: int, planned: Planned | None) -> int | None:
        """Measure the peak bytes of the step by itself, as it runs now; None if there is not enough memory."""
        return self._measure(planned)[1] if self._has_room(predicted, free_memory.available(self._home)) else None

    def _prove(self, plan: Plan, planned: Planned | None, install_plan: Callable[[], Callable[[], None]]) -> Proof:
        """Compare the planned step with the unplanned one, and measure its peak.

        If memory does not suffice for both, fewer samples are compared, and the peak is measured with all of them if
        there is room. ``plan`` is any plan of the step, which predicts bytes; ``planned`` the one to prove, None if the
        step stays unplanned.
        """
        predicted, budget = plan.eager_peak if planned is None else plan.peak, self._request.bytes
        recorded = self._trained_bytes() if planned is not None and self._settings.gradients.updates_early else 0
        memory = _Memory(
            plan.eager_peak, predicted, self._idle_bytes(plan), copies=2 if _has_moments(planned) else 1,
            recorded=recorded,
        )  # fmt: skip
        smaller, call, cut, measured = self._smaller_call(plan, memory), self._request.call, None, True
        if smaller is None and self._home.card is None:
            baselines = self._baselines(call, _grade(plan))  # built before the plan is installed: they run unplanned
            install_plan()
            if not _has_moments(planned):
                return self._compare(baselines, call, planned, memory, predicted, budget)
            proof = self._compare(baselines, call, planned, memory)
            del baselines
            resident, peak = self._measure(planned)  # by the plan's optimizer: the comparison has the user's
            proof = replace(proof, resident=resident, peak=peak, predicted=predicted, budget=budget)
            return self._with_moments(proof, call, planned, memory)
        proof, reference_peak = None, plan.eager_peak
        if smaller is None:  # on a card both would share the allocator's cache: each peak is measured separately
            _, measured_peak = self._measure(planned=None)
            proof = self._compare_whole(plan, planned, install_plan, memory)
            if isinstance(proof, _NoRoomError):
                gc.collect()  # trials of that comparison
                smaller, proof = self._smaller_call(plan, memory, proof.needed), None
            else:
                reference_peak = measured_peak
        if proof is None:
            assert smaller is not None
            call, cut, memory = smaller
            with self._deterministic_kernels(), ExitStack() as undo:
                baselines = self._baselines(call, _grade(plan))
                smaller_plan = None
                if planned is not None:
                    planner = self._planner_of(call, planned)
                    smaller_plan = planner(call, self._settings.gradients.accumulates)
                    undo.callback(install(self._step, planner).undo)
                proof = self._compare(baselines, call, planned, memory, smaller_plan=smaller_plan)
            del baselines
            install_plan()
            measured = proof.same and self._has_room(predicted, cut.available)
            cut = replace(cut, measured=measured)
        resident, peak = self._measure(planned) if measured else (sum(plan.resident.values()), predicted)
        proof = replace(
            proof, resident=resident, peak=peak, reference_peak=reference_peak, predicted=predicted, budget=budget,
            cut=cut,
        )  # fmt: skip
        return self._with_moments(proof, call, planned, memory)

    def _compare_whole(
        self, plan: Plan, planned: Planned | None, install_plan: Callable[[], Callable[[], None]], memory: _Memory
    ) -> Proof | _NoRoomError:
        """Compare all samples on a card, with the plan installed.

        If bits differ, and there is no memory for the runs that show whether they may, the plan is uninstalled and the
        error returned. The arguments are those of `_prove`, and ``memory`` is what the call takes.
        """
        with self._deterministic_kernels():
            baselines = self._baselines(self._request.call, _grade(plan))
            uninstall = install_plan()
            try:
                return self._compare(baselines, self._request.call, planned, memory)
            except _NoRoomError as error:
                uninstall()
                return error.with_traceback(None)  # which would keep the trials alive

    def _baselines(self, call: Call, grade: Grade) -> Baselines:
        """Return the unplanned step; where bits may differ, also in float64, and a yardstick for allowed errors."""
        reference = self._trial("reference", call)
        if grade == "lossy":
            yardstick = self._trial("autocast", call, autocast=self._request.autocast or torch.bfloat16)
        elif self._settings.engine == "graph":
            if grade == "exact":
                return Baselines(reference)
            yardstick = self._trial("the step with decisions near kinks flipped", call, kernels=NearKinks)
        else:
            yardstick = self._trial("torch.compile", call, function=_torch.compiled_as_eager(self._step))
        kernels = nullcontext if self._home.card is not None else partial(float64_convolutions, self._narrow)
        return Baselines(reference, self._trial("float64", call, float64=True, kernels=kernels), yardstick)

    def _planned_in_float64(self, call: Call, planned: Runnable) -> InFloat64 | None:
        """Return the planned step in float64; None where its ops are not those of the planned step: on a card and with
        fused kernels, which are others in float64, and in lower precision."""
        if self._home.card is not None or self._settings.engine != "graph":
            return None
        try:
            function = in_float64(self._step, planned)
        except Exception:  # as in `compare`, whatever it is: then float32 decides
            _log.info("the planned step cannot be built in float64", exc_info=True)
            return None
        if function is None:
            return None
        candidate = self._trial(
            "planned, in float64", call, float64=True, function=function, kernels=float64_convolutions
        )
        return InFloat64(candidate, self._narrow, has_numbers_of_float32(planned))

    def _compare(
        self, baselines: Baselines, call: Call, planned: Planned | None, memory: _Memory, predicted: int | None = None,
        budget: int | None = None, smaller_plan: Runnable | None = None,
    ) -> Proof:  # fmt: skip
        """Run baselines and candidate and compare them by the plan's grade; a proof that is ok gets times, too.

        Both update by the user's optimizer, with which the results of a plan are as near as without moments in 8 bits;
        what these change is compared by `_with_moments`. They are part of the times.

        ``memory``: what the call takes. ``predicted``, ``budget``: bytes, for the proof; None if the peak is measured
        separately. ``smaller_plan``: the plan of the call, if that has fewer samples than the planned step.
        """
        if planned is None:
            candidate = self._trial("candidate", call)
            proof = compare(baselines, candidate, _FEWER_STEPS, predicted=predicted, budget=budget)
            if proof.same or self._home.card is None:
                return proof
            return self._compare_on_card(call, baselines, candidate, planned=None, memory=memory)
        _log.info("running the planned step beside the unplanned one")
        self._warm_up(call, in_backward=self._settings.gradients.updates_early)
        candidate = self._trial("candidate", call, in_backward=self._settings.gradients.updates_early)
        candidate.other_resident = self._constant_bytes(planned)
        is_lossy, planned_in_float64 = _grade(planned.plan) == "lossy", None
        if baselines.truth is None:
            tolerance, steps = EXACT, _STEPS
        elif is_lossy:
            tolerance, steps = LOSSY, _FEWER_STEPS
        else:
            tolerance, steps = NEAR_KINKS if self._settings.engine == "graph" else ROUNDING, _FEWER_STEPS
            if baselines.reference.work.micro_batches == 1:  # else the first one has a plan of its own
                planned_in_float64 = self._planned_in_float64(call, smaller_plan or planned)
        proof = compare(
            baselines, candidate, steps, tolerance, predicted=predicted, budget=budget, in_float64=planned_in_float64
        )  # fmt: skip
        if not (proof.same or is_lossy or self._home.card is None):
            proof = self._compare_on_card(call, baselines, candidate, planned, memory)
        if not (proof.ok and self._pairs):
            return proof
        _log.info("timing the step with the plan and without")
        if _has_moments(planned):
            del candidate  # its memory
            candidate = self._trial(
                "candidate", call, in_backward=self._settings.gradients.updates_early,
                optimizer=self._counted_optimizer(planned),
            )  # fmt: skip
            candidate.seconds()  # the first update compiles
        return with_times(proof, baselines.reference, candidate, self._pairs)

    def _compare_on_card(
        self, call: Call, baselines: Baselines, candidate: Trial, planned: Planned | None, memory: _Memory
    ) -> Proof:
        """Prove on a CUDA card where the bits are not those of the unplanned step.

        Plans run torch's own norms and recurrent layers instead of cuDNN's, so the step is first compared with these
        kernels bit for bit. Fused kernels, and those whose order of additions depends on threads, are judged by their
        errors from float64: a second run of the step says which errors are allowed. That is done with TF32 off, since
        its errors can hide others (`card_kernels.full_float32`).

        Raises:
            _NoRoomError: the card has not the memory for it.
        """
        with _torch.without_call(self._step):  # these trials run unplanned, and the plan is installed
            if baselines.truth is None:
                self._check_room(memory.peak + memory.idle)
                kernels = _torch.capturable_kernels if planned is not None else nullcontext
                baselines = replace(baselines, yardstick=self._trial("the step run again", call, kernels=kernels))
        if baselines.yardstick is not None and planned is not None and self._settings.engine == "graph":
            candidate.restart()
            proof = compare(Baselines(baselines.yardstick), candidate, _STEPS)
            if proof.same:
                return replace(proof, torch_kernels=True)
        with _torch.without_call(self._step):
            if baselines.truth is None:
                self._check_room(2 * memory.peak + 2 * memory.idle)
                baselines = replace(baselines, truth=self._trial("float64", call, float64=True))
        for trial in filter(None, (baselines.reference, baselines.truth, baselines.yardstick, candidate)):
            trial.restart()
        with card_kernels.full_float32():
            proof = compare(baselines, candidate, _FEWER_STEPS, ROUNDING)
        return replace(proof, full_float32=True)

    def _with_moments(self, proof: Proof, call: Call, planned: Planned | None, memory: _Memory) -> Proof:
        """Return a proof that is ok with the error of moments in 8 bits, if the plan has these: they are compared with
        the optimizer's own over updates of the unplanned step. The trials of the proof are free by then.

        Raises:
            _NoRoomError: there is no memory for the step with two more copies of weights, gradients and state.
        """
        if planned is None or not _has_moments(planned) or not proof.ok:
            return proof
        _log.info("comparing moments in 8 bits with the optimizer's own")
        gc.collect()  # the trials
        self._check_room(memory.beside)
        optimizer = self._counted_optimizer(planned)
        assert optimizer is not None, "only an optimizer has moments"
        with _torch.without_call(self._step):
            return replace(proof, moments=moments_error(self._trial("moments", call), optimizer))

    def _counted_optimizer(self, planned: Planned | None) -> Optimizer | None:
        """Return the optimizer of a planned step, which may have moments in 8 bits; None for planned: the user's."""
        if planned is None:
            return self._settings.optimizer
        return replace(self._settings, precision=planned.plan.precision).counted_optimizer

    def _measure(self, planned: Planned | None) -> tuple[int, int]:
        """Measure (resident bytes, peak bytes) of the step as it runs now. ``planned``: the installed plan."""
        in_backward = planned is not None and self._settings.gradients.updates_early
        updates = self._settings.optimizer is not None
        self._warm_up(self._request.call, in_backward=in_backward, updates=updates)
        _log.info("measuring the peak")
        trial = self._trial(
            "alone", self._request.call, in_backward=in_backward, updates=updates,
            optimizer=self._counted_optimizer(planned),
        )  # fmt: skip
        trial.other_resident = 0 if planned is None else self._constant_bytes(planned)
        return measure_trial(trial, self._home)

    def _deterministic_kernels(self) -> AbstractContextManager[None]:
        """Return a context in which cuDNN is deterministic, if the step runs on a card."""
        return nullcontext() if self._home.card is None else card_kernels.deterministic_cudnn()

    def _constant_bytes(self, planned: Planned) -> int:
        """Return the bytes of the constants of a plan's graph on the step's device."""
        return storage_bytes(planned.captured.constants.values(), self._home.type)

    def _warm_up(self, call: Call, *, in_backward: bool, updates: bool = True) -> None:
        """Run forward and backward once, so that calls without a plan are planned before anything is measured, and what
        a first run alone allocates is there: 64 KiB in CLIP."""
        with random_state_restored():
            trial = self._trial("first", call, in_backward=in_backward, updates=updates)
            trial.prepare()
            trial.gradients_of_step()

    def _trial(
        self, name: str, call: Call, *, in_backward: bool = False, updates: bool = True, float64: bool = False,
        function: Callable[..., Any] | None = None, autocast: torch.dtype | None = None,
        optimizer: Optimizer | None = None, kernels: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> Trial:  # fmt: skip
        """Return a trial of the step; `Trial` copies the parameters and buffers. Arguments are as for `Trial`, and
        ``function``, ``autocast`` and ``optimizer`` are by default those of the request."""
        args, kwargs = call.rebuild(call.tensors)
        work = Work(
            args, kwargs, optimizer=optimizer or self._settings.optimizer, autocast=autocast or self._request.autocast,
            # the second backward pass begins with the gradients of the first, as the plan assumes
            micro_batches=2 if self._settings.gradients.accumulates else 1,
        )  # fmt: skip
        return Trial(
            name, call=function or self._step, module=self._step, work=work,
            in_backward=in_backward, updates=updates, float64=float64, kernels=kernels,
        )  # fmt: skip

    # -- memory

    def _smaller_call(self, plan: Plan, whole: _Memory, needed: int | None = None) -> tuple[Call, Cut, _Memory] | None:
        """Return a call with fewer samples to prove instead of the whole call, its description, and the memory that it
        takes; None if free memory suffices for the whole call.

        On a card it is the largest for which there is room for all comparisons: bits that differ are held against the
        step in float64. Where there is room for none, it is the smallest for which there is room for the first one.
        ``whole`` is what the whole call takes; ``needed`` the bytes where it is known that they do not suffice for it.
        Raises UsageError if no smaller call fits."""
        free, rounds = free_memory.available(self._home), self._settings.engine != "graph" or _grade(plan) != "exact"
        needed_for_all = whole.beside_float64 if rounds else whole.beside
        if free is None or (needed is None and needed_for_all <= free):
            return None
        needed = needed or needed_for_all
        last: tuple[Call, Cut, _Memory] | None = None
        for samples, total, call in free_memory.smaller_calls(self._request.call):
            try:
                with attributes_restored(self._step), self._request.under_autocast():
                    _, timeline = baseline(
                        self._step,
                        call,
                        self._settings.optimizer,
                        gradients_exist=self._settings.gradients.accumulates,
                        home=self._home,
                    )
            except MemplanError:  # the model does not accept fewer samples
                break
            eager = timeline.steps[-1].peak_reserved
            # by the same choices it takes less than all samples do, by their inputs at least
            planned = min(whole.planned - (_bytes(self._request.call) - _bytes(call)), eager)
            memory = replace(whole, eager=eager, planned=planned)
            if memory.beside <= free:
                last = call, Cut(samples, total, needed, free, measured=False), memory
                may_need_float64 = rounds or self._home.card is not None
                if memory.beside_float64 <= free or not may_need_float64:
                    return last
        if last is None:
            raise _NoRoomError(needed, free)
        return last

    def _check_room(self, needed: int) -> None:
        """Raise _NoRoomError if there are not so many bytes free."""
        free = free_memory.available(self._home)
        if free is not None and needed > free:
            raise _NoRoomError(needed, free)

    def _idle_bytes(self, plan: Plan) -> int:
        """Return the bytes that a trial keeps allocated while another runs: parameters, buffers, inputs, gradients and
        the state of the user's optimizer."""
        trained = self._trained_bytes()
        of_default_optimizer = 0 if self._settings.optimizer is not None else 2 * trained
        saved = sum(decision.bytes for decision in plan.decisions if decision.lever == EightBitMoments.name)
        return sum(plan.resident.values()) + saved + trained + of_default_optimizer

    def _trained_bytes(self) -> int:
        """Return the bytes of the parameters that are trained, which are those of their gradients."""
        return storage_bytes((p for p in self._step.parameters() if p.requires_grad), self._home.type)

    def _has_room(self, peak: int, free: int | None) -> bool:
        """Return whether a step with this peak fits in ``free`` bytes; None: unknown, so True."""
        # A trial without updates uses the memory of the module's own parameters.
        shared = 0 if self._settings.optimizer is not None else storage_bytes(self._step.parameters(), self._home.type)
        return free is None or peak - shared <= free

    def _planner_of(self, call: Call, planned: Planned) -> Planner:
        """Return a planner for calls with fewer samples that reuses the choices for all samples where it can. ``call``:
        the first such call, which is planned here; ``planned``: the plan for all samples."""
        settings = replace(self._settings, plan=None, precision=planned.plan.precision)
        plans = Plans(self._step, settings, planned.plan.peak, lambda _: None)
        plans.plans.append(planned)
        with attributes_restored(self._step), self._request.under_autocast():
            first = plans(call, settings.gradients.accumulates)
            if isinstance(first, Planned):  # planned anew, in a budget that is too large to make it recompute
                plans = Plans(self._step, settings, _equivalent_budget(planned.plan, first.plan), lambda _: None)
                first = plans(call, settings.gradients.accumulates)
        return lambda later, accumulate: (
            first if accumulate == settings.gradients.accumulates else plans(later, accumulate)
        )


def _has_moments(planned: Planned | None) -> bool:
    """Return whether a plan has moments in 8 bits."""
    return planned is not None and bool(planned.plan.precision.moments)


def _bytes(call: Call) -> int:
    """Return the bytes of the tensors of a call."""
    return sum(tensor.nbytes for tensor in call.tensors)


def _grade(plan: Plan) -> Grade:
    """Return how close the result of a plan is with the user's optimizer: its grade without moments in 8 bits."""
    return replace(plan, precision=replace(plan.precision, moments="")).grade


def _equivalent_budget(plan: Plan, other: Plan) -> int:
    """Return the budget between floor and eager peak of ``other`` at the same share as the peak of ``plan``."""
    share = (plan.peak - plan.floor) / max(1, plan.eager_peak - plan.floor)
    return other.floor + max(0, int(share * (other.eager_peak - other.floor)))
