"""Choose the precision of a lossy plan: plan in several precisions, and take the fastest that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from memplan._text import format_seconds
from memplan.devices import Device
from memplan.errors import BudgetError, MemplanError, RecordingError
from memplan.planning.cost.op_timing import step_seconds
from memplan.planning.graph.op_schema import CHUNKED
from memplan.planning.graph.precision import EXACT, Compute, Precision, Save
from memplan.planning.levers import registry
from memplan.planning.levers.chunk_convolutions import CONVOLUTION
from memplan.planning.plan.budget_error import Way, with_way
from memplan.planning.plan.plan import Plan
from memplan.planning.plan.precision_report import slower_blocks
from memplan.planning.schedule.byte_levels import base_level
from memplan.planning.search.search import Search
from memplan.planning.settings import Settings
from memplan.planning.study import Planned, Study

_MUCH = 0.05
"""Share of a step's time that goes into making values again, beyond which keeping them in fewer bits may be faster."""
_FAR = 1.5
"""Ratio to what a budget leaves beside the bytes that are always there, beyond which a step is far from fitting. Fused,
a step has been seen to take 15 % less than its floor op by op."""
WORTH_IT = 0.98
"""A plan that loses more has to take this share of the time of one that loses less, or less than that."""
WORTH_LOSING = 0.9
"""The same beside an exact one: predicted seconds are a few per cent off, and nothing is to be lost for nothing."""


def fastest(
    study: Callable[[Settings], Study], model: nn.Module, settings: Settings, budget: int, *, sure: bool = True
) -> Planned:
    """Return the fastest plan within the budget by predicted time, exact or lossy.

    Args:
        study: what is known of the call in a precision that is settled.
        model: the step.
        settings: without a precision.
        sure: where nothing fits, what was far from fitting is looked at, too, so that the error tells the least.

    Raises:
        BudgetError: no plan fits, whatever is lost; the one that lacks the least.
        RecordingError: there is no precision left to choose.
    """
    contest = _Contest(study, settings, budget)
    for precision in tiers(model, settings):
        if contest.may_gain(precision):
            contest.enter(precision)
    mixed = contest.mixed()
    if mixed is not None and mixed not in settings.without:
        contest.enter(mixed)
    if contest.best is None and sure:
        contest.enter_left_out()
    if contest.best is None and not contest.lacking:
        raise RecordingError("The step runs in none of the precisions that are left", expected="one that it runs in")
    if contest.best is None:
        raise min(contest.lacking, key=lambda error: error.smallest_budget)
    return contest.told(contest.best)


class _Contest:
    """Plans in one precision after the other, of which the fastest is kept."""

    def __init__(self, study: Callable[[Settings], Study], settings: Settings, budget: int) -> None:
        self._study, self._settings, self._budget = study, settings, budget
        self._known: dict[Precision, Study] = {}
        self._seconds = float("inf")
        self.best: Planned | None = None
        self.lacking = list[BudgetError]()
        self._left_out = list[tuple[_Least, Precision]]()
        """Precisions that are far from fitting, with their floors op by op."""
        self._failed = dict[str, Precision]()
        """First precision that failed with each error."""

    def may_gain(self, precision: Precision) -> bool:
        """Return whether a precision is worth planning. For fused kernels each candidate is lowered, which takes
        seconds: saving in fewer bits is tried only where nothing fits so far, or where much is recomputed."""
        if self._settings.engine == "graph" or precision.save == "exact" or self.best is None:
            return True
        return self.best.plan.seconds > _MUCH * self._seconds

    def enter_left_out(self) -> None:
        """Plan in the precisions left out that may need less than those tried, so that the smallest budget that is
        reported does not depend on the budget that was asked for."""
        for least, precision in sorted(self._left_out, key=lambda one: one[0].floor):
            if self.lacking and least.is_far_from(min(error.smallest_budget for error in self.lacking)):
                break
            self.enter(precision, anyhow=True)

    def enter(self, precision: Precision, *, anyhow: bool = False) -> None:
        """Plan in a precision, and keep the plan where it is worth what it loses. ``anyhow``: however far from fitting
        it is."""
        settled = replace(self._settings, precision=precision)
        undivided = None if precision.whole else self._known.get(replace(precision, whole=True))
        try:
            if undivided is not None and not _runs(undivided, CONVOLUTION):
                return  # no convolution to take apart
            one = self._known[precision] = self._study(settled)
            if undivided is not None and not _runs(one, CHUNKED):
                return  # no convolution was worth taking apart
            if self.best is not None and (step_seconds(one.captured.graph) or 0.0) > self._longest:
                return  # any plan in this precision takes as long
            if self._settings.engine == "inductor" and not self._is_worth_lowering(one, settled, anyhow):
                return
            planned = one.planned(settled, self._budget)
        except BudgetError as error:
            error.precision = precision
            self.lacking.append(error)
            return
        except MemplanError as error:
            if not precision.lossy:
                raise
            self._failed.setdefault(error.found, precision)  # not everything runs in fewer bits
            return
        if planned.plan.lost in self._settings.without:
            return  # it uses nothing of what it allows beyond that one
        taken = planned.plan.total_seconds or 0.0
        if self.best is None or taken < self._longest:
            self.best, self._seconds = planned, taken

    def _is_worth_lowering(self, study: Study, settled: Settings, anyhow: bool) -> bool:
        """Return whether a precision is worth lowering, which takes seconds for each candidate."""
        search, precision = study.search(settled), settled.settled
        least = _least(search)
        if least.is_far_from(self._budget) and not anyhow:
            self._left_out.append((least, precision))
            return False
        return precision.save == "exact" or _saves(search, self._budget)

    def told(self, planned: Planned) -> Planned:
        """Return the plan with a note of each precision that failed."""
        notes = [f"{precision} was left out: {found}" for found, precision in self._failed.items()]
        plan = planned.plan
        return replace(planned, plan=replace(plan, notes=(*plan.notes, *notes))) if notes else planned

    @property
    def _longest(self) -> float:
        """Seconds below which another plan is worth it."""
        exact = self.best is not None and not self.best.plan.precision.lossy
        return (WORTH_LOSING if exact else WORTH_IT) * self._seconds

    def mixed(self) -> Precision | None:
        """Return the best plan's lower precision, or any other, without the blocks that are slower in it; None where
        none is."""
        if self.best is None or EXACT not in self._known:
            return None
        low = next((one for one in (self.best.plan.precision, *self._known) if one.compute), None)
        if low is None:
            return None
        slower = slower_blocks(self._known[EXACT].captured.graph, self._known[low].captured.graph, low.compute)
        return replace(low, apart=slower) if slower else None


@dataclass(frozen=True, slots=True)
class _Least:
    """Bytes of a step op by op."""

    floor: int
    there: int
    """Bytes that are always there, included in the floor."""

    def is_far_from(self, budget: int) -> bool:
        """Return whether the fused step will not keep a budget either."""
        return self.floor - self.there > _FAR * (budget - self.there)


def _least(search: Search) -> _Least:
    return _Least(search.floor_peak, base_level(search.graph, search.floor().choices, search.around))


def _saves(search: Search, budget: int) -> bool:
    """Return whether plans op by op, for the budget or at the floor, save anything in fewer bits."""
    lossy = {(f.lever, f.value) for f in search.graph.forms if registry.find(f.lever).grade(f) == "lossy"}
    return any(not lossy.isdisjoint(found.choices.kept_as) for found in (search.floor(), search.within(budget)))


@dataclass(frozen=True, slots=True)
class Reached:
    """A plan of a frontier."""

    peak: int
    """Predicted bytes."""
    seconds: float
    """Seconds added to the step as it is written; below 0 where computing in fewer bits is faster."""
    precision: Precision


def frontier(
    study: Callable[[Settings], Study], model: nn.Module, settings: Settings, points: int
) -> tuple[Reached, ...]:
    """Return plans from all kept to the floor, in each allowed precision, the largest peak first: the exact ones that
    no exact one beats in both bytes and seconds, and the lossy ones that none beats at all.

    Args:
        study: what is known of the call in a precision that is settled.
        model: the step.
        settings: whatever the budget.
        points: plans in each precision, at most.
    """
    reached, base = list[Reached](), step_seconds(study(replace(settings, precision=EXACT)).captured.graph)
    for precision in tiers(model, settings) if settings.undecided else [settings.settled]:
        settled = replace(settings, precision=precision)
        try:
            lowered = study(settled)
            plans = lowered.frontier(settled, points)
        except MemplanError:
            if not precision.lossy:
                raise
            continue  # not everything runs in fewer bits
        more = step_seconds(lowered.captured.graph) - base if precision.lossy else 0.0
        reached += [Reached(plan.peak, plan.seconds + more, precision) for plan in plans]
    exact = _unbeaten(plan for plan in reached if not plan.precision.lossy)
    lossy = (plan for plan in _unbeaten(reached) if plan.precision.lossy)
    return tuple(sorted((*exact, *lossy), key=lambda plan: (-plan.peak, plan.seconds)))


def _runs(study: Study, target: str) -> bool:
    """Return whether the forward pass has an op of this name."""
    return any(op.target == target for op in study.captured.graph.forward_ops)


def _unbeaten(plans: Iterable[Reached]) -> list[Reached]:
    """Return the Pareto front: the plans that no other beats in both bytes and seconds."""
    fastest, best = float("inf"), list[Reached]()
    for plan in sorted(plans, key=lambda plan: (plan.peak, plan.seconds)):
        if plan.seconds < fastest:
            fastest = plan.seconds
            best.append(plan)
    return best


def with_lossy_way(
    error: BudgetError, study: Callable[[Settings], Study], model: nn.Module, settings: Settings, budget: int
) -> BudgetError:
    """Return the error of a budget that no exact plan meets, with what a lossy plan would cost, where one meets it."""
    least = study(settings).least(settings)
    if budget < least:
        return error
    try:
        plan = fastest(
            study, model, replace(settings, allow="lossy", without=(*settings.without, EXACT)), budget, sure=False
        ).plan
    except MemplanError:  # none does, or nothing of it runs in fewer bits
        return error
    return with_way(error, Way(f"allow='lossy' (--allow lossy) meets it by {plan.lost}{_taken(plan)}", plan.peak))


def with_graph_way(error: BudgetError, planned: Callable[[Settings], Planned], settings: Settings) -> BudgetError:
    """Return the error of a budget that no fused kernels meet, with what the engine ``graph`` would cost, where that
    does."""
    try:
        plan = planned(replace(settings, engine="graph")).plan
    except MemplanError:
        return error
    return with_way(error, Way(f"engine='graph' (--engine graph) meets it, op by op{_taken(plan)}", plan.peak))


def _taken(plan: Plan) -> str:
    """Return the end of a sentence with the predicted seconds of a plan."""
    if plan.total_seconds is None:
        return ""
    without = f" ({format_seconds(plan.step_seconds)} without a plan)" if plan.step_seconds else ""
    return f", {format_seconds(plan.total_seconds)} a step predicted{without}"


def tiers(model: nn.Module, settings: Settings) -> Iterator[Precision]:
    """Yield the precisions to choose from, those that lose nothing first."""
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    under_autocast = any(torch.is_autocast_enabled(place) for place in ("cpu", "cuda"))
    compute = "" if under_autocast else lower_precision(settings.device, device)
    saves: tuple[Save, ...] = ("exact", "bfloat16", "int8") if settings.engine == "inductor" else ("bfloat16", "int8")
    every = [EXACT]
    for save in saves if compute else ():
        every += [Precision(compute, save, whole=True)] if device == "cpu" else []
        every.append(Precision(compute, save))
    every += [Precision("", "bfloat16"), Precision("", "int8")]
    yield from (precision for precision in every if precision not in settings.without)


def lower_precision(card: Device | None, device: str) -> Compute:
    """Return the dtype that has kernels: float16 on a card without bfloat16, else bfloat16. On a CPU without
    instructions for it bfloat16 is slow, as the measured seconds show, and float16 no faster."""
    if card is not None:
        return "bfloat16" if card.flops.get("bfloat16") or not card.flops.get("float16") else "float16"
    if device == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    return "bfloat16"
