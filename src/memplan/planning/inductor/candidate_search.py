"""Search for a step of fused kernels within a budget: plan op by op, lower with Inductor, and adjust the target.

The search counts every op's results and knows nothing of fusion. Each of its plans is traced and lowered, and the peak
of the generated code decides: if it exceeds the budget, the search's target is lowered by the excess; if it leaves
room, the target is raised.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from memplan._torch import inductor
from memplan.planning.cost.op_timing import step_seconds
from memplan.planning.graph import op_schema
from memplan.planning.graph.joint_graph import GraphOp, JointGraph
from memplan.planning.graph.resident import OutsideMemory
from memplan.planning.inductor.code_memory import fused_timeline
from memplan.planning.inductor.partition import Fused, as_fused, fused, lowering
from memplan.planning.schedule.actions import Choices
from memplan.planning.schedule.byte_levels import base_level, levels
from memplan.planning.schedule.scheduler import Schedule
from memplan.planning.search.search import STEEP, Infeasible, Search, Solution
from memplan.simulation.timeline import Timeline

FUSED_SHARE = 0.1
"""Cost of recomputing a pointwise op fused into another kernel, as a share of its cost as a separate kernel: fused, it
reads and writes no memory of its own."""
_MAX_CANDIDATES = 4
"""Maximum number of new candidates for a budget: lowering each takes seconds. Bisection instead of targets derived from
the last peak gave the same plans for three models at nine budgets, and needs more candidates for other models."""
_MAX_TARGETS = 8
"""Maximum number of targets searched for: a target whose plan was lowered before costs little."""
_CLOSE_TO_BUDGET = 0.02
"""Unused bytes that end the search for a budget, as a share of the bytes that planning can save."""
_FIRST_STEP, _SECOND_STEP = 0.1, 0.3
"""Steps below the search's floor in the search for the smallest peak, as shares of the bytes above the base level. The
second step is repeated while the peak of the generated code stays within the target."""
_MAX_REPETITIONS = 3
"""Maximum number of repetitions of the second step."""
_MIN_SAVING = 0.005
"""Smallest saving for which another candidate is lowered, as a share of the step's seconds counted op by op."""


@dataclass(frozen=True)
class Candidate:
    """A lowered plan: its parts, their generated code, and the memory timeline of the code."""

    fused: Fused
    code_of_part: Mapping[str, inductor.Code]
    """Code that Inductor generates, by name of the part."""
    timeline: Timeline

    @property
    def schedule(self) -> Schedule:
        """Schedule that was lowered."""
        return self.fused.schedule

    @property
    def peak(self) -> int:
        """Predicted peak in bytes."""
        return self.timeline.peak_reserved


class Fusing:
    """Search for steps of fused kernels for any budget, on a search of a graph with the costs of `as_fusible`."""

    def __init__(self, search: Search) -> None:
        self._search = search
        self._candidates: dict[Choices, Candidate] = {}
        """By choices: the step in fused kernels that was lowered for them."""
        self._targets: dict[Choices, int] = {}
        """By choices: target in bytes for which the candidate was first planned."""
        self._results: dict[int, Solution | Infeasible] = {}
        """Search results by target."""
        self._seconds = step_seconds(search.graph)
        """Seconds of the step before anything is recomputed or encoded."""

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Candidates lowered so far, in order."""
        return tuple(self._candidates.values())

    def candidate(self, choices: Choices) -> Candidate:
        """Return the candidate of these choices. They are lowered, unless that was done before."""
        plan = as_fused(self._search.graph, choices)
        if plan.choices not in self._candidates:
            self._candidates[plan.choices] = lower_and_predict(plan, self._search.outside_memory)
        return self._candidates[plan.choices]

    def within(self, budget: int) -> Candidate | None:
        """Return the fastest candidate whose code's peak is within the budget; None if even the lowest exceeds it."""
        is_known = self._fastest_known(budget) is not None
        if not is_known and isinstance(self._search_within(budget), Infeasible) and not self._is_feasible(budget):
            return None
        best = self._aimed_search(budget)
        if best is None and self._is_feasible(budget):
            return self._fastest_known(budget)  # one of those that `_is_feasible` lowered
        return best

    def frontier(self, points: int) -> list[Solution]:
        """Return the Pareto frontier in bytes and seconds of the lowered candidates, from the highest peak to the
        lowest. Peaks are those of the generated code."""
        plans = self._search.frontier(points)
        candidates = [self._candidate_of(plan) for plan in plans]
        candidates += [self.lowest, *self.candidates]  # in this order: `lowest` lowers further candidates
        fastest, frontier = float("inf"), list[Solution]()
        for candidate in sorted(candidates, key=lambda candidate: (candidate.peak, candidate.schedule.seconds)):
            if candidate.schedule.seconds < fastest:
                fastest = candidate.schedule.seconds
                frontier.append(Solution(candidate.schedule.choices, candidate.peak, fastest, lower_bound_seconds=0.0))
        return frontier[::-1]

    @cached_property
    def lowest(self) -> Candidate:
        """Candidate with the smallest peak."""
        return min(self._lowest_candidates(), key=lambda candidate: candidate.peak)

    def _lowest_candidates(self) -> Iterator[Candidate]:
        """Yield the candidates for the smallest peak. They depend neither on measured seconds nor on earlier
        candidates, so that the error for a budget that is too small names a peak that the next call can reach."""
        search = self._search.deterministic
        lowest_plan = search.floor()
        always_live = base_level(search.graph, lowest_plan.choices, search.outside_memory)
        target = lowest_plan.peak
        floor = self._lower_plan(lowest_plan, target)
        yield floor
        # `search.nearest` lowers what it can towards a target below the floor
        if floor.peak > lowest_plan.peak:  # lower levels leave room for what the code allocates beyond them
            below_floor = target - int(_FIRST_STEP * (target - always_live))
            yield self._candidate_of(search.nearest(below_floor, STEEP))
        for _ in range(_MAX_REPETITIONS):  # an op with the highest level op by op may need less when it is fused
            target -= int(_SECOND_STEP * (target - always_live))
            candidate = self._lower_plan(search.nearest(target), target)
            yield candidate
            if candidate.peak > target:
                break

    def _is_feasible(self, budget: int) -> bool:
        """Return whether any candidate for the smallest peak is within the budget."""
        return any(candidate.peak <= budget for candidate in self._lowest_candidates())

    def _aimed_search(self, budget: int) -> Candidate | None:
        """Return the fastest candidate within the budget, from search targets adjusted to the peaks of the code."""
        bounds, best = TargetBounds(budget, self._tolerance), self._fastest_known(budget)
        count_at_start = len(self._candidates)
        target = bounds.first_target(self._peaks_nearest_to(budget))
        for _ in range(_MAX_TARGETS):
            plan = self._search_within(target)
            if isinstance(plan, Infeasible):
                plan = self._search.nearest(target)  # its code may need less
            if best is not None and best.schedule.seconds - plan.seconds <= _MIN_SAVING * self._seconds:
                break  # not worth lowering
            count_before = len(self._candidates)
            candidate = self._lower_plan(plan, target)
            is_new = len(self._candidates) > count_before
            if plan.peak > target and candidate.peak > budget and not is_new:
                break  # lower targets lead to the same candidate
            if candidate.peak <= budget:
                is_faster = best is None or candidate.schedule.seconds < best.schedule.seconds
                best = candidate if is_faster else best
                choices = candidate.schedule.choices
                saves_all = not choices.recompute and not choices.saved_forms  # so that none can be faster
                if saves_all or budget - candidate.peak <= self._tolerance:
                    break
            if len(self._candidates) - count_at_start >= _MAX_CANDIDATES:
                break
            counted_peak = self._counted_peak(candidate)
            bounds = bounds.narrowed(target, counted_peak, candidate.peak)
            next_target = bounds.next_target_after(target, counted_peak, candidate.peak)
            if next_target is None:
                break
            target = next_target
        return best

    def _search_within(self, target: int) -> Solution | Infeasible:
        """Return the op-by-op search's plan within the target in bytes, cached."""
        if target not in self._results:
            self._results[target] = self._search.within(target)
        return self._results[target]

    def _candidate_of(self, plan: Solution) -> Candidate:
        """Return the candidate of a plan of the op-by-op search. The two ops of a convolution's derivative may become a
        single kernel in it (`Choices.joined`)."""
        return self.candidate(replace(plan.choices, joined=True))

    def _lower_plan(self, plan: Solution, target: int) -> Candidate:
        """Return the candidate of a plan of the op-by-op search, and record the target that it was planned for."""
        candidate = self._candidate_of(plan)
        self._targets.setdefault(candidate.schedule.choices, target)
        return candidate

    def _counted_peak(self, candidate: Candidate) -> int:
        """Return a candidate's peak as the op-by-op search counts it, in bytes; the target that it was planned for if
        that is smaller."""
        peak = levels(candidate.schedule, self._search.outside_memory).peak
        return min(peak, self._targets.get(candidate.schedule.choices, peak))

    def _fastest_known(self, budget: int) -> Candidate | None:
        """Return the fastest candidate so far whose peak is within the budget; None if there is none."""
        fit = (candidate for candidate in self.candidates if candidate.peak <= budget)
        return min(fit, key=lambda candidate: candidate.schedule.seconds, default=None)

    def _peaks_nearest_to(self, budget: int) -> tuple[int, int] | None:
        """Return (peak as the op-by-op search counts it, peak of the generated code) of the candidate nearest to the
        budget; None if there are no candidates."""
        nearest = min(self.candidates, key=lambda candidate: abs(candidate.peak - budget), default=None)
        return None if nearest is None else (self._counted_peak(nearest), nearest.peak)

    @property
    def _tolerance(self) -> int:
        """Bytes of a budget that may stay unused: a candidate that close to it ends the search."""
        return int(_CLOSE_TO_BUDGET * (self._search.save_all.peak - self._search.lower_bound))


def lower_and_predict(planned: Schedule, outside_memory: OutsideMemory) -> Candidate:
    """Lower a schedule of `as_fused`, which takes seconds, and predict its memory timeline."""
    lowered = fused(planned)
    codes = dict[str, inductor.Code]()
    for part in lowered.parts:
        with lowering(part.name):
            codes[part.name] = inductor.code_of(part.lowerable)
    return Candidate(lowered, codes, fused_timeline(lowered, codes, outside_memory))


def as_fusible(graph: JointGraph) -> JointGraph:
    """Return the graph for a search of steps of fused kernels: recomputing pointwise ops costs `FUSED_SHARE`, and ops
    have no in-place forms, since the compiler reuses memory itself."""
    return replace(graph, ops=tuple(_as_fusible_op(op) for op in graph.ops))


def _as_fusible_op(op: GraphOp) -> GraphOp:
    """Return the op with its cost in a step of fused kernels, see `as_fusible`."""
    seconds = op.seconds
    if torch.Tag.pointwise in getattr(op_schema.overload(op.target), "tags", ()):
        seconds *= FUSED_SHARE
    cheaper = op.cheaper_recompute  # a norm from its saved statistics: pointwise, too
    if cheaper is not None:
        cheaper = replace(cheaper, seconds=cheaper.seconds * FUSED_SHARE, overwrites=(), in_place_scratch=None)
    # without `overwrites` and `in_place_scratch` it has no in-place form
    return replace(op, seconds=seconds, cheaper_recompute=cheaper, overwrites=(), in_place_scratch=None)


@dataclass(frozen=True, slots=True)
class TargetBounds:
    """Bounds on the next target of the op-by-op search, from the targets so far and the peaks of their code. All are
    bytes.

    A target is the budget given to the search. A plan's *search peak* is counted op by op; its *peak* is that of the
    code generated for it.
    """

    budget: int
    tolerance: int
    """Bytes of the budget that may stay unused."""
    largest_fitting: int | None = None
    """Largest target whose candidate was within the budget."""
    smallest_over: int | None = None
    """Smallest target whose candidate exceeded the budget."""

    def first_target(self, known: tuple[int, int] | None = None) -> int:
        """Return the first target. ``known``: (search peak, peak) of a plan with a similar peak."""
        return self.budget if known is None else self._target_near_budget(*known)

    def narrowed(self, target: int, search_peak: int, peak: int) -> TargetBounds:
        """Return the bounds after a search for ``target`` whose plan has these peaks."""
        # All targets between the target and the search peak lead to the same plan.
        if peak <= self.budget:
            return replace(self, largest_fitting=max(target, search_peak, self.largest_fitting or 0))
        others = () if self.smallest_over is None else (self.smallest_over,)
        return replace(self, smallest_over=min(target, search_peak, *others))

    def next_target_after(self, target: int, search_peak: int, peak: int) -> int | None:
        """Return the next target after a search for ``target`` whose plan has these peaks; None if no other candidate
        is to be expected."""
        # All targets between the target and the search peak lead to the same plan. A larger target has to be above
        # both, a smaller one below both.
        fits_budget = peak <= self.budget
        end_of_same_plan = max(target, search_peak) if fits_budget else min(target, search_peak)
        next_target = self._target_near_budget(end_of_same_plan, peak)
        if self.largest_fitting is None or self.smallest_over is None:
            return next_target
        if self.smallest_over - self.largest_fitting <= self.tolerance:
            return None
        if self.largest_fitting < next_target < self.smallest_over:
            return next_target
        return (self.largest_fitting + self.smallest_over) // 2

    def _target_near_budget(self, search_peak: int, peak: int) -> int:
        """Return the target for a plan whose code's peak is near the budget, if code differs from plans as it does for
        a plan with these peaks.

        Half of the tolerance is subtracted, so that a code slightly larger than expected stays within the budget.
        """
        code_needs_less = search_peak - peak
        return self.budget + code_needs_less - self.tolerance // 2
