"""Plan one captured call for any budget."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from memplan.errors import BudgetError, CompileError, MemplanError
from memplan.explanation.course import Course
from memplan.explanation.over_time import course_of
from memplan.planning.capture.capture import Captured
from memplan.planning.capture.flat_call import Call
from memplan.planning.capture.opaque_calls import foreign
from memplan.planning.capture.recapture import relaid
from memplan.planning.cost import cpu_workspace
from memplan.planning.cost.cuda_workspace import on_card
from memplan.planning.cost.eager_baseline import AS_MODELLED, baseline
from memplan.planning.cost.op_timing import seconds_to_measure, step_seconds, with_costs
from memplan.planning.cost.optimizer_memory import surroundings
from memplan.planning.graph.joint_graph import RESIDENT, JointGraph
from memplan.planning.graph.precision import UNSCALED
from memplan.planning.graph.resident import Surroundings
from memplan.planning.inductor.candidate_search import Candidate, Fusing, as_fusible
from memplan.planning.inductor.fusion_report import UNTOLD, fusion_of, unfused
from memplan.planning.inductor.partition import Fused
from memplan.planning.levers.lever import GradientUse, Situation
from memplan.planning.levers.registry import with_forms
from memplan.planning.plan.budget_error import budget_error
from memplan.planning.plan.decisions import decide
from memplan.planning.plan.plan import Plan, check_fingerprint, check_forms, check_settings, names_of, optimizer_name
from memplan.planning.plan.precision_report import cast_copies, lowered
from memplan.planning.schedule.actions import Choices
from memplan.planning.schedule.byte_levels import levels
from memplan.planning.schedule.codegen import program
from memplan.planning.schedule.scheduler import Schedule, frees_gradient, schedule, with_fewest_pieces
from memplan.planning.schedule.to_trace import timeline_of, trace_of
from memplan.planning.search.search import Found, Infeasible, Search
from memplan.planning.settings import Engine, Settings
from memplan.planning.validation.validate import validate
from memplan.simulation.timeline import Timeline


@dataclass(frozen=True)
class Planned:
    """A plan with what is needed to run it."""

    captured: Captured
    schedule: Schedule
    surroundings: Surroundings
    plan: Plan
    fused: Fused | None = None
    """Compiled parts, for the engine ``inductor``."""


_Kind = tuple[int, GradientUse, Engine]


_MOMENTS = 800
"""Moments of a plan's courses, about."""
SLOWER = 1.1
"""A step in channels last that takes more than so many times what it takes as written, op by op, is for budgets that
the latter does not keep: much of what this layout is for (norms and activations that fuse with less traffic) is not in
these seconds."""


@dataclass(frozen=True)
class _Bounds:
    """Reference figures of a plan: floor and lower bounds."""

    predicted: Timeline
    floor: int
    lower: int
    seconds: float


class Study:
    """A captured call and what is known of it whatever the budget: peaks without a plan, the floor.

    ``plain``: the same in the precision and the layout that the step is written in, where these are others.
    """

    def __init__(self, model: nn.Module, call: Call, captured: Captured, plain: Study | None = None) -> None:
        self.model, self.call, self.captured, self.plain = model, call, captured, plain
        self._searches: dict[_Kind, Search] = {}
        self._fusings: dict[_Kind, Fusing] = {}
        self._eager: dict[_Kind, tuple[int, Course]] = {}
        self._relaid: Study | None = None
        self._looked = captured.relaid

    def planned(self, settings: Settings, budget: int) -> Planned:
        """Return the plan for a budget in bytes. Raises BudgetError."""
        if settings.engine == "inductor":
            return self._in_either_layout(settings, budget)
        graph, search = self.captured.graph, self.search(settings)
        around = search.around
        if settings.plan is not None:
            made, bound = schedule(graph, settings.plan.choices), settings.plan.lower_bound_seconds
            self._check(settings.plan, settings, budget, timeline_of(made, around).peak_reserved)
            made = with_fewest_pieces(made, lambda one: fits(one, around, budget))
        else:
            made, bound = self._within(settings, budget)
        validate(graph, made, budget=budget, surroundings=around)
        timeline = timeline_of(made, around)
        bounds = _Bounds(timeline, min(self._floor(settings), timeline.peak_reserved), search.lower_bound, bound)
        return Planned(self.captured, made, around, self._plan(settings, budget, made, around, bounds))

    def _within(self, settings: Settings, budget: int) -> tuple[Schedule, float]:
        """Return the schedule for a budget, and a lower bound of the seconds that any adds.

        On a card the allocator holds more than what is alive. By so much less it is planned again.
        """
        graph, search, target = self.captured.graph, self.search(settings), budget
        around = search.around
        while True:
            found = search.within(target)
            made = schedule(graph, found.choices)
            if isinstance(found, Infeasible):
                if timeline_of(made, around).peak_reserved <= budget:
                    return made, 0.0
                raise budget_error(made, around, budget)
            made = with_fewest_pieces(made, partial(fits, around=around, budget=target))
            over = timeline_of(made, around).peak_reserved - budget
            if over <= 0:
                return made, found.lower_bound_seconds
            target = min(target, levels(made, around).peak) - over

    def _floor(self, settings: Settings) -> int:
        """Return the bytes of the smallest plan that was found."""
        search = self.search(settings)
        if settings.home.card is None:
            return search.floor_peak
        return timeline_of(schedule(self.captured.graph, search.floor().choices), search.around).peak_reserved

    def _in_either_layout(self, settings: Settings, budget: int) -> Planned:
        """Return the plan in the first layout in which it fits."""
        layouts, errors = self.layouts(settings), list[MemplanError]()
        if settings.plan is not None:
            layouts = [one for one in layouts if one.captured.graph.fingerprint == settings.plan.fingerprint] or [self]
        for one in layouts:
            try:
                return one._fused(settings, budget)
            except (BudgetError, CompileError) as error:  # a failure in one layout says nothing of the other
                errors.append(error)
        refused = [error for error in errors if isinstance(error, BudgetError)]
        raise min(refused, key=lambda error: error.smallest_budget) if refused else errors[-1]

    def layouts(self, settings: Settings) -> list[Study]:
        """Return the studies for fused kernels: with convolutions in channels last where that is as good, and as
        written. A layout that takes much longer comes last."""
        if not settings.relaid:
            return [self]
        if not self._looked:
            self._looked = True
            found = relaid(self.model, self.call, self.captured, settings.settled)
            if found is not None:
                found = replace(found, graph=_with_costs(found.graph, settings, share=0.5))  # most are known already
                self._relaid = Study(self.model, self.call, found, self.plain or self)
        if self._relaid is None:
            return [self]
        slower = _is_slower(self._relaid.captured.graph, self.captured.graph)
        return [self, self._relaid] if slower else [self._relaid, self]

    def _fused(self, settings: Settings, budget: int) -> Planned:
        fusing, search = self._fusing(settings), self.search(settings)
        if settings.plan is not None:
            found = fusing.candidate(settings.plan.choices)
            self._check(settings.plan, settings, budget, found.peak)
        else:
            found = fusing.within(budget)
            if found is None:
                lowest = fusing.lowest
                raise budget_error(lowest.schedule, search.around, budget, lowest.timeline)
        validate(search.graph, found.schedule, surroundings=search.around)
        bounds = _Bounds(found.timeline, min(one.peak for one in fusing.known), self.least(settings), 0.0)
        plan = self._plan(settings, budget, found.schedule, search.around, bounds)
        plan = _with_fusion(plan, found, settings)
        captured = replace(self.captured, graph=search.graph)
        return Planned(captured, found.schedule, search.around, plan, found.fused)

    def _check(self, plan: Plan, settings: Settings, budget: int, peak: int) -> None:
        """Refuse a plan that is for something else."""
        around = self.search(settings).around
        check_fingerprint(plan, self.captured.graph)
        check_forms(plan, self.captured.graph)
        check_settings(
            plan, gradients=settings.gradients, fused=settings.engine == "inductor",
            optimizer=settings.optimizer, state=around.by_cause().get("optimizer_state", 0), peak=peak,
            budget=budget,
        )  # fmt: skip

    def least(self, settings: Settings) -> int:
        """Return the bytes that remain when the backward pass has ended, whatever is planned."""
        search = self.search(settings)
        graph, choices = search.graph, Choices(gradients=settings.gradients)
        stay = (of for of, _ in graph.gradients if not frees_gradient(graph, choices, of))
        there = sum(_resident(graph, settings, search.around).values())
        return there + sum(graph.values[of].own_bytes for of in stay)

    def frontier(self, settings: Settings, points: int) -> list[Found]:
        """Return plans from all kept to the floor; of fused kernels in the first layout."""
        if settings.engine == "graph":
            return self.search(settings).frontier(points)
        first, *_ = self.layouts(settings)
        if first is not self:
            return first.frontier(settings, points)
        return self._fusing(settings).frontier(points)

    def search(self, settings: Settings) -> Search:
        """Return the search that all budgets share."""
        kind = _kind(settings)
        if kind not in self._searches:
            graph, steady = self.captured.graph, _steady(self.captured.graph, settings)
            if settings.engine == "inductor":
                graph, steady = as_fusible(graph), steady and as_fusible(steady)
            around = surroundings(
                self.model, graph, settings.optimizer, settings.gradients, home=settings.home, outside=settings.outside
            )
            self._searches[kind] = Search(
                graph, around, gradients=settings.gradients, heuristics=settings.heuristics,
                steady=steady,
            )  # fmt: skip
        return self._searches[kind]

    def _fusing(self, settings: Settings) -> Fusing:
        kind = _kind(settings)
        if kind not in self._fusings:
            self._fusings[kind] = Fusing(self.search(settings))
        return self._fusings[kind]

    def eager_peak(self, settings: Settings) -> int:
        """Return the predicted bytes of the step without a plan."""
        return self._without_plan(settings)[0]

    def _without_plan(self, settings: Settings) -> tuple[int, Course]:
        """Return the predicted bytes of the step without a plan, and its course."""
        if self.plain is not None:
            return self.plain._without_plan(settings)
        kind = _kind(settings)
        if kind not in self._eager:
            known = partial(cpu_workspace.known, limit=cpu_workspace.LIMIT) if _measures(settings) else AS_MODELLED
            trace, timeline = baseline(
                self.model, self.call, settings.optimizer, held=settings.gradients.adds, home=settings.home, known=known
            )
            others = self.search(settings).around.others
            beside = {cause: size for cause, size in others.items() if cause != "workspace"}  # the recording has these
            course = course_of(trace, timeline, moments=_MOMENTS).step(len(timeline.steps) - 1).beside(beside)
            self._eager[kind] = timeline.steps[-1].peak_reserved + sum(beside.values()), course
        return self._eager[kind]

    def _plan(self, settings: Settings, budget: int, made: Schedule, around: Surroundings, bounds: _Bounds) -> Plan:
        graph, precision = self.captured.graph, settings.settled
        plain = graph if self.plain is None else self.plain.captured.graph
        eager_peak, eager_course = self._without_plan(settings)
        course = None if made.choices.fused else course_of(trace_of(made, around), bounds.predicted, moments=_MOMENTS)
        return Plan(
            fingerprint=graph.fingerprint,
            torch=torch.__version__,
            device=settings.home.target.name if settings.device is None else settings.device.name,
            budget=budget,
            decisions=(*lowered(made.graph, precision), *decide(made.graph, made)),
            choices=made.choices,
            names=names_of(graph),
            predicted=bounds.predicted,
            eager_peak=eager_peak,
            floor=bounds.floor,
            lower_bound=bounds.lower,
            seconds=made.seconds,
            step_seconds=step_seconds(plain) or None,
            lower_bound_seconds=bounds.seconds,
            resident=_resident(graph, settings, around),
            program=program(made),
            notes=self._notes(settings),
            heuristics=dataclasses.asdict(settings.heuristics),
            optimizer=optimizer_name(settings.optimizer),
            precision=precision,
            base_seconds=(step_seconds(graph) or None) if precision.compute or _is_slower(graph, plain) else None,
            cast_copies=cast_copies(made) if precision.compute else 0,
            course=None if course is None else replace(course, alive=(), segments=()),
            eager_course=replace(eager_course, alive=(), segments=()),
        )

    def _notes(self, settings: Settings) -> tuple[str, ...]:
        notes = []
        if settings.optimizer is None:
            notes.append("no optimizer was given: its state and update are not counted")
        if settings.settled.compute == "float16":
            notes.append(UNSCALED)
        if settings.device is not None:
            kernels = "the CPU's kernels" if settings.home.card is None else f"kernels of {settings.home.card.title}"
            notes.append(f"seconds are estimates for {settings.device.title}; bytes are those of {kernels}")
        notes.extend(map(str, self.captured.opaque))
        notes.extend(foreign(self.captured.graph))
        if self.captured.printed:
            notes.append("what forward() prints is not shown while it is traced: it has no values then")
        read = dict.fromkeys(self.call.name_of(condition.input) for condition in self.captured.conditions)
        if read:
            notes.append(f"values of {', '.join(read)} decide what is computed: a call where they decide otherwise is "
                         "planned anew")  # fmt: skip
        return tuple(notes)


def _is_slower(graph: JointGraph, plain: JointGraph) -> bool:
    return (step_seconds(graph) or 0.0) > SLOWER * (step_seconds(plain) or 0.0)


def _with_fusion(plan: Plan, found: Candidate, settings: Settings) -> Plan:
    made = fusion_of(found.fused, found.codes, settings.device or settings.home.card)
    return replace(plan, fusion=made, notes=(*plan.notes, *(unfused(made) if made else (UNTOLD,))))


def _with_costs(graph: JointGraph, settings: Settings, *, share: float = 1.0) -> JointGraph:
    """``share``: of the seconds that measuring may take."""
    card = settings.device or settings.home.card
    if settings.host_memory and card is not None and settings.engine == "graph":
        graph = with_forms(graph, Situation(settings.settled.save, card))
    if settings.home.card is not None:
        graph = on_card(graph, settings.home.card).graph
    if isinstance(settings.costs, str):
        return with_costs(graph, device=card, how="roofline")
    begin = time.perf_counter()
    if _measures(settings):
        graph = cpu_workspace.with_measured_scratch(graph)
    limit = share * seconds_to_measure(settings.home.name)
    limit = max(limit - (time.perf_counter() - begin), limit / 2)  # kernels that ran are warm: timing takes less
    return with_costs(graph, device=settings.device, known=settings.costs, on=settings.home.name, limit=limit)


def _measures(settings: Settings) -> bool:
    """Return whether kernels' workspaces are measured: the step is planned for this machine's CPU, and need not be
    planned the same elsewhere."""
    return settings.device is None and settings.home.card is None and not isinstance(settings.costs, str)


def _steady(graph: JointGraph, settings: Settings) -> JointGraph | None:
    """Return the graph with seconds that are the same on every machine; None where it has these already."""
    if settings.device is not None or isinstance(settings.costs, str):
        return None
    return with_costs(graph, device=settings.home.card, how="roofline")


def fits(made: Schedule, around: Surroundings, budget: int) -> list[bool]:
    """Return for each action, forward and backward, whether its bytes are within a budget."""
    found = levels(made, around)
    return [level <= budget for level in (*found.forward, *found.backward)]


def _kind(settings: Settings) -> _Kind:
    return id(settings.optimizer), settings.gradients, settings.engine


def _resident(graph: JointGraph, settings: Settings, around: Surroundings) -> dict[str, int]:
    """Return the bytes that are always there, by cause."""
    names = {"parameter": "weight", "buffer": "buffer", "constant": "buffer", "input": "input"}
    result: dict[str, int] = {}
    for value in graph.values:
        if value.kind in RESIDENT:
            cause = names[value.kind]
            result[cause] = result.get(cause, 0) + value.bytes
    if settings.gradients.adds:
        given = (graph.values[of] for of, _ in graph.gradients)
        result["parameter_gradient"] = sum(value.own_bytes for value in given if value.kind == "parameter")
    for cause, size in around.by_cause().items():
        result[cause] = result.get(cause, 0) + size
    return result
