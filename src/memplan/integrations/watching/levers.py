"""Which levers would have made a step fit: a plan, made on fake tensors, in the room that there was."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import nn

from memplan import _torch
from memplan.errors import BudgetError
from memplan.integrations.watching.inputs import LastInputs
from memplan.integrations.watching.window import Subject
from memplan.planning.api import plan
from memplan.trace.step import copy_module


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
    model = subject.models[0]
    try:
        args, kwargs = inputs.specs()
        made = plan(
            lambda: _without_hooks(copy_module(model)), *args, kwargs=kwargs, budget=budget,
            optimizer=_optimizer(subject), costs="roofline", device=None if subject.card is None else subject.card.name,
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


def _without_hooks(model: nn.Module) -> nn.Module:
    """Remove the hooks of a copy: what the user's would store, they would store in the user's own objects."""
    for module in model.modules():
        _torch.remove_hooks(module)
    return model


def _optimizer(subject: Subject) -> Any:
    if not subject.optimizers:
        return None
    kind, defaults = type(subject.optimizers[0]), subject.optimizers[0].defaults

    def make(parameters: Any) -> torch.optim.Optimizer:
        return kind(parameters, **defaults)

    make.__qualname__ = kind.__qualname__
    return make
