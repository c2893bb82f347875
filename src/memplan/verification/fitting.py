"""Plans for the calls of one module as they come: by the decisions for a larger call where they hold, else anew."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn

from memplan.errors import ScheduleError
from memplan.planning.calls import Call
from memplan.planning.capture import Captured, capture
from memplan.planning.graph import JointGraph, Value
from memplan.planning.peaks import Surroundings
from memplan.planning.planner import Planned, Planner, Settings
from memplan.planning.schedule import Schedule, schedule
from memplan.planning.validate import validate

_log = logging.getLogger("memplan")


@dataclass(frozen=True)
class Reused:
    """A call that runs by the decisions that were made for a larger one."""

    captured: Captured
    schedule: Schedule
    surroundings: Surroundings


class Plans:
    """What `rewriting.install` asks. ``made`` are the plans so far.

    Args:
        module: the module whose calls are planned.
        settings: whether gradients are held is told with each call.
        told: hears, in a sentence, of each call that is planned anew.
    """

    def __init__(self, module: nn.Module, settings: Settings, told: Callable[[str], None]) -> None:
        self._module, self._settings, self._told = module, settings, told
        self._planner = Planner(module)
        self._expected: Planned | None = None
        self.made: list[Planned] = []

    def expect(self, planned: Planned) -> None:
        """The next call that is asked about runs by this plan, which was made for it."""
        self._expected = planned
        self.made.append(planned)

    def __call__(self, call: Call, held: bool) -> Planned | Reused:
        """The plan of a call. Raises BudgetError where none fits."""
        expected = self._expected
        if expected is not None and expected.schedule.choices.held == held:
            self._expected = None
            return expected
        found = self._reused(capture(self._module, call), held) if self.made else None
        if found is not None:
            return found
        if self.made:
            self._told(f"planned anew: {_said(call, held)}")
        planned = self._planner.planned(call, replace(self._settings, held=held, plan=None))
        self.made.append(planned)
        return planned

    def _reused(self, captured: Captured, held: bool) -> Reused | None:
        """By the decisions for a call that differs in sizes alone and was no smaller, where they keep the budget."""
        graph = captured.graph
        for planned in self.made:
            other = planned.captured.graph
            if planned.schedule.choices.held != held or not same_structure(graph, other) or not _fits_in(graph, other):
                continue
            made = schedule(graph, planned.schedule.choices)
            try:
                validate(graph, made, budget=self._settings.budget, surroundings=planned.surroundings)
            except ScheduleError:  # other sizes, other aliases: then they are solved for
                continue
            return Reused(captured, made, planned.surroundings)
        return None


def same_structure(one: JointGraph, other: JointGraph) -> bool:
    """Whether two graphs have the same ops on the same values, sizes aside. Which encoded forms there are depends on
    sizes: where one is not there, the value is kept."""
    ours, theirs = _proper(one), _proper(other)
    return (
        len(ours) == len(theirs)
        and len(one.ops) == len(other.ops)
        and all((a.kind, a.base, a.path) == (b.kind, b.base, b.path) for a, b in zip(ours, theirs, strict=True))
        and all(
            (a.target, a.phase, a.outputs, a.reads) == (b.target, b.phase, b.outputs, b.reads)
            for a, b in zip(one.ops, other.ops, strict=True)
        )
        and (one.outputs, one.gradients, one.mutations) == (other.outputs, other.gradients, other.mutations)
    )


def _proper(graph: JointGraph) -> list[Value]:
    return [value for value in graph.values if value.kind != "encoded"]


def _fits_in(one: JointGraph, other: JointGraph) -> bool:
    return all(a.bytes <= b.bytes for a, b in zip(_proper(one), _proper(other), strict=True))


def _said(call: Call, held: bool) -> str:
    shapes = ", ".join("x".join(map(str, tensor.shape)) or "a scalar" for tensor in call.tensors)
    return f"a call with inputs {shapes or 'none'}{', with gradients held' if held else ''}"


def say(text: str) -> None:
    """Tell it where people look while they train."""
    _log.warning("memplan: %s", text)
