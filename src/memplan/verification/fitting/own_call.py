"""Plan the calls of a model whose loss is computed outside of the plan, as trainers do.

These calls reuse the decisions for model and loss together where that keeps the budget, with the eager loss as a fixed
load between forward and backward. Otherwise they are planned anew.
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
from memplan.verification.measurement.peak_alone import peak_growth
from memplan.verification.measurement.peak_and_time import storage_bytes
from memplan.verification.measurement.state_copies import ModuleCopy, attributes_restored, copy_tensors

_SUBJECT = "with its loss outside of the plan (fitted.model(...)), the step"


def plan_own_call(
    request: Request, settings: Settings, joint: Planned, notify: Callable[[str], None], undo: ExitStack
) -> tuple[Installed, str | None]:
    """Plan the model's own calls and install that plan.

    It is first planned for callers that keep the output during backward, then for callers that drop it. ``joint`` is
    the plan of model and loss, ``notify`` as for `Plans`; ``undo`` receives the callback that uninstalls it.

    Returns:
        The installed plans, and a note for the user where the budget is kept only if the output is dropped, or not at
        all.
    """
    note = None
    for output_kept in (True, False):
        settings_with_loss = replace(  # the precision is that of the plan with the loss, whose optimizer is in use
            settings, plan=None, precision=joint.plan.precision,
            loss_bytes_ratio=_loss_bytes_ratio(request, output_kept),
        )  # fmt: skip
        plans = Plans(request.model, settings_with_loss, request.bytes, notify, joint=joint)
        installed = install(request.model, plans)
        undo.callback(installed.undo)
        try:
            if settings.engine == "graph":  # inductor compiles in the first call, which may never come
                with attributes_restored(request.model), request.under_autocast():
                    installed.prepare(_model_call(request)[0], settings.gradients.accumulates)
            plans.handed_over = True
            return installed, note
        except BudgetError as error:
            least = format_bytes(error.smallest_budget)
            plans.handed_over = True
            if not output_kept:
                return installed, f"{_SUBJECT} needs at least {least}: call fitted.loss(...), or give it that"
            condition = "if its output is gone when backward() is called"
            note = f"{_SUBJECT} keeps the budget {condition}; held on, it needs {least}"
            installed.undo()
    raise AssertionError("the last iteration returns")


def _model_call(request: Request) -> tuple[Call, tuple[Any, ...]]:
    """Split the call of model and loss into the call of the model and the targets."""
    assert isinstance(request.step, WithLoss)
    args, kwargs = request.call.rebuild(request.call.tensors)
    inputs = len(args) - request.step.targets
    return call_of(args[:inputs], kwargs), args[inputs:]


def _loss_bytes_ratio(request: Request, output_kept: bool) -> Fraction:
    """Return the temporary bytes of the loss for each byte of the gradients of the model's outputs.

    These are the peak bytes of its forward and backward, as measured, in addition to the outputs and their gradients.
    ``output_kept``: whether the caller keeps the outputs during backward.
    """
    step, home = request.step, request.settings.home
    assert isinstance(step, WithLoss)
    copied = replace(request.call, tensors=tuple(copy_tensors(request.call.tensors)))
    call, targets = _model_call(replace(request, call=copied))
    args, kwargs = call.rebuild(call.tensors)
    with ModuleCopy(step).in_place(), request.under_autocast():
        with torch.no_grad():
            outputs, structure = take_apart(step.model(*args, **kwargs))
        leaves = [output.detach().clone().requires_grad_(output.is_floating_point()) for output in outputs]

        def run_loss() -> None:
            """Run forward and backward of the loss."""
            output = structure.rebuild([leaf.clone() for leaf in leaves])
            loss = step.loss(output, *targets)
            if not output_kept:
                del output
            loss.backward()

        peak = peak_growth(run_loss, home)
        used_by_loss = differentiable(structure.rebuild(leaves))
    gradient_bytes = storage_bytes([leaf for leaf in used_by_loss if leaf.requires_grad], home.type)
    if not gradient_bytes:
        return Fraction(0)
    return Fraction(max(0, peak - storage_bytes(leaves, home.type) - gradient_bytes), gradient_bytes)
