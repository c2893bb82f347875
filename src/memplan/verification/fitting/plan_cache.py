"""Plan each call of a module: reuse the plan of a larger call where it keeps the budget, else plan anew."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

from torch import nn

from memplan.errors import BudgetError, CompileError, RecordingError, ScheduleError, UsageError
from memplan.planning.capture.capture import Captured
from memplan.planning.capture.flat_call import Call
from memplan.planning.capture.replaced_calls import GroupGone
from memplan.planning.capture.side_effects import is_fake
from memplan.planning.capture.symbolic_shapes import Shapes
from memplan.planning.cost.optimizer_memory import memory_outside_graph
from memplan.planning.graph.placement import as_occupied
from memplan.planning.graph.resident import OutsideMemory
from memplan.planning.inductor.candidate_search import lower_and_predict
from memplan.planning.inductor.partition import Fused
from memplan.planning.planner import Planner
from memplan.planning.schedule.actions import Choices
from memplan.planning.schedule.reuse_choices import translate_choices, without_loss
from memplan.planning.schedule.scheduler import Schedule, schedule, with_fewest_piecewise_ops
from memplan.planning.settings import Settings
from memplan.planning.study import Planned, fits
from memplan.planning.tiles.program import NotTileable
from memplan.planning.validation.validate import validate
from memplan.rewriting.keys import Keys, UnkeyedError
from memplan.trace.recording.place import exception_of_user
from memplan.trace.recording.session import collector_held

_log = logging.getLogger("memplan")
_MAX_PLANS = 64
"""Number of plans kept for reuse: the first, from which most others follow, and the most recent ones."""
_MAX_CAPTURES = 256
"""Number of captures after which symbolic shapes start over, since their memory grows with each."""


@dataclass(frozen=True)
class Reused:
    """A call that runs by the decisions for a larger call."""

    captured: Captured
    schedule: Schedule
    outside_memory: OutsideMemory
    fused: Fused | None = None


class Plans:
    """The planner that `rewriting.install` calls.

    Args:
        module: the module whose calls are planned.
        settings: for all calls, except whether gradients accumulate, which each call says.
        budget: bytes.
        notify: receives a sentence for each call that is planned anew.
        joint: a plan of the module with its loss, whose decisions are reused where they keep the budget.
    """

    def __init__(
        self, module: nn.Module, settings: Settings, budget: int, notify: Callable[[str], None],
        joint: Planned | None = None,
    ) -> None:  # fmt: skip
        """``notify(text)`` is called for each call that is planned anew; ``joint`` is a plan of module and loss."""
        self._module, self._settings, self._budget, self._notify = module, settings, budget, notify
        self._planner, self._keys = Planner(module), Keys(module)
        self._expected: Planned | None = None
        """Plan of the next call, if it is known."""
        self._joint = joint
        """Its decisions are reused where they are within the budget; None: there is no such plan."""
        self.handed_over = False
        """Whether the user has the module: from then on a call that cannot be traced runs unplanned, even where the
        user's code raised the error."""
        self.plans: list[Planned] = []
        """Plans that later calls can reuse."""
        self._shapes, self._captures = self._new_shapes(), 0
        """Captures so far, to derive those of other sizes, and their number."""

    def expect(self, planned: Planned) -> None:
        """Use this plan for the next call."""
        self._expected = planned
        self.plans.append(planned)
        self._shapes = self._new_shapes()

    def release(self) -> None:
        """Drop references to the tensors of the last call."""
        self._keys.release()

    def __call__(self, call: Call, accumulate: bool) -> Planned | Reused:
        """Return the plan of a call. ``accumulate``: whether ``.grad`` is set when the call begins. Raises BudgetError
        if no plan fits, and UnkeyedError if the call cannot be captured or compiled."""
        expected = self._expected
        if expected is not None and expected.schedule.choices.gradients.accumulates == accumulate:
            self._expected = None
            self._shapes.record_sizes(call)
            return expected
        try:
            return self._plan(call, accumulate)
        except BudgetError as error:
            if not accumulate:
                raise
            raise error.but(
                found=f"{error.found}, and gradients are held when the call begins",
                do=f"{error.do}; or, unless they are to be added to, free them: zero_grad(set_to_none=True)",
            ) from None
        except (RecordingError, UsageError, CompileError) as error:
            if not self.handed_over and exception_of_user(error) is not None:
                raise
            raise UnkeyedError(str(error)) from error

    @collector_held()
    def _plan(self, call: Call, accumulate: bool) -> Planned | Reused:
        """Return the plan of a call: by the choices of an earlier plan where these keep the budget, else a new one."""
        captured = None
        reused = self._reuse_rewritten(call, accumulate)
        if reused is not None:
            self._shapes.record_sizes(call)
            return reused
        if self.plans or self._joint is not None:
            self._captures += 1
            if self._captures % _MAX_CAPTURES == 0:  # symbols for sizes take memory
                self._shapes = self._new_shapes()
            captured = self._shapes.capture(call)
            reused = self._reuse(captured, accumulate)
            if reused is not None:
                return reused
            shapes = ", ".join("x".join(map(str, tensor.shape)) or "a scalar" for tensor in call.tensors)
            gradients = ", with gradients held" if accumulate else ""
            self._notify(f"planned anew: a call with inputs {shapes or 'none'}{gradients}")
        else:
            self._shapes.record_sizes(call)
        if captured is not None and captured.channels_last:
            captured = None  # let the planner choose between the memory formats again
        settings, gradients = self._settings, self._settings.gradients.with_accumulation(accumulate)
        # With a plan of the user's, later plans compute in its precision.
        precision = settings.precision if settings.plan is None else settings.fixed_precision
        home = settings.home
        if not is_fake(self._module):  # since the first plan, other tensors came and went
            home = as_occupied(home, self._module)
        settings = replace(settings, gradients=gradients, plan=None, precision=precision, home=home)
        planned = self._planner.planned(call, settings, self._budget, captured=captured)
        self.plans.append(planned)
        if len(self.plans) > _MAX_PLANS:
            del self.plans[1]
        return planned

    def _new_shapes(self) -> Shapes:
        """Return an empty cache of captures, in the memory format of the first plan."""
        channels_last = bool(self.plans) and self.plans[0].captured.channels_last

        def key_without_tensors(call: Call) -> Hashable:
            """Return a key that is the same for tensors of all sizes: `Shapes` adds their dtypes and devices."""
            return self._keys.key(self._module, replace(call, tensors=()))

        return Shapes(self._module, key_without_tensors, self._settings.fixed_precision, channels_last=channels_last)

    def _reuse(self, captured: Captured, accumulate: bool) -> Reused | None:
        """Return the plan of a call by the choices of an earlier plan for a call with the same ops; None if these do
        not keep the budget. ``accumulate``: whether ``.grad`` is set when the call begins."""
        candidates = [planned for planned in self.plans if planned.schedule.choices.gradients.accumulates == accumulate]
        for planned in candidates:  # an equal graph: the calls differ in something that the graph does not depend on
            if planned.captured.graph.fingerprint == captured.graph.fingerprint:
                return Reused(captured, planned.schedule, planned.outside_memory, planned.fused)
        for planned in candidates:
            choices = translate_choices(planned.schedule.choices, planned.captured.graph, captured.graph)
            reused = None if choices is None else self._if_within_budget(captured, choices, planned.outside_memory)
            if reused is not None:
                return reused
        return self._reuse_joint(captured, accumulate)

    def _reuse_rewritten(self, call: Call, accumulate: bool) -> Reused | None:
        """Return the plan of a call by the tiles or kernels and the choices for module and loss together; None if there
        are none, if they do not apply without the loss, or if they do not keep the budget."""
        joint = self._joint
        if joint is None or joint.fused is not None or not (joint.plan.tiles or joint.plan.kernels):
            return None
        try:
            captured = self._planner.captured_as(joint.plan, call, self._settings)
        except (NotTileable, GroupGone, RecordingError) as reason:
            _log.info("the call is planned without the segments of the plan with its loss: %s", reason)
            return None
        return self._reuse_joint(captured, accumulate)

    def _reuse_joint(self, captured: Captured, accumulate: bool) -> Reused | None:
        """Return the plan of a call by the choices for module and loss together; None if these do not keep the budget
        with the loss outside of the plan."""
        joint, graph, settings = self._joint, captured.graph, self._settings
        if joint is None or joint.fused is not None:
            return None
        gradients = settings.gradients.with_accumulation(accumulate)
        choices = without_loss(replace(joint.schedule.choices, gradients=gradients), joint.captured.graph, graph)
        if choices is None:
            return None
        outside = memory_outside_graph(
            self._module, graph, settings.counted_optimizer, gradients, home=settings.home,
            loss_bytes_ratio=settings.loss_bytes_ratio, tensors=captured.constants,
        )  # fmt: skip
        fewest = with_fewest_piecewise_ops(
            schedule(graph, choices), lambda candidate: fits(candidate, outside, self._budget)
        )
        return self._if_within_budget(captured, fewest.choices, outside)

    def _if_within_budget(self, captured: Captured, choices: Choices, outside: OutsideMemory) -> Reused | None:
        """Return the plan of a call by these choices; None if it exceeds the budget. The choices are of another graph,
        and can take more in this: for other sizes torch may have other views and backward ops; or the loss was in the
        plan, and now is not."""
        graph, budget = captured.graph, self._budget
        candidate = schedule(graph, choices)
        try:
            validate(graph, candidate, budget=None if choices.fused else budget, outside_memory=outside)
        except ScheduleError:
            return None
        if not choices.fused:
            return Reused(captured, candidate, outside)
        compiled = lower_and_predict(candidate, outside)
        return Reused(captured, candidate, outside, compiled.fused) if compiled.peak <= budget else None


def warn(text: str) -> None:
    """Log a sentence as a warning of memplan, which people see while they train."""
    _log.warning("memplan: %s", text)
