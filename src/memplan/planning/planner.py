"""A model, a call and a budget -> Plan: capture, costs, search, check, and the plan as a value."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from torch import nn

from memplan.errors import BudgetError
from memplan.planning.capture.capture import Captured, capture
from memplan.planning.capture.flat_call import Call
from memplan.planning.graph.precision import EXACT, Precision
from memplan.planning.levers.lever import Situation
from memplan.planning.levers.registry import with_forms
from memplan.planning.precision_search import Reached, fastest, frontier, with_graph_way, with_lossy_way
from memplan.planning.settings import Settings
from memplan.planning.study import Planned, Study, _with_costs


class Planner:
    """Plans for one model. What does not hang on the budget is done once for each kind of call."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._studies: dict[tuple[Hashable, Precision], Study] = {}

    def planned(
        self, call: Call, settings: Settings, key: Hashable = None, captured: Captured | None = None
    ) -> Planned:
        """The fastest plan that the search finds within the budget; where lossy plans are allowed, and no precision is
        settled, in whichever of them it is the fastest (planning.tiers).

        Args:
            call: what the model is called with; the model's and autocast's state are those of now.
            settings: the budget, and what else there is.
            key: tells this kind of call and state from others; calls with the same key are captured once.
            captured: the call, where it is captured already.

        Raises:
            BudgetError: no plan fits the budget.
            RecordingError, UsageError: the step cannot be captured.
        """
        key = object() if key is None and (captured is None or settings.undecided) else key
        try:
            return self._within(call, settings, key, captured)
        except BudgetError as error:
            if settings.plan is not None or captured is not None:
                raise
            raise self._with_ways(error, call, settings, key) from None

    def _within(self, call: Call, settings: Settings, key: Hashable, captured: Captured | None = None) -> Planned:
        if settings.undecided:
            return fastest(lambda settled: self.study(call, settled, key), self._model, settings)
        return self.study(call, settings, key, captured).planned(settings)

    def _with_ways(self, error: BudgetError, call: Call, settings: Settings, key: Hashable) -> BudgetError:
        """The error, with what else would keep the budget."""
        if settings.engine == "inductor":
            error = with_graph_way(error, lambda one: self._within(call, one, key), settings)
        if settings.allow == "lossy":
            return error
        return with_lossy_way(error, lambda one: self.study(call, one, key), self._model, settings)

    def frontier(self, call: Call, settings: Settings, points: int, key: Hashable) -> tuple[Reached, ...]:
        """Plans from all kept to the floor, in each precision that is allowed (planning.tiers). ``key``: as for
        `planned`."""
        return frontier(lambda settled: self.study(call, settled, key), self._model, settings, points)

    def study(self, call: Call, settings: Settings, key: Hashable = None, captured: Captured | None = None) -> Study:
        """What is known of a kind of call in one precision, whatever the budget."""
        precision = settings.settled
        found = self._studies.get((key, precision)) if key is not None else None
        if found is None:
            plain = self._studies.get((key, EXACT)) if precision.lossy else None
            captured = captured or self._captured(call, key, precision)
            found = Study(self._model, call, replace(captured, graph=_with_costs(captured.graph, settings)), plain)
            if key is not None:
                self._studies[key, precision] = found
        return found

    def _captured(self, call: Call, key: Hashable, precision: Precision) -> Captured:
        """Captured once for whatever computes in the same precision."""
        for (other, known), study in self._studies.items():
            if key is not None and other == key and replace(known, save=precision.save) == precision:
                captured = study.captured
                return replace(captured, graph=with_forms(captured.graph, Situation(precision.save)))
        return capture(self._model, call, precision)


def planned(model: nn.Module, call: Call, settings: Settings) -> Planned:
    """As `Planner.planned`, for one call."""
    return Planner(model).planned(call, settings)
