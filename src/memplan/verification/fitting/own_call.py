"""Plan a model's own call, where it was planned together with its loss: the loss is a fixed load between the passes.

Trainers call the model and compute the loss outside. Such a call runs by the decisions that were made for both, where
these keep the budget with the loss as eager mode computes it, else by the plan that a search finds.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch

from memplan._bytes import format_bytes
from memplan.errors import BudgetError
from memplan.planning.capture.flat_call import Call, call_of
from memplan.planning.capture.loss_module import WithLoss, differentiable
from memplan.planning.request import Request
from memplan.planning.settings import Settings
from memplan.planning.study import Planned
from memplan.rewriting.install import Installed, install
from memplan.trace.structure import take_apart
from memplan.verification.fitting.plan_cache import Plans
from memplan.verification.measurement.peak_alone import growth
from memplan.verification.measurement.peak_and_time import storage_bytes
from memplan.verification.measurement.state_copies import ModuleCopy, attributes_kept, copies


def plan_own_call(
    asked: Request, settings: Settings, planned: Planned, told: Callable[[str], None], undo: ExitStack
) -> tuple[Installed, str | None]:
    """Make calls of the model itself run as planned; the one that was fitted is ready at once.

    Args:
        asked: a request with a loss.
        settings: of the plan.
        planned: the plan of model and loss.
        told: as for `Plans`.
        undo: takes what undoes it.

    Returns:
        Its calls' plans, and a note where the budget is kept under a condition, or not at all.
    """
    note = None
    for held in (True, False):
        outside = replace(settings, plan=None, outside=_outside(asked, held))
        plans = Plans(asked.model, outside, asked.bytes, told, joint=planned)
        made = install(asked.model, plans)
        undo.callback(made.undo)
        try:
            if settings.engine == "graph":  # else it is compiled when it is called, which may never be
                with attributes_kept(asked.model), asked.under_autocast():
                    made.prepare(_own(asked)[0], settings.gradients.adds)
            plans.theirs = True
        except BudgetError as error:
            least = format_bytes(error.smallest_budget)
            plans.theirs = True
            if not held:
                return made, f"{_ALONE} needs at least {least}: call fitted.loss(...), or give it that"
            note = (
                f"{_ALONE} keeps the budget if its output is gone when backward() is called; held on, it needs {least}"
            )
            made.undo()
        else:
            return made, note
    raise AssertionError("the last one returns")


_ALONE = "with its loss outside of the plan (fitted.model(...)), the step"


def _own(asked: Request) -> tuple[Call, tuple[Any, ...]]:
    """Return the model's own call, and the targets."""
    assert isinstance(asked.step, WithLoss)
    args, kwargs = asked.call.rebuild(asked.call.tensors)
    cut = len(args) - asked.step.targets
    return call_of(args[:cut], kwargs), args[cut:]


def _outside(asked: Request, held: bool) -> Fraction:
    """Measure the loss alone, forward and backward: what it holds at its peak beside the model's outputs and their
    gradients, for each byte of these. ``held``: whether the caller holds the outputs through backward."""
    step, home = asked.step, asked.settings.home
    assert isinstance(step, WithLoss)
    call, targets = _own(replace(asked, call=replace(asked.call, tensors=tuple(copies(asked.call.tensors)))))
    args, kwargs = call.rebuild(call.tensors)
    with ModuleCopy(step).in_place(), asked.under_autocast():
        with torch.no_grad():
            tensors, structure = take_apart(step.model(*args, **kwargs))
        leaves = [one.detach().clone().requires_grad_(one.is_floating_point()) for one in tensors]

        def run() -> None:
            output = structure.rebuild([leaf.clone() for leaf in leaves])
            loss = step.loss(output, *targets)
            if not held:
                del output
            loss.backward()

        peak = growth(run, home)
        read = differentiable(structure.rebuild(leaves))
    size = storage_bytes([one for one in read if one.requires_grad], home.type)
    return Fraction(max(0, peak - storage_bytes(leaves, home.type) - size), size) if size else Fraction(0)
