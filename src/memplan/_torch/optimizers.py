"""What goes on between a backward pass and an optimizer's update.

Seen in torch 2.11, 2.13 and 2.15: ``torch.nn.utils.clip_grad._clip_grads_with_norm_``, which ``clip_grad_norm_`` calls
with the parameters, and the methods of optimizers' ``step`` that torch wraps to run its hooks (``__wrapped__``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.utils import clip_grad

from memplan._torch.patches import patched


def bare_step(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """The optimizer's update without the hooks around it."""
    step = type(optimizer).step
    found = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
    return lambda: found(optimizer)


@contextlib.contextmanager
def clipping_seen(seen: Callable[[list[torch.Tensor]], None]) -> Iterator[None]:
    """While open, call this with the parameters whenever gradients are clipped by their global norm."""
    original: Any = clip_grad._clip_grads_with_norm_

    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        found = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        seen(found)
        return original(found, *args, **kwargs)

    with patched(clip_grad, _clip_grads_with_norm_=clip):
        yield


@contextlib.contextmanager
def scaling_seen(seen: Callable[[list[torch.Tensor]], None]) -> Iterator[None]:
    """While open, call this with the losses whenever an enabled GradScaler scales some."""
    original: Any = torch.amp.GradScaler.scale

    def scale(self: Any, outputs: Any) -> Any:
        if self.is_enabled():
            found = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
            seen(found)
            outputs = outputs if isinstance(outputs, torch.Tensor) else found
        return original(self, outputs)

    with patched(torch.amp.GradScaler, scale=scale):
        yield


def leaves_of(outputs: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The tensors that backward from these outputs would give gradients to."""
    stack, met = [output.grad_fn for output in outputs if output.grad_fn is not None], set[Any]()
    while stack:
        node = stack.pop()
        if node in met:
            continue
        met.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            yield variable
        stack.extend(following for following, _ in node.next_functions if following is not None)
