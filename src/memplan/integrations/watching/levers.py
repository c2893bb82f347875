"""After an out-of-memory error: prediction of the failed step and a plan that fits, both on fake tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch import nn

from memplan.integrations.described_calls import copy_without_hooks, optimizer_factory, options_of
from memplan.integrations.watching.inputs import LastInputs
from memplan.integrations.watching.prediction import Prediction
from memplan.integrations.watching.window import Subject
from memplan.planning.api import plan_or_floor
from memplan.trace.record import record_for
from memplan.trace.recording.session import Target
from memplan.trace.records import HOST
from memplan.trace.step import StepOptions, build_of


def levers_for(subject: Subject, inputs: LastInputs, budget: int) -> dict[str, Any]:
    """Plan a step of the model with its last inputs for a budget; return a summary for JSON.

    The loss is the default of `memplan.explain`, and the user's hooks are left out.

    Returns:
        ``fits`` True with ``peak`` and ``levers`` ({lever: {values, bytes}}); False with ``smallest_budget``; None with
        ``why_not`` if the step cannot be planned at all.
    """
    try:
        args, kwargs = inputs.specs()
        step = StepOptions(args, kwargs, optimizer=_optimizer(subject))
        step_plan = plan_or_floor(
            _build_copy(subject), step, budget, None if subject.card is None else subject.card.name
        )
    except Exception as error:  # such as a model that cannot be captured
        return {"fits": None, "budget": budget, "why_not": f"{type(error).__name__}: {str(error).splitlines()[0]:.300}"}
    if isinstance(step_plan, int):
        return {"fits": False, "budget": budget, "smallest_budget": step_plan}
    levers: dict[str, dict[str, int]] = defaultdict(lambda: {"values": 0, "bytes": 0})
    for decision in step_plan.decisions:
        if decision.lever != "keep":
            levers[decision.lever]["values"] += 1
            levers[decision.lever]["bytes"] += decision.bytes
    return {
        "fits": True,
        "budget": budget,
        "peak": step_plan.peak,
        "unplanned": step_plan.eager_peak,
        "levers": dict(levers),
    }


def failed_step(subject: Subject, inputs: LastInputs) -> Prediction | None:
    """Predict a step of the model with its last inputs and the default loss; None if it cannot be recorded."""
    try:
        args, kwargs = inputs.specs()
        options = StepOptions(args, kwargs, optimizer=_optimizer(subject)).checked()
        card = subject.card
        target = Target(HOST) if card is None else Target(card.name, card)
        return Prediction.of(record_for(build_of(_build_copy(subject), options, on_card=card is not None), target))
    except Exception:  # a user's model may raise anything on fake tensors
        return None


def _build_copy(subject: Subject) -> Callable[[], nn.Module]:
    """Return a function that copies the first model without its hooks."""
    return lambda: copy_without_hooks(subject.models[0])


def _optimizer(subject: Subject) -> Any:
    """Return a function from parameters to an optimizer like the first one; None without an optimizer."""
    if not subject.optimizers:
        return None
    first = subject.optimizers[0]
    return optimizer_factory(type(first), options_of(first))
