"""A model, a call and a budget -> Plan: capture, costs, search, check, and the plan as a value."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from memplan.devices import Device
from memplan.planning.baseline import baseline
from memplan.planning.calls import Call
from memplan.planning.capture import Captured, capture
from memplan.planning.costs import step_seconds, with_costs
from memplan.planning.decisions import decide
from memplan.planning.graph import RESIDENT, JointGraph
from memplan.planning.opaque import foreign
from memplan.planning.peaks import Surroundings, levels
from memplan.planning.plan import Plan, check_fingerprint, check_settings, names_of, optimizer_name
from memplan.planning.program import program
from memplan.planning.schedule import Schedule, schedule, with_fewest_pieces
from memplan.planning.search import Found, Heuristics, Infeasible, Search
from memplan.planning.shortfall import budget_error
from memplan.planning.trace import timeline_of
from memplan.planning.updates import Optimizer, surroundings
from memplan.planning.validate import validate
from memplan.trace.model import HOST


@dataclass(frozen=True)
class Settings:
    """What, besides a model and its call, a plan is made for."""

    budget: int
    """Bytes: all that is on the device at any moment of the step."""
    optimizer: Optimizer | None = None
    early: bool = False
    """Each parameter is updated in the backward pass, as soon as its gradient is complete."""
    held: bool = False
    """Gradients are there when the step begins."""
    device: Device | None = None
    """Whose kernels the seconds are of; None: this machine's, measured."""
    costs: Mapping[str, float] | str | None = None
    """Seconds by op, as an earlier plan measured them (`costs.costs_of`); "roofline": estimates, always the same."""
    heuristics: Heuristics = field(default_factory=Heuristics)
    plan: Plan | None = None
    """A plan whose choices are taken, instead of a search's."""


@dataclass(frozen=True)
class Planned:
    """A plan with what is needed to run it."""

    captured: Captured
    schedule: Schedule
    surroundings: Surroundings
    plan: Plan


class Planner:
    """Plans for one model. What does not hang on the budget is done once for each kind of call."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._studies: dict[Hashable, Study] = {}

    def planned(
        self, call: Call, settings: Settings, key: Hashable = None, captured: Captured | None = None
    ) -> Planned:
        """The fastest plan that the search finds within the budget.

        Args:
            call: what the model is called with; the model's and autocast's state are those of now.
            settings: the budget, and what else there is.
            key: tells this kind of call and state from others; calls with the same key are captured once.
            captured: the call, where it is captured already.

        Raises:
            BudgetError: no plan fits the budget.
            RecordingError, UsageError: the step cannot be captured.
        """
        return self.study(call, settings, key, captured).planned(settings)

    def study(self, call: Call, settings: Settings, key: Hashable = None, captured: Captured | None = None) -> Study:
        """What is known of a kind of call whatever the budget."""
        found = self._studies.get(key) if key is not None else None
        if found is None:
            captured = captured or capture(self._model, call)
            graph = _with_costs(captured.graph, settings)
            found = Study(self._model, call, replace(captured, graph=graph))
            if key is not None:
                self._studies[key] = found
        return found


def planned(model: nn.Module, call: Call, settings: Settings) -> Planned:
    """As `Planner.planned`, for one call."""
    return Planner(model).planned(call, settings)


_Kind = tuple[int, bool, bool]


class Study:
    """A captured call and what is known of it whatever the budget: peaks without a plan, the floor."""

    def __init__(self, model: nn.Module, call: Call, captured: Captured) -> None:
        self.model, self.call, self.captured = model, call, captured
        self._searches: dict[_Kind, Search] = {}
        self._eager: dict[_Kind, int] = {}

    def planned(self, settings: Settings) -> Planned:
        """The plan for one budget. Raises BudgetError."""
        graph, search = self.captured.graph, self.search(settings)
        around = search.surroundings or Surroundings()
        if settings.plan is not None:
            check_fingerprint(settings.plan, graph)
            made, bound = schedule(graph, settings.plan.choices), settings.plan.lower_bound_seconds
            check_settings(
                settings.plan, early=settings.early, held=settings.held, optimizer=settings.optimizer,
                state=around.by_cause().get("optimizer_state", 0), peak=levels(made, around).peak,
                budget=settings.budget,
            )  # fmt: skip
        else:
            found = search.within(settings.budget)
            made = schedule(graph, found.choices)
            if isinstance(found, Infeasible):
                raise budget_error(made, around, settings.budget)
            bound = found.lower_bound_seconds
        made = with_fewest_pieces(made, lambda one: _fits(one, around, settings.budget))
        validate(graph, made, budget=settings.budget, surroundings=around)
        return Planned(self.captured, made, around, self._plan(settings, made, around, bound))

    def frontier(self, settings: Settings, points: int) -> list[Found]:
        """Plans from all kept to the floor."""
        return self.search(settings).frontier(points)

    def search(self, settings: Settings) -> Search:
        """The search that all budgets share."""
        kind = _kind(settings)
        if kind not in self._searches:
            graph = self.captured.graph
            around = surroundings(self.model, graph, settings.optimizer, early=settings.early, held=settings.held)
            self._searches[kind] = Search(
                graph, around, early=settings.early, held=settings.held, heuristics=settings.heuristics
            )
        return self._searches[kind]

    def eager_peak(self, settings: Settings) -> int:
        """Predicted bytes of the step without a plan."""
        kind = _kind(settings)
        if kind not in self._eager:
            timeline = baseline(self.model, self.call, settings.optimizer, held=settings.held)
            around = self.search(settings).surroundings or Surroundings()
            self._eager[kind] = timeline.steps[-1].peak_allocated + sum(around.others.values())
        return self._eager[kind]

    def _plan(self, settings: Settings, made: Schedule, around: Surroundings, bound_seconds: float) -> Plan:
        graph, search = self.captured.graph, self.search(settings)
        return Plan(
            fingerprint=graph.fingerprint,
            torch=torch.__version__,
            device=HOST if settings.device is None else settings.device.name,
            budget=settings.budget,
            decisions=decide(graph, made),
            choices=made.choices,
            names=names_of(graph),
            predicted=timeline_of(made, around),
            eager_peak=self.eager_peak(settings),
            floor=search.floor_peak,
            lower_bound=search.lower_bound,
            seconds=made.seconds,
            step_seconds=step_seconds(graph) or None,
            lower_bound_seconds=bound_seconds,
            resident=_resident(graph, settings, around),
            program=program(made),
            notes=self._notes(settings),
            heuristics=dataclasses.asdict(settings.heuristics),
            optimizer=optimizer_name(settings.optimizer),
        )

    def _notes(self, settings: Settings) -> tuple[str, ...]:
        notes = []
        if settings.optimizer is None:
            notes.append("no optimizer was given: its state and update are not counted")
        if settings.device is not None:
            notes.append(f"seconds are estimates for {settings.device.title}; bytes are those of the CPU's kernels")
        notes.extend(map(str, self.captured.opaque))
        notes.extend(foreign(self.captured.graph))
        read = dict.fromkeys(self.call.name_of(condition.input) for condition in self.captured.conditions)
        if read:
            notes.append(f"values of {', '.join(read)} decide what is computed: a call where they decide otherwise is "
                         "planned anew")  # fmt: skip
        return tuple(notes)


def _with_costs(graph: JointGraph, settings: Settings) -> JointGraph:
    if isinstance(settings.costs, str):
        return with_costs(graph, device=settings.device, how="roofline")
    return with_costs(graph, device=settings.device, known=settings.costs)


def _fits(made: Schedule, around: Surroundings, budget: int) -> list[bool]:
    found = levels(made, around)
    return [level <= budget for level in (*found.forward, *found.backward)]


def _kind(settings: Settings) -> _Kind:
    return id(settings.optimizer), settings.early, settings.held


def _resident(graph: JointGraph, settings: Settings, around: Surroundings) -> dict[str, int]:
    """By cause, what is there all the time."""
    names = {"parameter": "weight", "buffer": "buffer", "constant": "buffer", "input": "input"}
    result: dict[str, int] = {}
    for value in graph.values:
        if value.kind in RESIDENT:
            cause = names[value.kind]
            result[cause] = result.get(cause, 0) + value.bytes
    if settings.held:
        given = (graph.values[of] for of, _ in graph.gradients)
        result["parameter_gradient"] = sum(value.own_bytes for value in given if value.kind == "parameter")
    for cause, size in around.by_cause().items():
        result[cause] = result.get(cause, 0) + size
    return result
