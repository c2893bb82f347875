"""Observe backward passes, clipping, scaling and zeroing of gradients, and optimizers' updates.

Seen in torch 2.11, 2.13 and 2.15: ``torch.nn.utils.clip_grad._clip_grads_with_norm_``, which ``clip_grad_norm_`` calls
with the parameters and ``torch.nn.utils`` calls ``clip_grads_with_norm_``, and the methods of optimizers' ``step`` that
torch wraps to run its hooks (``__wrapped__``). Seen in torch 2.11 and 2.13: functions that clip are wrapped, and the
wrapper's closure has the original.
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
"""Functions that change gradients, with the public names by which users call them."""


def bare_step(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """Return the optimizer's update without the hooks around it."""
    step = type(optimizer).step
    is_wrapped = getattr(step, "hooked", False)  # torch replaced `step` by a function that runs the hooks
    update = getattr(step, "__wrapped__", step) if is_wrapped else step
    return lambda: update(optimizer)


@contextlib.contextmanager
def clipping_seen(seen: Callable[[str, list[torch.Tensor]], None]) -> Iterator[None]:
    """Call ``seen`` with the function's name and the parameters whenever gradients are clipped in this context."""

    def watched(name: str) -> Callable[[Any], Callable[..., Any]]:
        """Return the replacement of a clipping function, as a function of the original."""

        def replacement_of(original: Any) -> Callable[..., Any]:
            def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
                """Report the parameters whose gradients are clipped, and clip them."""
                parameters = _as_list(parameters)  # may be an iterator
                seen(name, parameters)
                return original(parameters, *args, **kwargs)

            return clip

        return replacement_of

    with contextlib.ExitStack() as stack:
        for function, public_name in _CLIPPING.items():
            stack.enter_context(_replaced(function, watched(public_name)))
        yield


@contextlib.contextmanager
def _replaced(name: str, make: Callable[[Any], Callable[..., Any]]) -> Iterator[None]:
    """Replace function ``name`` of ``clip_grad`` by ``make(original)``, inside its wrapper: so modules that imported it
    already see the replacement too. Functions without a wrapper are replaced by name."""
    wrapper = getattr(clip_grad, name)
    inner = getattr(wrapper, "__wrapped__", None)
    cell = next((variable for variable in wrapper.__closure__ or () if variable.cell_contents is inner), None)
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
    """Call ``seen`` with the losses whenever an enabled GradScaler scales some in this context."""
    original: Any = torch.amp.GradScaler.scale

    def scale(self: Any, outputs: Any) -> Any:
        """Replace `GradScaler.scale`."""
        if self.is_enabled():
            losses = _as_list(outputs)
            seen(losses)
            outputs = outputs if isinstance(outputs, torch.Tensor) else losses
        return original(self, outputs)

    with patched(torch.amp.GradScaler, scale=scale):
        yield


@contextlib.contextmanager
def module_zeroing_seen(seen: Callable[[nn.Module], None]) -> Iterator[None]:
    """Call ``seen`` with the module whenever its ``zero_grad()`` is called in this context."""
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
    """In this context, call ``seen`` before each backward pass with the leaves that get gradients, and ``failed`` if
    the pass raises."""
    original: Any = torch.autograd.backward

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        """Replace `torch.autograd.backward`."""
        inputs = kwargs.get("inputs", args[4] if len(args) > 4 else None)
        leaves = leaves_of(_as_list(tensors)) if inputs is None else _leaves(_as_list(inputs))
        seen(list(leaves))
        try:
            return original(tensors, *args, **kwargs)
        except BaseException as error:
            failed(error)
            raise

    with patched(torch.autograd, backward=backward):
        yield


def leaves_of(outputs: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the leaf tensors that a backward pass from these outputs would give gradients to."""
    stack, visited = [node for node in map(_node_of, outputs) if node is not None], set[Any]()
    while stack:
        node = stack.pop()
        if node in visited:
            continue
        visited.add(node)
        variable = getattr(node, "variable", None)  # the leaf, of an AccumulateGrad node
        if isinstance(variable, torch.Tensor):
            yield variable
        stack.extend(next_node for next_node, _ in node.next_functions if next_node is not None)


def _leaves(inputs: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the leaves among the ``inputs`` of a backward pass: tensors or gradient edges."""
    for target in inputs:
        tensor = target if isinstance(target, torch.Tensor) else getattr(target.node, "variable", None)
        if isinstance(tensor, torch.Tensor) and tensor.is_leaf:
            yield tensor


def _node_of(output: Any) -> Any:
    """Return the autograd node that produced a tensor, or that a gradient edge leads to."""
    return output.grad_fn if isinstance(output, torch.Tensor) else output.node


def _as_list(tensors: Any) -> list[Any]:
    is_single = isinstance(tensors, torch.Tensor) or hasattr(tensors, "node")
    return [tensors] if is_single else list(tensors)
