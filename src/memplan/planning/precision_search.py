"""Which precision a lossy plan has: a few kinds are planned, and the fastest that fits is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from memplan._text import format_seconds
from memplan.devices import Device
from memplan.errors import BudgetError, MemplanError, RecordingError
from memplan.planning.cost.op_timing import step_seconds
from memplan.planning.graph.op_schema import CHUNKED
from memplan.planning.graph.precision import EXACT, Compute, Precision, Save
from memplan.planning.levers import registry
from memplan.planning.passes.chunk_convolutions import CONVOLUTION
from memplan.planning.plan.budget_error import Way, with_way
from memplan.planning.plan.plan import Plan
from memplan.planning.plan.precision_report import slower_blocks
from memplan.planning.schedule.byte_levels import base_level

if TYPE_CHECKING:
    from memplan.planning.search.search import Search
    from memplan.planning.settings import Settings
    from memplan.planning.study import Planned, Study

_MUCH = 0.05
"""Share of a step's time that goes into making values again, beyond which keeping them in fewer bits may be faster."""
_FAR = 1.5
"""Times what a budget leaves beside weights and all else that is there all the time. Fused, a step has been seen to
take 15 % less than the least op by op."""
WORTH_IT = 0.98
"""A plan that loses more has to take this share of the time of one that loses less, or less than that."""
WORTH_LOSING = 0.9
"""The same beside an exact one: predicted seconds are a few per cent off, and nothing is to be lost for nothing."""


def fastest(study: Callable[[Settings], Study], model: nn.Module, settings: Settings, *, sure: bool = True) -> Planned:
    """The fastest plan within the budget, by its predicted time, exact or lossy; of fused kernels, of those that are
    looked at.

    Args:
        study: what is known of the call in a precision that is settled.
        model: the step.
        settings: without a precision.
        sure: where nothing fits, what was far from fitting is looked at, too, so that the error tells the least.

    Raises:
        BudgetError: no plan fits, whatever is lost; the one that lacks the least.
        RecordingError: there is no precision left to choose.
    """
    contest = _Contest(study, settings)
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

    def __init__(self, study: Callable[[Settings], Study], settings: Settings) -> None:
        self._study, self._settings = study, settings
        self._known: dict[Precision, Study] = {}
        self._seconds = float("inf")
        self.best: Planned | None = None
        self.lacking = list[BudgetError]()
        self._left_out = list[tuple[_Least, Precision]]()
        """What is far from fitting, with its least op by op."""
        self._failed = dict[str, Precision]()
        """By what went wrong, in what first."""

    def may_gain(self, precision: Precision) -> bool:
        """Whether it is worth a look. Of fused kernels each is lowered, which takes seconds: what saves in fewer bits
        is looked at where nothing fits so far, or much is made again."""
        if self._settings.engine == "graph" or precision.save == "exact" or self.best is None:
            return True
        return self.best.plan.seconds > _MUCH * self._seconds

    def enter_left_out(self) -> None:
        """Plan after all in those precisions that were left out and may take less than what was looked at, so that the
        least hangs on no budget."""
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
                return  # there is nothing to take apart
            one = self._known[precision] = self._study(settled)
            if undivided is not None and not _runs(one, CHUNKED):
                return  # nothing was worth it
            if self.best is not None and (step_seconds(one.captured.graph) or 0.0) > self._longest:
                return  # whatever is chosen, that much it takes
            if self._settings.engine == "inductor" and not self._is_worth_lowering(one, settled, anyhow):
                return
            planned = one.planned(settled)
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
            return  # it allows more, and makes no use of that
        taken = planned.plan.total_seconds or 0.0
        if self.best is None or taken < self._longest:
            self.best, self._seconds = planned, taken

    def _is_worth_lowering(self, study: Study, settled: Settings, anyhow: bool) -> bool:
        """Of fused kernels several candidates are lowered, which takes seconds each."""
        search, precision = study.search(settled), settled.settled
        least = _least(search)
        if least.is_far_from(settled.budget) and not anyhow:
            self._left_out.append((least, precision))
            return False
        return precision.save == "exact" or _saves(search, settled.budget)

    def told(self, planned: Planned) -> Planned:
        """The same, with a note of what could not be looked at."""
        notes = [f"{precision} was left out: {found}" for found, precision in self._failed.items()]
        plan = planned.plan
        return replace(planned, plan=replace(plan, notes=(*plan.notes, *notes))) if notes else planned

    @property
    def _longest(self) -> float:
        """Seconds below which another plan is worth it."""
        exact = self.best is not None and not self.best.plan.precision.lossy
        return (WORTH_LOSING if exact else WORTH_IT) * self._seconds

    def mixed(self) -> Precision | None:
        """The best one's lower precision, or any other, without the blocks that take longer in it; None where none
        does."""
        if self.best is None or EXACT not in self._known:
            return None
        low = next((one for one in (self.best.plan.precision, *self._known) if one.compute), None)
        if low is None:
            return None
        slower = slower_blocks(self._known[EXACT].captured.graph, self._known[low].captured.graph, low.compute)
        return replace(low, apart=slower) if slower else None


@dataclass(frozen=True, slots=True)
class _Least:
    """What a step takes op by op, in bytes."""

    floor: int
    there: int
    """Of these, what is there all the time."""

    def is_far_from(self, budget: int) -> bool:
        """Whether the fused step will not keep that either."""
        return self.floor - self.there > _FAR * (budget - self.there)


def _least(search: Search) -> _Least:
    return _Least(search.floor_peak, base_level(search.graph, search.floor().choices, search.around))


def _saves(search: Search, budget: int) -> bool:
    """Whether anything is saved in fewer bits, op by op, within the budget or in the least that there is."""
    lossy = {(f.lever, f.value) for f in search.graph.forms if registry.find(f.lever).grade(f) == "lossy"}
    return any(not lossy.isdisjoint(found.choices.kept_as) for found in (search.floor(), search.within(budget)))


@dataclass(frozen=True, slots=True)
class Reached:
    """A plan of a frontier."""

    peak: int
    """Predicted bytes."""
    seconds: float
    """What it adds to the step as it is written; below 0 where computing in fewer bits is faster."""
    precision: Precision


def frontier(
    study: Callable[[Settings], Study], model: nn.Module, settings: Settings, points: int
) -> tuple[Reached, ...]:
    """Plans from all kept to the floor, in each precision that is allowed, the largest peak first: the exact ones that
    no exact one beats in both bytes and seconds, and the lossy ones that none beats at all.

    Args:
        study: what is known of the call in a precision that is settled.
        model: the step.
        settings: whatever the budget.
        points: plans in each precision, at most.
    """
    found, base = list[Reached](), step_seconds(study(replace(settings, precision=EXACT)).captured.graph)
    for precision in tiers(model, settings) if settings.undecided else [settings.settled]:
        settled = replace(settings, precision=precision)
        try:
            one = study(settled)
            plans = one.frontier(settled, points)
        except MemplanError:
            if not precision.lossy:
                raise
            continue  # not everything runs in fewer bits
        more = step_seconds(one.captured.graph) - base if precision.lossy else 0.0
        found += [Reached(plan.peak, plan.seconds + more, precision) for plan in plans]
    exact = _unbeaten(one for one in found if not one.precision.lossy)
    lossy = (one for one in _unbeaten(found) if one.precision.lossy)
    return tuple(sorted((*exact, *lossy), key=lambda one: (-one.peak, one.seconds)))


def _runs(study: Study, target: str) -> bool:
    """Whether a forward pass has an op of that name."""
    return any(op.target == target for op in study.captured.graph.forward_ops)


def _unbeaten(found: Iterable[Reached]) -> list[Reached]:
    fastest, best = float("inf"), list[Reached]()
    for one in sorted(found, key=lambda one: (one.peak, one.seconds)):
        if one.seconds < fastest:
            fastest = one.seconds
            best.append(one)
    return best


def with_lossy_way(
    error: BudgetError, study: Callable[[Settings], Study], model: nn.Module, settings: Settings
) -> BudgetError:
    """The error of a budget that no exact plan meets, with what a lossy plan would cost, where one meets it."""
    least = study(settings).least(settings)
    if settings.budget < least:
        return error
    try:
        plan = fastest(
            study, model, replace(settings, allow="lossy", without=(*settings.without, EXACT)), sure=False
        ).plan
    except MemplanError:  # none does, or nothing of it runs in fewer bits
        return error
    return with_way(error, Way(f"allow='lossy' (--allow lossy) meets it by {plan.lost}{_taken(plan)}", plan.peak))


def with_graph_way(error: BudgetError, planned: Callable[[Settings], Planned], settings: Settings) -> BudgetError:
    """The error of a budget that no fused kernels meet, with what the engine ``graph`` would cost, where that does."""
    try:
        plan = planned(replace(settings, engine="graph")).plan
    except MemplanError:
        return error
    return with_way(error, Way(f"engine='graph' (--engine graph) meets it, op by op{_taken(plan)}", plan.peak))


def _taken(plan: Plan) -> str:
    """What it costs, to go on with."""
    if plan.total_seconds is None:
        return ""
    without = f" ({format_seconds(plan.step_seconds)} without a plan)" if plan.step_seconds else ""
    return f", {format_seconds(plan.total_seconds)} a step predicted{without}"


def tiers(model: nn.Module, settings: Settings) -> Iterator[Precision]:
    """What there is to choose from: first what loses nothing."""
    device = next((one.device.type for one in model.parameters()), "cpu")
    under_autocast = any(torch.is_autocast_enabled(one) for one in ("cpu", "cuda"))
    compute = "" if under_autocast else lower_precision(settings.device, device)
    saves: tuple[Save, ...] = ("exact", "bfloat16", "int8") if settings.engine == "inductor" else ("bfloat16", "int8")
    every = [EXACT]
    for save in saves if compute else ():
        every += [Precision(compute, save, whole=True)] if device == "cpu" else []
        every.append(Precision(compute, save))
    every += [Precision("", "bfloat16"), Precision("", "int8")]
    yield from (one for one in every if one not in settings.without)


def lower_precision(card: Device | None, device: str) -> Compute:
    """What there are kernels for: float16 on a card that has only that, else bfloat16. On a CPU without instructions
    for it bfloat16 is slow, which the measured seconds say, and float16 no faster."""
    if card is not None:
        return "bfloat16" if card.flops.get("bfloat16") or not card.flops.get("float16") else "float16"
    if device == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    return "bfloat16"
