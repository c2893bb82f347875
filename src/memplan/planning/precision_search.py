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
from memplan.planning.plan.budget_error import Remedy, with_remedy
from memplan.planning.plan.plan import Plan
from memplan.planning.plan.precision_report import slower_blocks
from memplan.planning.schedule.byte_levels import base_level
from memplan.planning.search.search import Search
from memplan.planning.settings import Settings
from memplan.planning.study import Planned, Study

_SUBSTANTIAL_RECOMPUTATION = 0.05
"""Share of the step's time spent on recomputation above which saving in fewer bits may be faster."""
_FAR_ABOVE_BUDGET = 1.5
"""Ratio of the op-by-op floor to the budget, both without resident bytes, above which a step is far from fitting. Fused
steps were measured to need up to 15 % less than their op-by-op floor."""
_MOST_SAVED_OF_STATE = 0.75
"""Share of an optimizer's state that moments in 8 bits save at most: in float32 they take four times as much."""
WORTH_IT = 0.98
"""Largest share of a plan's time at which a lossier plan replaces it."""
WORTH_LOSING = 0.9
"""The same for an exact plan, with a margin for the error of predicted seconds."""


def fastest(
    study: Callable[[Settings], Study], model: nn.Module, settings: Settings, budget: int, *, exact_error: bool = True
) -> Planned:
    """Return the fastest plan within the budget by predicted time, exact or lossy.

    Args:
        study: returns the `Study` (capture, costs and search) of the call in the precision of the settings.
        model: the step.
        settings: settings without a precision.
        exact_error: if nothing fits, also plan in precisions that are far from fitting, so that the error states the
            smallest budget with a plan in any precision.

    Raises:
        BudgetError: no plan fits in any precision; the error with the smallest budget.
        RecordingError: no precision is left to choose.
    """
    search = _PrecisionSearch(study, settings, budget)
    for precision in allowed_precisions(model, settings):
        if search.may_gain(precision):
            search.try_precision(precision)
    mixed_precision = search.without_slower_blocks()
    if mixed_precision is not None and mixed_precision not in settings.excluded_precisions:
        search.try_precision(mixed_precision)
    if search.best is None and exact_error:
        search.try_skipped()
    for precision in (
        search.worth_moments(precisions_with_8_bit_moments(model, settings)) if search.may_have_moments else ()
    ):
        if search.best is not None or search.moments_left_out:
            break
        search.try_precision(precision)
    if search.best is None and not search.budget_errors:
        raise RecordingError("The step runs in none of the precisions that are left", expected="one that it runs in")
    if search.best is None:
        raise search.with_reasons(min(search.budget_errors, key=lambda error: error.smallest_budget))
    return search.with_notes(search.best)


class _PrecisionSearch:
    """Plans in one precision after another and remembers the fastest plan that fits (`best`)."""

    def __init__(self, study: Callable[[Settings], Study], settings: Settings, budget: int) -> None:
        self._study, self._settings, self._budget = study, settings, budget
        self._studies: dict[Precision, Study] = {}
        """By precision that was tried."""
        self.best: Planned | None = None
        """The fastest plan so far that fits."""
        self._best_seconds = float("inf")
        """Predicted seconds of a step with it."""
        self.budget_errors = list[BudgetError]()
        """Errors of precisions without a plan within the budget."""
        self._skipped = list[tuple[_OpByOpBytes, Precision]]()
        """Skipped precisions that are far from fitting, with their op-by-op bytes."""
        self._errors = dict[str, Precision]()
        """By error other than the budget's: the first precision that failed with it."""

    def may_gain(self, precision: Precision) -> bool:
        """Return whether a plan in this precision may be faster than the best so far. Lowering fused kernels takes
        seconds per candidate, so saving in fewer bits is tried only if nothing fits yet or much is recomputed."""
        if self._settings.engine == "graph" or precision.save == "exact" or self.best is None:
            return True
        return self.best.plan.seconds > _SUBSTANTIAL_RECOMPUTATION * self._best_seconds

    def try_skipped(self) -> None:
        """Plan in the skipped precisions that may need less than the others, so that the reported smallest budget does
        not depend on the requested budget, but for moments in 8 bits: these are planned only where they may meet it."""
        for op_by_op, precision in sorted(self._skipped, key=lambda skipped: skipped[0].floor):
            if self.budget_errors and op_by_op.is_far_above(min(error.smallest_budget for error in self.budget_errors)):
                break
            self.try_precision(precision, even_if_far=True)

    def try_precision(self, precision: Precision, *, even_if_far: bool = False) -> None:
        """Plan in a precision; the plan becomes the best if it is enough faster to justify its loss of accuracy.

        ``even_if_far``: also plan if the op-by-op floor is so far above the budget that fused kernels cannot fit
        either.
        """
        settings = replace(self._settings, precision=precision)
        # the study of the same precision with convolutions on the whole batch, if it was tried before
        whole_study = None if precision.whole else self._studies.get(replace(precision, whole=True))
        try:
            if whole_study is not None and not _calls_op(whole_study, CONVOLUTION):
                return  # no convolution to split
            study = self._studies[precision] = self._study(settings)
            if whole_study is not None and not _calls_op(study, CHUNKED):
                return  # no convolution was worth splitting
            if self.best is not None and (step_seconds(study.captured.graph) or 0.0) > self._seconds_to_beat:
                return  # without recomputation it takes too long already
            if self._settings.engine == "inductor" and not self._is_worth_lowering(study, settings, even_if_far):
                return
            planned = study.planned(settings, self._budget)
        except BudgetError as error:
            error.precision = precision
            self.budget_errors.append(error)
            return
        except MemplanError as error:
            if not precision.lossy:
                raise
            self._errors.setdefault(error.found, precision)  # such as ops without kernels in fewer bits
            return
        if planned.plan.lost in self._settings.excluded_precisions:
            return  # the plan does not use the lower precision: it is one that was excluded
        seconds = planned.plan.total_seconds or 0.0
        if self.best is None or seconds < self._seconds_to_beat:
            self.best, self._best_seconds = planned, seconds

    def _is_worth_lowering(self, study: Study, settings: Settings, even_if_far: bool) -> bool:
        """Return whether to compile fused kernels for a study: not if it is far from the budget, or saves nothing in
        fewer bits.

        Precisions that are far from the budget are noted as skipped. ``even_if_far``: plan those, too.
        """
        search, precision = study.search(settings), settings.fixed_precision
        resident = base_level(search.graph, search.floor().choices, search.outside_memory)
        op_by_op = _OpByOpBytes(search.floor_peak, resident)
        if op_by_op.is_far_above(self._budget) and not even_if_far:
            self._skipped.append((op_by_op, precision))
            return False
        return precision.save == "exact" or _saves_in_fewer_bits(search, self._budget)

    @property
    def may_have_moments(self) -> bool:
        """Whether moments in 8 bits apply: the optimizer is Adam or AdamW, or was not looked at yet."""
        if self._settings.optimizer is None or not self._settings.moments_in_8_bits:
            return False
        for precision, study in self._studies.items():  # any study: the optimizer is the same
            return study.search(replace(self._settings, precision=precision)).outside_memory.moments_fit_8_bits
        return True

    def worth_moments(self, tiers: Iterable[Precision]) -> list[Precision]:
        """Return those of these precisions with moments in 8 bits that may meet the budget, by the smallest peak that
        was found without these. To plan in the others takes seconds where torchao compiles the update.

        The peaks of fused kernels are not known before these are lowered: all are returned.
        """
        tiers = list(tiers)
        peaks = {error.precision: error.smallest_budget for error in self.budget_errors}
        if self._settings.engine == "inductor" or not peaks:
            return tiers
        worth = list[Precision]()
        for precision in tiers:
            plain = replace(precision, moments="")
            if plain in peaks:
                outside = self._studies[plain].search(replace(self._settings, precision=plain)).outside_memory
                state_bytes = outside.by_cause().get("optimizer_state", 0)  # of idle parameters, too
                rounding = outside.home.allocator.large_segment_size if outside.home.card is not None else 0
                saved = int(_MOST_SAVED_OF_STATE * state_bytes) + outside.update_bytes + rounding
                if peaks[plain] - saved > self._budget:
                    continue
            elif plain not in self._settings.excluded_precisions:  # those were not planned
                continue
            worth.append(precision)
        return worth

    @property
    def moments_left_out(self) -> str:
        """Why the optimizer has no moments in 8 bits; empty if it has, or if they were not tried."""
        return next((reason for reason, precision in self._errors.items() if precision.moments), "")

    def with_reasons(self, error: BudgetError) -> BudgetError:
        """Return the error with the reason why moments in 8 bits were left out, if they were."""
        left_out = self.moments_left_out
        return error.but(do=f"{error.do}; moments in 8 bits were left out: {left_out}") if left_out else error

    def with_notes(self, planned: Planned) -> Planned:
        """Return the plan with a note of each precision that failed."""
        notes = [f"{precision} was left out: {error}" for error, precision in self._errors.items()]
        plan = planned.plan
        return replace(planned, plan=replace(plan, notes=(*plan.notes, *notes))) if notes else planned

    @property
    def _seconds_to_beat(self) -> float:
        """Seconds of a step below which a plan replaces the best so far: the best's seconds, less a margin."""
        is_exact = self.best is not None and not self.best.plan.precision.lossy
        return (WORTH_LOSING if is_exact else WORTH_IT) * self._best_seconds

    def without_slower_blocks(self) -> Precision | None:
        """Return a lower precision in which the blocks that it slows down compute as written; None if it slows down
        none.

        The lower precision is the best plan's, else the first that was tried.
        """
        if self.best is None or EXACT not in self._studies:
            return None
        lower = next((precision for precision in (self.best.plan.precision, *self._studies) if precision.compute), None)
        if lower is None:
            return None
        slower = slower_blocks(self._studies[EXACT].captured.graph, self._studies[lower].captured.graph, lower.compute)
        return replace(lower, apart=slower) if slower else None


@dataclass(frozen=True, slots=True)
class _OpByOpBytes:
    """Bytes that a step needs at least if its ops run one by one."""

    floor: int
    """Smallest peak that the search reached."""
    resident: int
    """Part of the floor that is allocated during the whole step."""

    def is_far_above(self, budget: int) -> bool:
        """Return whether the fused step is expected to exceed a budget, too."""
        return self.floor - self.resident > _FAR_ABOVE_BUDGET * (budget - self.resident)


def _saves_in_fewer_bits(search: Search, budget: int) -> bool:
    """Return whether op-by-op plans, for the budget or at the floor, save any value in fewer bits.

    If they do not, neither will plans of fused kernels.
    """
    forms = search.graph.forms
    lossy = {(form.lever, form.value) for form in forms if registry.find(form.lever).grade(form) == "lossy"}
    return any(lossy & plan.choices.saved_forms for plan in (search.floor(), search.within(budget)))


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """A plan of a frontier."""

    peak: int
    """Predicted bytes."""
    seconds: float
    """Seconds added to the exact step without a plan; negative if computing in fewer bits is faster."""
    precision: Precision


def frontier(
    study: Callable[[Settings], Study], model: nn.Module, settings: Settings, points: int
) -> tuple[FrontierPoint, ...]:
    """Return the Pareto frontier in bytes and seconds, the largest peak first: of the exact plans, and of all plans.
    ``study`` returns the `Study` of the call in the precision of the settings; each precision has ``points`` plans at
    most."""
    plans = list[FrontierPoint]()
    exact_seconds = step_seconds(study(replace(settings, precision=EXACT)).captured.graph)
    for precision in allowed_precisions(model, settings) if settings.chooses_precision else [settings.fixed_precision]:
        settings_in_precision = replace(settings, precision=precision)
        try:
            study_in_precision = study(settings_in_precision)
            solutions = study_in_precision.frontier(settings_in_precision, points)
        except MemplanError:
            if not precision.lossy:
                raise
            continue  # some ops have no kernels in fewer bits
        added = step_seconds(study_in_precision.captured.graph) - exact_seconds if precision.lossy else 0.0
        plans += [FrontierPoint(solution.peak, solution.seconds + added, precision) for solution in solutions]
    exact = _pareto_frontier(plan for plan in plans if not plan.precision.lossy)
    lossy = (plan for plan in _pareto_frontier(plans) if plan.precision.lossy)
    return tuple(sorted((*exact, *lossy), key=lambda plan: (-plan.peak, plan.seconds)))


def _calls_op(study: Study, target: str) -> bool:
    """Return whether the forward pass calls the op ``target``, such as ``aten.convolution.default``."""
    return any(op.target == target for op in study.captured.graph.forward_ops)


def _pareto_frontier(plans: Iterable[FrontierPoint]) -> list[FrontierPoint]:
    """Return the plans that no other plan beats in both bytes and seconds, the smallest peak first."""
    fastest, best = float("inf"), list[FrontierPoint]()
    for plan in sorted(plans, key=lambda plan: (plan.peak, plan.seconds)):
        if plan.seconds < fastest:
            fastest = plan.seconds
            best.append(plan)
    return best


def with_lossy_remedy(
    error: BudgetError, study: Callable[[Settings], Study], model: nn.Module, settings: Settings, budget: int
) -> BudgetError:
    """Return the error of an exact plan, with the advice to allow a lossy plan if there is one that meets the budget.

    ``study``: returns the `Study` of the call in the precision of the settings.
    """
    exact_study = study(settings)
    outside = exact_study.search(settings).outside_memory
    may_have_moments = settings.moments_in_8_bits and outside.moments_fit_8_bits
    state_bytes = outside.by_cause().get("optimizer_state", 0)
    moments_save = _MOST_SAVED_OF_STATE * state_bytes if may_have_moments else 0
    if budget < exact_study.least_peak(settings) - moments_save:
        return error
    excluded = (*settings.excluded_precisions, EXACT)  # the exact plan does not fit: that is the error
    lossy_settings = replace(settings, allow="lossy", excluded_precisions=excluded)
    try:
        plan = fastest(study, model, lossy_settings, budget, exact_error=False).plan
    except MemplanError:  # it does not fit, or does not run in fewer bits
        return error
    return with_remedy(
        error, Remedy(f"allow='lossy' (--allow lossy) meets it by {plan.lost}{_seconds_text(plan)}", plan.peak)
    )


def with_graph_remedy(error: BudgetError, planned: Callable[[Settings], Planned], settings: Settings) -> BudgetError:
    """Return the error of fused kernels, with the advice to run op by op if such a plan meets the budget.

    ``planned``: returns the plan for these settings, or raises.
    """
    try:
        plan = planned(replace(settings, engine="graph")).plan
    except MemplanError:
        return error
    return with_remedy(
        error, Remedy(f"engine='graph' (--engine graph) meets it, op by op{_seconds_text(plan)}", plan.peak)
    )


def _seconds_text(plan: Plan) -> str:
    """Return a plan's predicted seconds as the end of a sentence: ", 1.2 s a step predicted (1 s without a plan)"."""
    if plan.total_seconds is None:
        return ""
    without = f" ({format_seconds(plan.step_seconds)} without a plan)" if plan.step_seconds else ""
    return f", {format_seconds(plan.total_seconds)} a step predicted{without}"


def allowed_precisions(model: nn.Module, settings: Settings) -> Iterator[Precision]:
    """Yield the precisions to choose from, exact first, without those that the settings exclude.

    Computing in fewer bits is left out under the user's own autocast.
    """
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    # op by op, a search that may save in bfloat16 covers the plans that save exactly (see `Plan.lost`)
    saves: tuple[Save, ...] = ("exact", "bfloat16", "int8") if settings.engine == "inductor" else ("bfloat16", "int8")
    precisions = [EXACT]
    under_autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    compute = "" if under_autocast else lower_precision(settings.device, device)
    for save in saves if compute else ():
        if device == "cpu":  # only there convolutions are split into a few samples at a time
            precisions.append(Precision(compute, save, whole=True))
        precisions.append(Precision(compute, save))
    precisions += [Precision("", "bfloat16"), Precision("", "int8")]
    yield from (precision for precision in precisions if precision not in settings.excluded_precisions)


def precisions_with_8_bit_moments(model: nn.Module, settings: Settings) -> Iterator[Precision]:
    """Yield the precisions of `allowed_precisions`, and exact computation, with the optimizer's moments in 8 bits,
    without those that the settings exclude. Where no other plan fits, the first that does is taken."""
    for precision in allowed_precisions(model, replace(settings, excluded_precisions=())):
        in_8_bits = replace(precision, moments="int8")
        if in_8_bits not in settings.excluded_precisions:
            yield in_8_bits


def lower_precision(card: Device | None, device: str) -> Compute:
    """Return the dtype to compute in on a device: bfloat16, or float16 for a card that has only this. ``card`` is the
    one that seconds are estimated for; None: this machine's ``device``, "cpu" or "cuda"."""
    if card is not None:
        only_float16 = card.flops.get("float16") and not card.flops.get("bfloat16")
    else:
        only_float16 = device == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
    return "float16" if only_float16 else "bfloat16"
