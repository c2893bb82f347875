"""Predict the peak of the step without a plan, by recording it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from memplan.planning.capture.flat_call import Call
from memplan.planning.capture.loss_module import default_loss
from memplan.planning.cost.optimizer_memory import Optimizer
from memplan.planning.graph.placement import Home
from memplan.simulation.simulate import simulate
from memplan.simulation.timeline import Timeline
from memplan.trace.record import Known, record_for
from memplan.trace.spec import like
from memplan.trace.step import copy_module
from memplan.trace.trace import Trace

AS_MODELLED: Known = lambda semantics: semantics  # noqa: E731
"""Kernels' workspaces by memplan's models alone, without measurements."""


def baseline(
    model: nn.Module,
    call: Call,
    optimizer: Optimizer | None,
    *,
    held: bool,
    home: Home | None = None,
    known: Known = AS_MODELLED,
) -> tuple[Trace, Timeline]:
    """Return two steps of the model as it is, under the autocast that is on, and their bytes over time; nothing is
    allocated.

    What counts is the second step: the optimizer has its state, and gradients are held where they are to be.

    Args:
        model, call: what is called with what.
        optimizer: a callable of the parameters; None: no update is part of it.
        held: gradients are there when a step begins, as from the second micro-batch of an accumulation on.
        home: where it runs; None: on the CPU.
        known: as for `record_for`.
    """
    home = home or Home()
    around = _autocast(home.type)

    def build() -> Callable[[], None]:
        made, on_card = copy_module(model), home.card is not None
        if on_card:
            made.to(home.type)
        tensors = (_placed(like(one), home.type) if one.device.type == home.type else like(one) for one in call.tensors)
        args, kwargs = call.rebuild(tuple(tensors))
        update = None if optimizer is None else optimizer(made.parameters())

        def step() -> None:
            if not held:
                made.zero_grad()
            with around():
                output = made(*args, **kwargs)
                loss = default_loss(output)
            loss.backward()
            if update is not None:
                update.step()
            del output  # in the caller's hands all the time, as with a plan

        return step

    with torch.autocast(home.type, enabled=False):
        trace = record_for(build, home.target, known=known)
        return trace, simulate(trace)


def _placed(tensor: torch.Tensor, place: str) -> torch.Tensor:
    return tensor.detach().to(place).requires_grad_(tensor.requires_grad)


def _autocast(place: str) -> Callable[[], AbstractContextManager[Any]]:
    """Return a context that turns on the autocast that is on now."""
    if not torch.is_autocast_enabled(place):
        return nullcontext
    dtype = torch.get_autocast_dtype(place)
    return lambda: torch.autocast(place, dtype=dtype)
