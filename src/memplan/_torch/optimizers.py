"""Observe what happens between a backward pass and an optimizer's update.

Seen in torch 2.11, 2.13 and 2.15: ``torch.nn.utils.clip_grad._clip_grads_with_norm_``, which ``clip_grad_norm_`` calls
with the parameters and ``torch.nn.utils`` calls ``clip_grads_with_norm_``, and the methods of optimizers' ``step`` that
torch wraps to run its hooks (``__wrapped__``). Seen in torch 2.11 and 2.13: functions that clip are wrapped, and what
they wrap is in the wrapper's closure.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad

from memplan._torch.patches import patched

_CLIPPING = {
    "_clip_grads_with_norm_": "clip_grad_norm_ or clip_grads_with_norm_",
    "clip_grad_value_": "clip_grad_value_",
}
"""Functions that change gradients, and what users call them by."""


def bare_step(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """Return the optimizer's update without the hooks around it."""
    step = type(optimizer).step
    found = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
    return lambda: found(optimizer)


@contextlib.contextmanager
def clipping_seen(seen: Callable[[str, list[torch.Tensor]], None]) -> Iterator[None]:
    """Call this with the function's name and the parameters whenever gradients are clipped, while open."""

    def watched(name: str, original: Any) -> Callable[..., Any]:
        def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            found = _listed(parameters)
            seen(name, found)
            return original(found, *args, **kwargs)

        return clip

    with contextlib.ExitStack() as stack:
        for function, name in _CLIPPING.items():
            stack.enter_context(_replaced(function, lambda original, name=name: watched(name, original)))
        yield


@contextlib.contextmanager
def _replaced(name: str, make: Callable[[Any], Callable[..., Any]]) -> Iterator[None]:
    """One of ``clip_grad``'s functions replaced: inside of its wrapper, so that it does not matter who has imported it
    already; where there is none, by its name."""
    wrapper = getattr(clip_grad, name)
    inner = getattr(wrapper, "__wrapped__", None)
    cell = next((one for one in wrapper.__closure__ or () if one.cell_contents is inner), None)
    if cell is None:
        with patched(clip_grad, **{name: make(wrapper)}):
            yield
        return
    cell.cell_contents = make(inner)
    try:
        yield
    finally:
        cell.cell_contents = inner


@contextlib.contextmanager
def scaling_seen(seen: Callable[[list[torch.Tensor]], None]) -> Iterator[None]:
    """Call this with the losses whenever an enabled GradScaler scales some, while open."""
    original: Any = torch.amp.GradScaler.scale

    def scale(self: Any, outputs: Any) -> Any:
        if self.is_enabled():
            found = _listed(outputs)
            seen(found)
            outputs = outputs if isinstance(outputs, torch.Tensor) else found
        return original(self, outputs)

    with patched(torch.amp.GradScaler, scale=scale):
        yield


@contextlib.contextmanager
def module_zeroing_seen(seen: Callable[[nn.Module], None]) -> Iterator[None]:
    """Call this with the module whenever ``zero_grad()`` of one is called, while open."""
    original: Any = nn.Module.zero_grad

    def zero_grad(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        seen(self)
        original(self, *args, **kwargs)

    with patched(nn.Module, zero_grad=zero_grad):
        yield


@contextlib.contextmanager
def backward_seen(
    seen: Callable[[list[torch.Tensor]], None], failed: Callable[[BaseException], None]
) -> Iterator[None]:
    """Call ``seen`` before each backward pass with the leaves that it gives gradients to, and ``failed`` where it ends
    with an exception, while open."""
    original: Any = torch.autograd.backward

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = kwargs.get("inputs", args[4] if len(args) > 4 else None)
        seen(list(leaves_of(_listed(tensors)) if inputs is None else _leaves(_listed(inputs))))
        try:
            return original(tensors, *args, **kwargs)
        except BaseException as error:
            failed(error)
            raise

    with patched(torch.autograd, backward=backward):
        yield


def leaves_of(outputs: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that backward from these outputs would give gradients to."""
    stack, met = [node for node in map(_node_of, outputs) if node is not None], set[Any]()
    while stack:
        node = stack.pop()
        if node in met:
            continue
        met.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            yield variable
        stack.extend(following for following, _ in node.next_functions if following is not None)


def _leaves(inputs: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the leaves among what a backward pass was asked for."""
    for one in inputs:
        found = one if isinstance(one, torch.Tensor) else getattr(one.node, "variable", None)
        if isinstance(found, torch.Tensor) and found.is_leaf:
            yield found


def _node_of(output: Any) -> Any:
    """Return the node of the autograd graph that made a tensor, or that a gradient edge leads to."""
    return output.grad_fn if isinstance(output, torch.Tensor) else output.node


def _listed(tensors: Any) -> list[Any]:
    """One tensor (or edge, which is a named tuple), or several, as a list."""
    one = isinstance(tensors, torch.Tensor) or hasattr(tensors, "node")
    return [tensors] if one else list(tensors)
