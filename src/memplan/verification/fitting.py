"""Plans for the calls of one module as they come: by the decisions for a larger call where they hold, else anew."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

from torch import nn

from memplan.errors import ScheduleError
from memplan.planning.calls import Call
from memplan.planning.capture import Captured
from memplan.planning.peaks import Surroundings
from memplan.planning.planner import Planned, Planner, Settings
from memplan.planning.schedule import Schedule, schedule
from memplan.planning.shapes import Shapes, taken_over
from memplan.planning.validate import validate
from memplan.rewriting.keys import Keys

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
        self._planner, self._keys = Planner(module), Keys(module)
        self._shapes = Shapes(module, self._kind)
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
            self._shapes.known(call)
            return expected
        captured = None
        if self.made:
            captured = self._shapes.captured(call)
            found = self._reused(captured, held)
            if found is not None:
                return found
            self._told(f"planned anew: {_said(call, held)}")
        else:
            self._shapes.known(call)
        planned = self._planner.planned(call, replace(self._settings, held=held, plan=None), captured=captured)
        self.made.append(planned)
        return planned

    def _kind(self, call: Call) -> Hashable:
        """What tells a call and the module's state from others, but for the call's tensors."""
        return self._keys.key(self._module, replace(call, tensors=()))

    def _reused(self, captured: Captured, held: bool) -> Reused | None:
        """By the decisions for a call that differs in sizes alone and was no smaller, where they keep the budget."""
        graph = captured.graph
        for planned in self.made:
            choices = planned.schedule.choices
            taken = taken_over(choices, planned.captured.graph, graph) if choices.held == held else None
            if taken is None:
                continue
            made = schedule(graph, taken)
            try:
                validate(graph, made, budget=self._settings.budget, surroundings=planned.surroundings)
            except ScheduleError:  # other sizes, other aliases: then they are solved for
                continue
            return Reused(captured, made, planned.surroundings)
        return None


def _said(call: Call, held: bool) -> str:
    shapes = ", ".join("x".join(map(str, tensor.shape)) or "a scalar" for tensor in call.tensors)
    return f"a call with inputs {shapes or 'none'}{', with gradients held' if held else ''}"


def say(text: str) -> None:
    """Tell it where people look while they train."""
    _log.warning("memplan: %s", text)
