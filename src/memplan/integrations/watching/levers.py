"""A step that failed, predicted for the inputs it had, and the plan that would have fitted: both on fake tensors."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memplan import _torch
from memplan.errors import BudgetError
from memplan.integrations.watching.inputs import LastInputs
from memplan.integrations.watching.prediction import Prediction
from memplan.integrations.watching.window import Subject
from memplan.planning.api import plan
from memplan.trace.record import record_for
from memplan.trace.recording.session import Target
from memplan.trace.records import HOST
from memplan.trace.step import StepOptions, build_of, copy_module


def levers_for(subject: Subject, inputs: LastInputs, budget: int) -> dict[str, Any]:
    """Return the plan that fits a step of the model with its last inputs into a budget, as plain data.

    The loss is the default one of `memplan.explain`, and hooks of the user's are left out.

    Args:
        subject: the model and its optimizer.
        inputs: of the last call.
        budget: bytes.

    Returns:
        ``fits``, and either ``peak`` and ``levers`` ({lever: {values, bytes}}) or ``smallest_budget``; ``why_not``
        where there is no plan at all.
    """
    try:
        args, kwargs = inputs.specs()
        made = plan(
            _copies(subject), *args, kwargs=kwargs, budget=budget, optimizer=_optimizer(subject), costs="roofline",
            device=None if subject.card is None else subject.card.name,
        )  # fmt: skip
    except BudgetError as error:
        return {"fits": False, "budget": budget, "smallest_budget": error.smallest_budget}
    except Exception as error:  # a model that cannot be captured, arguments that cannot be described: no plan then
        return {"fits": None, "budget": budget, "why_not": f"{type(error).__name__}: {str(error).splitlines()[0]:.300}"}
    found: dict[str, dict[str, int]] = defaultdict(lambda: {"values": 0, "bytes": 0})
    for decision in made.decisions:
        if decision.lever != "keep":
            found[decision.lever]["values"] += 1
            found[decision.lever]["bytes"] += decision.bytes
    return {"fits": True, "budget": budget, "peak": made.peak, "unplanned": made.eager_peak, "levers": dict(found)}


def failed_step(subject: Subject, inputs: LastInputs) -> Prediction | None:
    """Predict a step of the model with its last inputs and the default loss; None where it cannot be recorded."""
    try:
        args, kwargs = inputs.specs()
        options = StepOptions(args, kwargs, optimizer=_optimizer(subject)).checked()
        card = subject.card
        target = Target(HOST) if card is None else Target(card.name, card)
        return Prediction.of(record_for(build_of(_copies(subject), options, on_card=card is not None), target))
    except Exception:  # of the user's model, in circumstances that it was not made for
        return None


def _copies(subject: Subject) -> Callable[[], nn.Module]:
    return lambda: _without_hooks(copy_module(subject.models[0]))


def _without_hooks(model: nn.Module) -> nn.Module:
    """Remove the hooks of a copy: what the user's would store, they would store in the user's own objects."""
    for module in model.modules():
        _torch.remove_hooks(module)
    return model


def _optimizer(subject: Subject) -> Any:
    if not subject.optimizers:
        return None
    kind = type(subject.optimizers[0])
    taken = inspect.signature(kind).parameters  # Adam's defaults have one that AdamW does not take
    defaults = {name: value for name, value in subject.optimizers[0].defaults.items() if name in taken}

    def make(parameters: Any) -> torch.optim.Optimizer:
        return kind(parameters, **defaults)

    make.__qualname__ = kind.__qualname__
    return make
