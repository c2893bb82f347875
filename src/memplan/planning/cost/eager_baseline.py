"""Predict the peak of the step without a plan, by recording it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
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
"""Use memplan's formulas for workspaces, without measurements."""


def baseline(
    model: nn.Module, call: Call, optimizer: Optimizer | None, *, gradients_exist: bool, home: Home | None = None,
    known: Known = AS_MODELLED,
) -> tuple[Trace, Timeline]:  # fmt: skip
    """Record two eager steps of the model under the current autocast, without allocating memory.

    The second step counts: by then the optimizer has its state, and gradients are accumulated if ``gradients_exist``.

    Args:
        model, call: the model and its arguments.
        optimizer: a callable of the parameters; None: the step has no update.
        gradients_exist: whether accumulated gradients exist when a step begins, as from the second micro-batch on.
        home: device of the step; None: the CPU.
        known: as for `record_for`.

    Returns:
        The trace and its memory timeline.
    """
    home = home or Home()
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    if torch.is_autocast_enabled(home.type):  # recorded with the step, which runs outside of the caller's autocast
        autocast = partial(torch.autocast, home.type, dtype=torch.get_autocast_dtype(home.type))

    def build() -> Callable[[], None]:
        """Return the step, on a copy of the model and of its arguments, and with a new optimizer."""
        module = copy_module(model)
        if home.card is not None:
            module.to(home.type)
        # Arguments in host memory stay there, also of a step on a card.
        tensors = (_leaf_on(like(t), home.type) if t.device.type == home.type else like(t) for t in call.tensors)
        args, kwargs = call.rebuild(tuple(tensors))
        update = None if optimizer is None else optimizer(module.parameters())

        def step() -> None:
            """Run a training step."""
            if not gradients_exist:  # else backward adds to the gradients of the step before
                module.zero_grad()
            with autocast():
                output = module(*args, **kwargs)
                loss = default_loss(output)
            loss.backward()
            if update is not None:
                update.step()
            del output  # the caller holds it until here, as with a plan

        return step

    with torch.autocast(home.type, enabled=False):
        trace = record_for(build, home.target, known=known)
        return trace, simulate(trace, settings=home.allocator_conf)


def _leaf_on(tensor: torch.Tensor, place: str) -> torch.Tensor:
    """Return a tensor on a device, as a leaf with the same ``requires_grad``."""
    return tensor.detach().to(place).requires_grad_(tensor.requires_grad)
