"""Max pools of a piece, in less time than torch's kernel takes for contiguous tensors on the CPU.

That kernel compares the elements of each window one by one (aten/src/ATen/native/cpu/MaxPoolKernel.cpp): 4 % of a
training step of ResNet-18, and a piece pools in each of its passes. A pass that needs no derivative needs no indices:
it takes the elementwise maximum of shifted views, along each dimension in turn. A pass that needs one runs torch's
channels-last kernel, which compares all channels of a position at once. Values, and indices where elements are equal,
are those of torch's kernel for contiguous tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from memplan.planning.graph.op_schema import overload

_MIN_CHANNELS = 8
"""Channels from which on the conversion to channels last pays."""
_LAYOUTS: Mapping[int, torch.memory_format] = {2: torch.channels_last, 3: torch.channels_last_3d}
"""Channels last by dimensions of space."""
_INDEX_BYTES = 8


def _options(space: int, *options: int | Sequence[int]) -> list[list[int]]:
    """Return options of a pool with an entry for each dimension of space. A stride that is left out is empty: it is the
    size of the kernel, which comes first."""
    lists = [[each] if isinstance(each, int) else list(each) for each in options]
    return [each * space if len(each) == 1 else each for each in (given or lists[0] for given in lists)]


def _largest(target: str, space: int) -> Callable[..., Any]:
    """Return a function with the arguments of a max pool that returns its first result."""

    def pool(
        self: Tensor, kernel_size: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (0,),
        dilation: Sequence[int] = (1,), ceil_mode: bool = False,
    ) -> Any:  # fmt: skip
        """Return the largest elements of the windows."""
        options = _options(space, kernel_size, stride, padding, dilation)
        out = [
            (size + 2 * pad - reach * (kernel - 1) - 1) // step + 1
            for size, kernel, step, pad, reach in zip(self.shape[-space:], *options, strict=True)
        ]
        # between dimensions there is a tensor of the result's size in the first and of the operand's in the others
        between = self.element_size() * out[0] * math.prod(self.shape[1 - space :])
        if not self.dtype.is_floating_point or ceil_mode or between > _INDEX_BYTES * math.prod(out):
            return overload(target)(self, kernel_size, stride, padding, dilation, ceil_mode)
        result = self
        for dim, (count, kernel, step, pad, reach) in enumerate(zip(out, *options, strict=True), self.dim() - space):
            result = _largest_along(result, dim, count, kernel, step, pad, reach)
        return result

    return pool


def _largest_along(x: Tensor, dim: int, count: int, kernel: int, step: int, pad: int, reach: int) -> Tensor:
    """Return the largest elements of windows along a single dimension.

    Args:
        x: operand.
        dim: dimension.
        count: windows.
        kernel, step, pad, reach: elements of a window, their distance from those of the next, padding, and dilation.
    """
    shape = [*x.shape]
    shape[dim] = count
    result = x.new_full(shape, -math.inf)
    for offset in range(0, kernel * reach, reach):
        # window i reads element i * step - pad + offset, where that is not padding
        first = max(0, -((offset - pad) // step))
        last = min(count - 1, (x.shape[dim] - 1 + pad - offset) // step)
        if first <= last:
            begin, end = first * step - pad + offset, last * step - pad + offset + 1
            part = result.narrow(dim, first, last - first + 1)
            torch.maximum(part, x.narrow(dim, begin, end - begin).unfold(dim, 1, step).squeeze(-1), out=part)
    return result


class _MaxPool(torch.autograd.Function):
    """A max pool that is computed in channels last. The derivative does not save the operand, whose values it does not
    need."""

    @staticmethod
    def forward(ctx: Any, target: str, space: int, x: Tensor, *options: Any) -> Tensor:
        """Return the largest elements of the windows. ``options``: kernel to ceil_mode."""
        y, indices = overload(target)(x.contiguous(memory_format=_LAYOUTS[space]), *options)
        ctx.target, ctx.options, ctx.shape = target, options, x.shape
        ctx.save_for_backward(indices.contiguous())
        return y.contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the gradient of the operand."""
        (indices,) = ctx.saved_tensors
        operand = gradients[0].new_empty(()).expand(ctx.shape)
        derivative = overload(ctx.target.replace("_indices", "_indices_backward"))
        gradient = derivative(gradients[0].contiguous(), operand, *ctx.options, indices)
        return None, None, gradient, *[None] * len(ctx.options)


def _differentiable(target: str, space: int) -> Callable[..., Any]:
    """Return a function with the arguments of a max pool that returns its first result, with its derivative."""

    def pool(
        self: Tensor, kernel_size: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (0,),
        dilation: Sequence[int] = (1,), ceil_mode: bool = False,
    ) -> Any:  # fmt: skip
        """Return the largest elements of the windows."""
        options = kernel_size, stride, padding, dilation, ceil_mode
        if self.dim() < space + 2 or self.shape[1] < _MIN_CHANNELS or not self.is_contiguous():
            return overload(target)(self, *options)
        return _MaxPool.apply(target, space, self, *options)

    return pool


_POOLS = {f"aten.max_pool{space}d_with_indices.default": space for space in _LAYOUTS}
VALUES: Mapping[str, Callable[..., Any]] = {target: _largest(target, space) for target, space in _POOLS.items()}
"""Functions by the target of an op, for passes without a derivative."""
DIFFERENTIABLE: Mapping[str, Callable[..., Any]] = {
    target: _differentiable(target, space) for target, space in _POOLS.items()
}
"""Functions by the target of an op, for passes with a derivative."""
