"""Run a planned step beside the unplanned one: all of it where there is memory for both, else for fewer samples."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch

from memplan import _torch
from memplan._bytes import format_bytes
from memplan.errors import MemplanError, UsageError
from memplan.planning.capture.flat_call import Call
from memplan.planning.cost.eager_baseline import baseline
from memplan.planning.plan.plan import Grade, Plan
from memplan.planning.request import Request
from memplan.planning.study import Planned
from memplan.rewriting.install import Planner, install
from memplan.verification.fitting.plan_cache import Plans
from memplan.verification.measurement import card_kernels, free_memory
from memplan.verification.measurement.peak_alone import measured_alone
from memplan.verification.measurement.peak_and_time import storage_bytes
from memplan.verification.measurement.state_copies import attributes_kept, random_state_kept
from memplan.verification.measurement.trial import Trial, Work
from memplan.verification.proof.proof import Cut, Proof
from memplan.verification.proof.rounding import EXACT, LOSSY, ROUNDING
from memplan.verification.proof.verify import Sides, compare, with_times

_log = logging.getLogger("memplan")
_STEPS = 3


class Prover:
    """Prove plans for one request.

    Args:
        asked: the request.
        pairs: how many times both sides are timed.
    """

    def __init__(self, asked: Request, pairs: int) -> None:
        self._asked, self._step, self._settings, self._pairs = asked, asked.step, asked.settings, pairs
        self._home = asked.settings.home

    def unplanned(self, plan: Plan) -> Proof:
        """Run the step without a plan beside itself, and measure whether it keeps the budget. ``plan``: any of it."""
        return self._proof(plan, None, lambda: None)

    def proof(self, planned: Planned, put_in_place: Callable[[], None]) -> Proof:
        """Run the planned step beside the unplanned one.

        Args:
            planned: the plan.
            put_in_place: makes calls of the step run as planned; called once, after the reference was made.

        Raises:
            UsageError: there is not enough memory, and the step cannot be proven for fewer samples.
        """
        return self._proof(planned.plan, planned, put_in_place)

    def peak(self, predicted: int, planned: Planned | None) -> int | None:
        """Measure the peak of the step alone, as it runs now; None where there is not enough memory.

        Args:
            predicted: the predicted peak, in bytes.
            planned: the plan that is in place, if any.
        """
        return self._measured(planned)[1] if self._has_room(predicted, free_memory.available(self._home)) else None

    def _proof(self, plan: Plan, planned: Planned | None, put_in_place: Callable[[], None]) -> Proof:
        predicted, budget = plan.eager_peak if planned is None else plan.peak, self._asked.bytes
        part, call, cut, measured = self._part(plan), self._asked.call, None, True
        if part is None and self._home.card is None:
            sides = self._sides(call, plan.grade)  # made before the plan is in place: they run without
            put_in_place()
            return self._beside(sides, call, planned, predicted, budget)
        if part is None:  # side by side both share what the allocator holds: each is measured alone
            _, before = self._measured(None)
            with self._same_kernels():
                sides = self._sides(call, plan.grade)
                put_in_place()
                proof = self._beside(sides, call, planned)
            del sides
        else:
            smaller, cut = part
            before, proof = plan.eager_peak, self._for_fewer(smaller, planned, plan.grade)
            put_in_place()
            measured = proof.same and self._has_room(predicted, cut.available)
            cut = replace(cut, measured=measured)
        resident, peak = self._measured(planned) if measured else (sum(plan.resident.values()), predicted)
        return replace(
            proof, resident=resident, peak=peak, reference_peak=before, predicted=predicted, budget=budget, cut=cut
        )

    def _for_fewer(self, call: Call, planned: Planned | None, grade: Grade) -> Proof:
        with self._same_kernels(), ExitStack() as undo:
            sides = self._sides(call, grade)
            if planned is not None:
                undo.callback(install(self._step, self._planner_of(call, planned)).undo)
            return self._beside(sides, call, planned)

    def _sides(self, call: Call, grade: Grade) -> Sides:
        """Return the step without a plan; where bits may differ, also in float64, and what says which errors are
        allowed."""
        reference = self._trial("reference", call)
        if grade == "lossy":
            yardstick = self._trial("autocast", call, autocast=self._asked.autocast or torch.bfloat16)
        elif self._settings.engine == "graph":
            return Sides(reference)
        else:
            yardstick = self._trial("torch.compile", call, instead=_torch.compiled_as_eager(self._step))
        return Sides(reference, self._trial("float64", call, wide=True), yardstick)

    def _beside(
        self,
        sides: Sides,
        call: Call,
        planned: Planned | None,
        predicted: int | None = None,
        budget: int | None = None,
    ) -> Proof:
        if planned is None:
            candidate = self._trial("candidate", call)
            proof = compare(sides, candidate, _STEPS - 1, predicted=predicted, budget=budget)
            return proof if proof.same or self._home.card is None else self._on_a_card(call, sides, candidate, None)
        _log.info("running the planned step beside the unplanned one")
        self._warm_up(call, in_backward=self._settings.gradients.updates)
        candidate = self._trial("candidate", call, in_backward=self._settings.gradients.updates)
        candidate.beside = self._constants(planned)
        lossy, exact = planned.plan.grade == "lossy", sides.truth is None
        tolerance, steps = (EXACT, _STEPS) if exact else (LOSSY if lossy else ROUNDING, _STEPS - 1)
        proof = compare(sides, candidate, steps, tolerance, predicted=predicted, budget=budget)
        if not (proof.same or lossy or self._home.card is None):
            proof = self._on_a_card(call, sides, candidate, planned)
        if not (proof.ok and self._pairs):
            return proof
        _log.info("timing the step with the plan and without")
        return with_times(proof, sides.reference, candidate, self._pairs)

    def _on_a_card(self, call: Call, sides: Sides, candidate: Trial, planned: Planned | None) -> Proof:
        """Prove on a card where bits are not those of the step as it is.

        A plan has torch's own norms and recurrent layers in place of cuDNN's: where the step has them, too, the bits
        are the same. Where kernels add in whatever order threads come, or are fused, errors are measured from float64,
        and those of the step run again are accepted. TF32 is off then: in a deep net its errors can be as large as
        the gradients (`card_kernels.float32_in_full`), and hide others.
        """
        with _torch.without_call(self._step):  # the plan is in place, and these sides are of the step without it
            begin = self._trial("begin", call)
            if sides.truth is None:
                own = _torch.capturable_kernels if planned is not None else nullcontext
                again = self._trial("the step run again", call, kernels=own)
                sides = Sides(sides.reference, self._trial("float64", call, wide=True), again)
        if sides.yardstick is not None and planned is not None and self._settings.engine == "graph":
            candidate.restart_as(begin)
            proof = compare(Sides(sides.yardstick), candidate, _STEPS)
            if proof.same:
                return replace(proof, torch_kernels=True)
        for side in filter(None, (sides.reference, sides.truth, sides.yardstick, candidate)):
            side.restart_as(begin)
        with card_kernels.float32_in_full():
            proof = compare(sides, candidate, _STEPS - 1, ROUNDING)
        return replace(proof, full_float32=True)

    def _measured(self, planned: Planned | None) -> tuple[int, int]:
        """Measure the resident bytes and the peak of the step alone, as it runs now."""
        in_backward, updates = (
            planned is not None and self._settings.gradients.updates,
            self._settings.optimizer is not None,
        )
        self._warm_up(self._asked.call, in_backward=in_backward, updates=updates)
        _log.info("measuring the peak")
        trial = self._trial("alone", self._asked.call, in_backward=in_backward, updates=updates)
        trial.beside = 0 if planned is None else self._constants(planned)
        return measured_alone(trial, self._home)

    def _same_kernels(self) -> AbstractContextManager[None]:
        return nullcontext() if self._home.card is None else card_kernels.same_kernels_each_time()

    def _constants(self, planned: Planned) -> int:
        return storage_bytes(planned.captured.constants.values(), self._home.type)

    def _warm_up(self, call: Call, *, in_backward: bool, updates: bool = True) -> None:
        """Plan the calls that have no plan yet: planning is not to be measured."""
        with random_state_kept():
            first = self._trial("first", call, in_backward=in_backward, updates=updates)
            first.prepare()
            first.gradients_of_step()

    def _trial(
        self, name: str, call: Call, *, in_backward: bool = False, updates: bool = True, wide: bool = False,
        instead: Callable[..., Any] | None = None, autocast: torch.dtype | None = None,
        kernels: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Trial:  # fmt: skip
        args, kwargs = call.rebuild(call.tensors)
        work = Work(
            args, kwargs, optimizer=self._settings.optimizer, autocast=autocast or self._asked.autocast,
            micro_batches=2 if self._settings.gradients.adds else 1,
        )  # fmt: skip
        return Trial(
            name, instead or self._step, self._step, work,
            in_backward=in_backward, updates=updates, wide=wide, kernels=kernels,
        )  # fmt: skip

    # -- memory

    def _part(self, plan: Plan) -> tuple[Call, Cut] | None:
        """Return the call for fewer samples that is compared where there is too little memory for all of them."""
        free, beside = free_memory.available(self._home), self._other_side(plan)
        needed = plan.eager_peak + beside
        if self._settings.engine != "graph" or plan.grade == "lossy":
            needed = 2 * plan.eager_peak + 4 * beside  # float64, while the other sides wait
        if free is None or needed <= free:
            return None
        for samples, of, call in free_memory.smaller(self._asked.call):
            try:
                with attributes_kept(self._step), self._asked.under_autocast():
                    _, timeline = baseline(
                        self._step, call, self._settings.optimizer, held=self._settings.gradients.adds, home=self._home
                    )
            except MemplanError:  # it cannot be called with fewer
                break
            if timeline.steps[-1].peak_reserved + beside <= free:
                return call, Cut(samples, of, needed, free, measured=False)
        raise UsageError(
            f"The proof runs the unplanned step beside the planned one, which takes {format_bytes(needed)}, and "
            f"{format_bytes(free)} are available",
            expected="that much memory, or inputs that can be cut along their first dimension, to prove fewer samples",
            do="Free memory, or plan without a proof: memplan.plan, and torch.compile with the backend 'memplan'",
        )

    def _other_side(self, plan: Plan) -> int:
        """Return the bytes of a side that waits while another runs, and of an optimizer that is not the user's."""
        trained = storage_bytes((one for one in self._step.parameters() if one.requires_grad), self._home.type)
        momentum = 0 if self._settings.optimizer is not None else 2 * trained
        return sum(plan.resident.values()) + trained + momentum

    def _has_room(self, peak: int, free: int | None) -> bool:
        """Return whether the step can run alone. Without updates it runs on the user's parameters."""
        there = 0 if self._settings.optimizer is not None else storage_bytes(self._step.parameters(), self._home.type)
        return free is None or peak - there <= free

    def _planner_of(self, call: Call, planned: Planned) -> Planner:
        """Plan the step for fewer samples: by the decisions for the whole, where they can be reused."""
        settings = replace(self._settings, plan=None, precision=planned.plan.precision)
        plans = Plans(self._step, settings, planned.plan.peak, lambda _: None)
        plans.made.append(planned)
        with attributes_kept(self._step), self._asked.under_autocast():
            found = plans(call, settings.gradients.adds)
            if isinstance(found, Planned):  # a new plan: in this budget it keeps everything
                plans = Plans(self._step, settings, _as_tight(planned.plan, found.plan), lambda _: None)
                found = plans(call, settings.gradients.adds)
        return lambda later, held: found if held == settings.gradients.adds else plans(later, held)


def _as_tight(plan: Plan, other: Plan) -> int:
    """Return the budget of another plan that is as far above its floor as this one's."""
    share = (plan.peak - plan.floor) / max(1, plan.eager_peak - plan.floor)
    return other.floor + max(0, int(share * (other.eager_peak - other.floor)))
