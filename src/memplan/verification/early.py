"""Updates in the backward pass: each parameter's as soon as its gradient is complete, which is then freed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


class EarlyUpdates:
    """One optimizer of all parameters, whose step is taken for one parameter at a time.

    After the backward pass no gradient is left, and the optimizer's own ``step()`` has nothing to do; learning rates,
    schedulers and ``state_dict()`` are used as ever.
    """

    def __init__(self, optimizer: Callable[[Any], Any], parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self.optimizer = optimizer(self._parameters)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._update)
            for parameter in self._parameters
            if parameter.requires_grad
        ]

    def _update(self, parameter: torch.Tensor) -> None:
        groups = self.optimizer.param_groups
        whole = [group["params"] for group in groups]
        try:
            for group, parameters in zip(groups, whole, strict=True):
                group["params"] = [one for one in parameters if one is parameter]
            self.optimizer.step()
        finally:
            for group, parameters in zip(groups, whole, strict=True):
                group["params"] = parameters
        parameter.grad = None

    def remove(self) -> None:
        """Gradients stay where they are again, for an ordinary update."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
