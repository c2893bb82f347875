"""Plan each call of a module: reuse the plan of a larger call where it keeps the budget, else plan anew."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

from torch import nn

from memplan.errors import BudgetError, CompileError, RecordingError, ScheduleError, UsageError
from memplan.planning.capture.capture import Captured
from memplan.planning.capture.flat_call import Call
from memplan.planning.capture.symbolic_shapes import Shapes
from memplan.planning.cost.optimizer_memory import memory_outside_graph
from memplan.planning.graph.resident import OutsideMemory
from memplan.planning.inductor.candidate_search import lower_and_predict
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
        self._module, self._settings, self._budget, self._notify = module, settings, budget, notify
        self._planner, self._keys = Planner(module), Keys(module)
        self._expected: Planned | None = None
        self._joint = joint
        self.handed_over = False
        """Whether the user has the module: from then on a call that cannot be traced runs unplanned, even where the
        user's code raised the error."""
        self.plans: list[Planned] = []
        """Plans that later calls can reuse."""
        self._shapes, self._captures = self._new_shapes(), 0

    def expect(self, planned: Planned) -> None:
        """Use this plan for the next call."""
        self._expected = planned
        self.plans.append(planned)
        self._shapes = self._new_shapes()

    def release(self) -> None:
        """Drop references to the tensors of the last call."""
        self._keys.release()

    def __call__(self, call: Call, accumulate: bool) -> Planned | Reused:
        """Return the plan of a call. ``accumulate``: whether ``.grad`` is set when the call begins.

        Raises:
            BudgetError: no plan fits.
            UnkeyedError: the call cannot be captured or compiled.
        """
        expected = self._expected
        if expected is not None and expected.schedule.choices.gradients.adds == accumulate:
            self._expected = None
            self._shapes.known(call)
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
        if self.plans or self._joint is not None:
            captured = self._capture(call)
            reused = self._reuse(captured, accumulate)
            if reused is not None:
                return reused
            shapes = ", ".join("x".join(map(str, tensor.shape)) or "a scalar" for tensor in call.tensors)
            gradients = ", with gradients held" if accumulate else ""
            self._notify(f"planned anew: a call with inputs {shapes or 'none'}{gradients}")
        else:
            self._shapes.known(call)
        if captured is not None and captured.channels_last:
            captured = None  # let the planner choose between the memory formats again
        settings = self._settings
        precision = (
            settings.precision if settings.plan is None else settings.fixed_precision
        )  # no lower than that plan's
        planned = self._planner.planned(
            call,
            replace(settings, gradients=settings.gradients.held(accumulate), plan=None, precision=precision),
            self._budget,
            captured=captured,
        )
        self.plans.append(planned)
        if len(self.plans) > _MAX_PLANS:
            del self.plans[1]
        return planned

    def _capture(self, call: Call) -> Captured:
        """Capture a call, with symbols for sizes where possible; all symbols are dropped now and then to free
        memory."""
        self._captures += 1
        if self._captures % _MAX_CAPTURES == 0:
            self._shapes = self._new_shapes()
        return self._shapes.captured(call)

    def _new_shapes(self) -> Shapes:
        channels_last = bool(self.plans) and self.plans[0].captured.channels_last
        return Shapes(
            self._module, self._key_without_tensors, self._settings.fixed_precision, channels_last=channels_last
        )

    def _key_without_tensors(self, call: Call) -> Hashable:
        return self._keys.key(self._module, replace(call, tensors=()))

    def _reuse(self, captured: Captured, accumulate: bool) -> Reused | None:
        """Reuse the plan of a call with the same ops and no smaller sizes, or return None if none keeps the budget."""
        candidates = [planned for planned in self.plans if planned.schedule.choices.gradients.adds == accumulate]
        for planned in candidates:  # an equal graph: the calls differ in something that the graph does not depend on
            if planned.captured.graph.fingerprint == captured.graph.fingerprint:
                return Reused(captured, planned.schedule, planned.outside_memory, planned.fused)
        for planned in candidates:
            choices = translate_choices(planned.schedule.choices, planned.captured.graph, captured.graph)
            reused = None if choices is None else self._if_within_budget(captured, choices, planned.outside_memory)
            if reused is not None:
                return reused
        return self._reuse_joint(captured, accumulate)

    def _reuse_joint(self, captured: Captured, accumulate: bool) -> Reused | None:
        """Reuse the plan of module and loss, if it keeps the budget with the loss outside, else return None."""
        joint, graph, settings = self._joint, captured.graph, self._settings
        if joint is None or joint.fused is not None:
            return None
        gradients = settings.gradients.held(accumulate)
        choices = without_loss(replace(joint.schedule.choices, gradients=gradients), joint.captured.graph, graph)
        if choices is None:
            return None
        context = memory_outside_graph(
            self._module,
            graph,
            settings.optimizer,
            gradients,
            home=settings.home,
            loss_bytes_ratio=settings.loss_bytes_ratio,
        )
        fewest = with_fewest_pieces(schedule(graph, choices), lambda candidate: fits(candidate, context, self._budget))
        return self._if_within_budget(captured, fewest.choices, context)

    def _if_within_budget(self, captured: Captured, choices: Choices, context: OutsideMemory) -> Reused | None:
        """Schedule a call by these decisions, or return None if that breaks the budget, as tensors of other sizes can
        have other aliases."""
        graph, budget = captured.graph, self._budget
        candidate = schedule(graph, choices)
        try:
            validate(graph, candidate, budget=None if choices.fused else budget, outside_memory=context)
        except ScheduleError:
            return None
        if not choices.fused:
            return Reused(captured, candidate, context)
        compiled = lower_and_predict(candidate, context)
        return Reused(captured, candidate, context, compiled.fused) if compiled.peak <= budget else None


def warn(text: str) -> None:
    """Log a sentence as a warning of memplan, which people see while they train."""
    _log.warning("memplan: %s", text)
