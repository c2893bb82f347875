"""The step as it is without a plan: its predicted peak, by recording it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from memplan.planning.calls import Call
from memplan.planning.losses import default_loss
from memplan.planning.updates import Optimizer
from memplan.simulation.liveness import simulate
from memplan.simulation.model import Timeline
from memplan.trace.model import HOST
from memplan.trace.record import record
from memplan.trace.spec import like
from memplan.trace.step import copy_module


def baseline(model: nn.Module, call: Call, optimizer: Optimizer | None, *, held: bool) -> Timeline:
    """Bytes over time of two steps of the model as it is, under the autocast that is on; nothing is allocated.

    ``held``: gradients are there when a step begins, as from the second micro-batch of an accumulation on. What counts
    is the second step: the optimizer has its state, and gradients are held where they are to be.
    """
    around = _autocast()

    def build() -> Callable[[], None]:
        made = copy_module(model)
        args, kwargs = call.rebuild(tuple(like(tensor) for tensor in call.tensors))
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

    with torch.autocast(HOST, enabled=False):
        return simulate(record(build, device=HOST))


def _autocast() -> Callable[[], AbstractContextManager[Any]]:
    """What turns on the autocast that is on now."""
    if not torch.is_autocast_enabled(HOST):
        return nullcontext
    dtype = torch.get_autocast_dtype(HOST)
    return lambda: torch.autocast(HOST, dtype=dtype)
