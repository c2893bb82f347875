"""Combine a model with its loss, and find the tensors that a backward pass starts from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from memplan.errors import InputError
from memplan.trace.naming.step_parts import Loss, loss_of
from memplan.trace.step import default_loss, differentiable

__all__ = ["WithLoss", "default_loss", "differentiable", "with_loss"]


def with_loss(model: nn.Module, loss: Loss, targets: int = 1) -> nn.Module:
    """Combine model and loss in one module: ``(*inputs, *targets) -> loss``.

    Args:
        model: called with all positional arguments but the last ``targets``, and with all keywords.
        loss: ``loss(output, *targets)``, or its name: ``"cross_entropy"``.
        targets: how many of the last positional arguments are targets.

    Example:
        >>> step = memplan.with_loss(model, F.cross_entropy)
        >>> torch.compile(step, backend="memplan", options={"budget": "1.5 MiB"})(images, labels).backward()
    """
    return WithLoss(model, loss_of(loss), targets)


class WithLoss(nn.Module):
    """See `with_loss`."""

    def __init__(self, model: nn.Module, loss: Callable[..., Any], targets: int = 1) -> None:
        super().__init__()
        if not isinstance(targets, int) or isinstance(targets, bool) or targets < 0:
            raise InputError(f"targets={targets!r}", expected="how many of the last positional arguments are targets")
        self.model = model
        self.loss = loss
        self.targets = targets

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of the model's output."""
        if len(args) < self.targets:
            raise InputError(
                f"{len(args)} positional arguments", expected=f"the inputs and then {self.targets} targets"
            )
        inputs = len(args) - self.targets
        return self.loss(self.model(*args[:inputs], **kwargs), *args[inputs:])
