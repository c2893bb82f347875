"""Plan the calls of one module: by the decisions for a larger call where those keep the budget, else anew."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

from torch import nn

from memplan.errors import BudgetError, CompileError, RecordingError, ScheduleError, UsageError
from memplan.planning.capture.capture import Captured
from memplan.planning.capture.flat_call import Call
from memplan.planning.capture.symbolic_shapes import Shapes
from memplan.planning.cost.optimizer_memory import surroundings
from memplan.planning.graph.resident import Surroundings
from memplan.planning.inductor.candidate_search import judged
from memplan.planning.inductor.partition import Fused
from memplan.planning.planner import Planner
from memplan.planning.schedule.actions import Choices
from memplan.planning.schedule.reuse_choices import translate_choices, without_loss
from memplan.planning.schedule.scheduler import Schedule, schedule, with_fewest_pieces
from memplan.planning.settings import Settings
from memplan.planning.study import Planned, fits
from memplan.planning.validation.validate import validate
from memplan.rewriting.keys import Keys, UnkeyedError
from memplan.trace.recording.place import exception_of_user
from memplan.trace.recording.session import collector_held

_log = logging.getLogger("memplan")
_MADE = 64
"""Number of plans that are kept: the first one, from which most others follow, and the last ones."""
_CAPTURED = 256
"""Number of calls after which their symbolic shapes are learnt anew, since these grow with each."""


@dataclass(frozen=True)
class Reused:
    """A call that runs by the decisions that were made for a larger one."""

    captured: Captured
    schedule: Schedule
    surroundings: Surroundings
    fused: Fused | None = None


class Plans:
    """The planner that `rewriting.install` calls. ``made``: the plans so far.

    Args:
        module: the module whose calls are planned.
        settings: for all calls, except that each says whether gradients are held.
        budget: bytes.
        told: receives a sentence for each call that is planned anew.
        joint: a plan of the module with its loss, whose decisions are taken where they keep the budget.
    """

    def __init__(
        self, module: nn.Module, settings: Settings, budget: int, told: Callable[[str], None],
        joint: Planned | None = None,
    ) -> None:  # fmt: skip
        self._module, self._settings, self._budget, self._told = module, settings, budget, told
        self._planner, self._keys = Planner(module), Keys(module)
        self._expected: Planned | None = None
        self._joint = joint
        self.theirs = False
        """Whether the module was handed over: then a call that cannot be traced runs as it is, whoever raised that."""
        self.made: list[Planned] = []
        self._shapes, self._captured = self._new_shapes(), 0

    def expect(self, planned: Planned) -> None:
        """Use this plan for the next call, for which it was made."""
        self._expected = planned
        self.made.append(planned)
        self._shapes = self._new_shapes()

    def release(self) -> None:
        """Hold no tensor of the last call."""
        self._keys.release()

    def __call__(self, call: Call, held: bool) -> Planned | Reused:
        """Return the plan of a call.

        Raises:
            BudgetError: none fits.
            UnkeyedError: the call cannot be captured, or not be compiled.
        """
        expected = self._expected
        if expected is not None and expected.schedule.choices.gradients.adds == held:
            self._expected = None
            self._shapes.known(call)
            return expected
        try:
            return self._planned(call, held)
        except BudgetError as error:
            if not held:
                raise
            raise _with_gradients(error) from None
        except (RecordingError, UsageError, CompileError) as error:
            if not self.theirs and exception_of_user(error) is not None:
                raise
            # the user's own call was planned before: this is a later one
            raise UnkeyedError(str(error)) from error

    @collector_held()
    def _planned(self, call: Call, held: bool) -> Planned | Reused:
        captured = None
        if self.made or self._joint is not None:
            captured = self._capture(call)
            found = self._reused(captured, held)
            if found is not None:
                return found
            self._told(f"planned anew: {_said(call, held)}")
        else:
            self._shapes.known(call)
        if captured is not None and captured.relaid:
            captured = None  # which layout is better is decided anew
        given = self._settings
        precision = given.precision if given.plan is None else given.settled  # no lower than the given plan's
        planned = self._planner.planned(
            call,
            replace(given, gradients=given.gradients.held(held), plan=None, precision=precision),
            self._budget,
            captured=captured,
        )
        self.made.append(planned)
        if len(self.made) > _MADE:
            del self.made[1]
        return planned

    def _capture(self, call: Call) -> Captured:
        self._captured += 1
        if self._captured % _CAPTURED == 0:
            self._shapes = self._new_shapes()
        return self._shapes.captured(call)

    def _new_shapes(self) -> Shapes:
        relaid = bool(self.made) and self.made[0].captured.relaid
        return Shapes(self._module, self._kind, self._settings.settled, relaid=relaid)

    def _kind(self, call: Call) -> Hashable:
        """Return the key of a call and of the module's state, without the call's tensors."""
        return self._keys.key(self._module, replace(call, tensors=()))

    def _reused(self, captured: Captured, held: bool) -> Reused | None:
        """Reuse the decisions for a call that was no smaller and differs in sizes alone, if they keep the budget."""
        alike = [one for one in self.made if one.schedule.choices.gradients.adds == held]
        same = next((one for one in alike if one.captured.graph.fingerprint == captured.graph.fingerprint), None)
        if same is not None:  # what differs does not change the graph: a note in a model's config, say
            return Reused(captured, same.schedule, same.surroundings, same.fused)
        for planned in alike:
            taken = translate_choices(planned.schedule.choices, planned.captured.graph, captured.graph)
            found = None if taken is None else self._within(captured, taken, planned.surroundings)
            if found is not None:
                return found
        return self._as_with_loss(captured, held)

    def _as_with_loss(self, captured: Captured, held: bool) -> Reused | None:
        """Reuse the decisions that were made for the module together with its loss, if they keep the budget."""
        joint, graph, given = self._joint, captured.graph, self._settings
        if joint is None or joint.fused is not None:
            return None
        gradients = given.gradients.held(held)
        choices = without_loss(replace(joint.schedule.choices, gradients=gradients), joint.captured.graph, graph)
        if choices is None:
            return None
        around = surroundings(
            self._module, graph, given.optimizer, gradients, home=given.home, outside=given.outside
        )  # fmt: skip
        made = with_fewest_pieces(schedule(graph, choices), lambda one: fits(one, around, self._budget))
        return self._within(captured, made.choices, around)

    def _within(self, captured: Captured, choices: Choices, around: Surroundings) -> Reused | None:
        """Schedule a call by these decisions; None where they break the budget: other sizes can have other aliases."""
        graph, budget = captured.graph, self._budget
        made = schedule(graph, choices)
        try:
            validate(graph, made, budget=None if choices.fused else budget, surroundings=around)
        except ScheduleError:
            return None
        if not choices.fused:
            return Reused(captured, made, around)
        found = judged(made, around)
        return Reused(captured, made, around, found.fused) if found.peak <= budget else None


def _with_gradients(error: BudgetError) -> BudgetError:
    """Add to the error of a call that begins with gradients held that they take memory, and how to free them."""
    return error.but(
        found=f"{error.found}, and gradients are held when the call begins",
        do=f"{error.do}; or, unless they are to be added to, free them: zero_grad(set_to_none=True)",
    )


def _said(call: Call, held: bool) -> str:
    shapes = ", ".join("x".join(map(str, tensor.shape)) or "a scalar" for tensor in call.tensors)
    return f"a call with inputs {shapes or 'none'}{', with gradients held' if held else ''}"


def say(text: str) -> None:
    """Log it where people look while they train."""
    _log.warning("memplan: %s", text)
