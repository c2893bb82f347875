"""Choose the precision of a lossy plan: plan in several precisions and select the fastest plan that fits."""

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
"""Share of the step's time spent on recomputation above which saving in fewer bits may be faster."""
_FAR = 1.5
"""Ratio of the op-by-op floor to the budget, both without resident bytes, above which a step is far from fitting. Fused
steps were measured to need up to 15 % less than their op-by-op floor."""
WORTH_IT = 0.98
"""Largest share of a plan's time at which a lossier plan replaces it."""
WORTH_LOSING = 0.9
"""The same for an exact plan, with a margin for the error of predicted seconds."""


def fastest(
    study: Callable[[Settings], Study], model: nn.Module, settings: Settings, budget: int, *, sure: bool = True
) -> Planned:
    """Return the fastest plan within the budget by predicted time, exact or lossy.

    Args:
        study: returns the study of the call in the precision of the settings.
        model: the step.
        settings: settings without a precision.
        sure: if nothing fits, also plan in precisions that are far from fitting, so that the error has the smallest
            budget.

    Raises:
        BudgetError: no plan fits in any precision; the error with the smallest budget.
        RecordingError: no precision is left to choose.
    """
    contest = _Contest(study, settings, budget)
    for precision in tiers(model, settings):
        if contest.may_gain(precision):
            contest.enter(precision)
    mixed = contest.mixed()
    if mixed is not None and mixed not in settings.without:
        contest.enter(mixed)
    if contest.best is None and sure:
        contest.enter_skipped()
    if contest.best is None and not contest.lacking:
        raise RecordingError("The step runs in none of the precisions that are left", expected="one that it runs in")
    if contest.best is None:
        raise min(contest.lacking, key=lambda error: error.smallest_budget)
    return contest.with_notes(contest.best)


class _Contest:
    """Plans in several precisions and selects the fastest."""

    def __init__(self, study: Callable[[Settings], Study], settings: Settings, budget: int) -> None:
        self._study, self._settings, self._budget = study, settings, budget
        self._known: dict[Precision, Study] = {}
        self._seconds = float("inf")
        self.best: Planned | None = None
        self.lacking = list[BudgetError]()
        self._skipped = list[tuple[_Least, Precision]]()
        """Skipped precisions that are far from fitting, with their op-by-op bytes."""
        self._failed = dict[str, Precision]()
        """First precision that failed with each error."""

    def may_gain(self, precision: Precision) -> bool:
        """Return whether a precision is worth planning. Lowering fused kernels takes seconds per candidate, so saving
        in fewer bits is tried only if nothing fits so far or much is recomputed."""
        if self._settings.engine == "graph" or precision.save == "exact" or self.best is None:
            return True
        return self.best.plan.seconds > _MUCH * self._seconds

    def enter_skipped(self) -> None:
        """Plan in the skipped precisions that may need less than the others, so that the reported smallest budget does
        not depend on the requested budget."""
        for least, precision in sorted(self._skipped, key=lambda skipped: skipped[0].floor):
            if self.lacking and least.is_far_from(min(error.smallest_budget for error in self.lacking)):
                break
            self.enter(precision, anyhow=True)

    def enter(self, precision: Precision, *, anyhow: bool = False) -> None:
        """Plan in a precision, and select the plan if it is fast enough for its loss. ``anyhow``: even if the precision
        is far from fitting."""
        settled = replace(self._settings, precision=precision)
        undivided = None if precision.whole else self._known.get(replace(precision, whole=True))
        try:
            if undivided is not None and not _runs(undivided, CONVOLUTION):
                return  # no convolution to split
            study = self._known[precision] = self._study(settled)
            if undivided is not None and not _runs(study, CHUNKED):
                return  # no convolution was worth splitting
            if self.best is not None and (step_seconds(study.captured.graph) or 0.0) > self._longest:
                return  # any plan in this precision takes as long
            if self._settings.engine == "inductor" and not self._is_worth_lowering(study, settled, anyhow):
                return
            planned = study.planned(settled, self._budget)
        except BudgetError as error:
            error.precision = precision
            self.lacking.append(error)
            return
        except MemplanError as error:
            if not precision.lossy:
                raise
            self._failed.setdefault(error.found, precision)  # some ops have no kernels in fewer bits
            return
        if planned.plan.lost in self._settings.without:
            return  # the plan does not use the lower precision
        seconds = planned.plan.total_seconds or 0.0
        if self.best is None or seconds < self._longest:
            self.best, self._seconds = planned, seconds

    def _is_worth_lowering(self, study: Study, settled: Settings, anyhow: bool) -> bool:
        search, precision = study.search(settled), settled.settled
        least = _Least(search.floor_peak, base_level(search.graph, search.floor().choices, search.around))
        if least.is_far_from(self._budget) and not anyhow:
            self._skipped.append((least, precision))
            return False
        return precision.save == "exact" or _saves(search, self._budget)

    def with_notes(self, planned: Planned) -> Planned:
        """Return the plan with a note of each precision that failed."""
        notes = [f"{precision} was left out: {error}" for error, precision in self._failed.items()]
        plan = planned.plan
        return replace(planned, plan=replace(plan, notes=(*plan.notes, *notes))) if notes else planned

    @property
    def _longest(self) -> float:
        """Seconds below which another plan replaces the best."""
        exact = self.best is not None and not self.best.plan.precision.lossy
        return (WORTH_LOSING if exact else WORTH_IT) * self._seconds

    def mixed(self) -> Precision | None:
        """Return a lower precision, the best plan's if possible, that leaves out the blocks that are slower in it; None
        if no block is."""
        if self.best is None or EXACT not in self._known:
            return None
        low = next((known for known in (self.best.plan.precision, *self._known) if known.compute), None)
        if low is None:
            return None
        slower = slower_blocks(self._known[EXACT].captured.graph, self._known[low].captured.graph, low.compute)
        return replace(low, apart=slower) if slower else None


@dataclass(frozen=True, slots=True)
class _Least:
    """Bytes of a step run op by op."""

    floor: int
    there: int
    """Resident bytes, included in the floor."""

    def is_far_from(self, budget: int) -> bool:
        """Return whether the fused step is expected to exceed a budget, too."""
        return self.floor - self.there > _FAR * (budget - self.there)


def _saves(search: Search, budget: int) -> bool:
    """Return whether op-by-op plans, for the budget or at the floor, save anything in fewer bits."""
    lossy = {(f.lever, f.value) for f in search.graph.forms if registry.find(f.lever).grade(f) == "lossy"}
    return any(not lossy.isdisjoint(plan.choices.kept_as) for plan in (search.floor(), search.within(budget)))


@dataclass(frozen=True, slots=True)
class Reached:
    """A plan of a frontier."""

    peak: int
    """Predicted bytes."""
    seconds: float
    """Seconds added to the exact step without a plan; negative if computing in fewer bits is faster."""
    precision: Precision


def frontier(
    study: Callable[[Settings], Study], model: nn.Module, settings: Settings, points: int
) -> tuple[Reached, ...]:
    """Return the Pareto frontier in bytes and seconds, the largest peak first: of the exact plans, and of all plans.

    Args:
        study: returns the study of the call in the precision of the settings.
        model: the step.
        settings: settings of the plans.
        points: most plans in each precision.
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
            continue  # some ops have no kernels in fewer bits
        added = step_seconds(lowered.captured.graph) - base if precision.lossy else 0.0
        reached += [Reached(plan.peak, plan.seconds + added, precision) for plan in plans]
    exact = _unbeaten(plan for plan in reached if not plan.precision.lossy)
    lossy = (plan for plan in _unbeaten(reached) if plan.precision.lossy)
    return tuple(sorted((*exact, *lossy), key=lambda plan: (-plan.peak, plan.seconds)))


def _runs(study: Study, target: str) -> bool:
    """Return whether the forward pass calls this op."""
    return any(op.target == target for op in study.captured.graph.forward_ops)


def _unbeaten(plans: Iterable[Reached]) -> list[Reached]:
    """Return the Pareto frontier in bytes and seconds."""
    fastest, best = float("inf"), list[Reached]()
    for plan in sorted(plans, key=lambda plan: (plan.peak, plan.seconds)):
        if plan.seconds < fastest:
            fastest = plan.seconds
            best.append(plan)
    return best


def with_lossy_way(
    error: BudgetError, study: Callable[[Settings], Study], model: nn.Module, settings: Settings, budget: int
) -> BudgetError:
    """Add the figures of a lossy plan to the error of a budget, if such a plan meets it."""
    least = study(settings).least(settings)
    if budget < least:
        return error
    try:
        plan = fastest(
            study, model, replace(settings, allow="lossy", without=(*settings.without, EXACT)), budget, sure=False
        ).plan
    except MemplanError:  # it does not fit, or does not run in fewer bits
        return error
    return with_way(
        error, Way(f"allow='lossy' (--allow lossy) meets it by {plan.lost}{_seconds_text(plan)}", plan.peak)
    )


def with_graph_way(error: BudgetError, planned: Callable[[Settings], Planned], settings: Settings) -> BudgetError:
    """Add the figures of a plan for the engine ``graph`` to the error of a budget, if such a plan meets it."""
    try:
        plan = planned(replace(settings, engine="graph")).plan
    except MemplanError:
        return error
    return with_way(error, Way(f"engine='graph' (--engine graph) meets it, op by op{_seconds_text(plan)}", plan.peak))


def _seconds_text(plan: Plan) -> str:
    """Return the predicted seconds of a plan as the end of a sentence."""
    if plan.total_seconds is None:
        return ""
    without = f" ({format_seconds(plan.step_seconds)} without a plan)" if plan.step_seconds else ""
    return f", {format_seconds(plan.total_seconds)} a step predicted{without}"


def tiers(model: nn.Module, settings: Settings) -> Iterator[Precision]:
    """Yield the precisions to choose from, exact first."""
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    under_autocast = any(torch.is_autocast_enabled(place) for place in ("cpu", "cuda"))
    compute = "" if under_autocast else lower_precision(settings.device, device)
    saves: tuple[Save, ...] = ("exact", "bfloat16", "int8") if settings.engine == "inductor" else ("bfloat16", "int8")
    precisions = [EXACT]
    for save in saves if compute else ():
        precisions += [Precision(compute, save, whole=True)] if device == "cpu" else []
        precisions.append(Precision(compute, save))
    precisions += [Precision("", "bfloat16"), Precision("", "int8")]
    yield from (precision for precision in precisions if precision not in settings.without)


def lower_precision(card: Device | None, device: str) -> Compute:
    """Return float16 for a card without bfloat16, else bfloat16. On CPUs without bfloat16 instructions neither is
    fast."""
    if card is not None:
        return "bfloat16" if card.flops.get("bfloat16") or not card.flops.get("float16") else "float16"
    if device == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    return "bfloat16"
