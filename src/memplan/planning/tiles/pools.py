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


def _options(spatial_rank: int, *options: int | Sequence[int]) -> list[list[int]]:
    """Return options of a pool with an entry for each dimension of space. A stride that is left out is empty: it is the
    size of the kernel, which comes first."""
    lists = [[option] if isinstance(option, int) else list(option) for option in options]
    kernel_size = lists[0]
    return [
        option * spatial_rank if len(option) == 1 else option for option in (stated or kernel_size for stated in lists)
    ]


def _without_derivative(target: str, spatial_rank: int) -> Callable[..., Any]:
    """Return a function with the arguments of a max pool that returns its first result."""

    def pool(
        self: Tensor, kernel_size: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (0,),
        dilation: Sequence[int] = (1,), ceil_mode: bool = False,
    ) -> Any:  # fmt: skip
        """Return the largest elements of the windows."""
        options = _options(spatial_rank, kernel_size, stride, padding, dilation)
        result_sizes = [
            (size + 2 * pad - spacing * (kernel - 1) - 1) // step + 1
            for size, kernel, step, pad, spacing in zip(self.shape[-spatial_rank:], *options, strict=True)
        ]
        # after the first dimension there is a tensor of the result's size in it and of the operand's in the others;
        # torch's kernel holds indices instead
        element_bytes = min(self.element_size(), torch.float32.itemsize)  # in float64 the choice that a proof checks
        reduced_bytes = element_bytes * result_sizes[0] * math.prod(self.shape[1 - spatial_rank :])
        index_bytes = _INDEX_BYTES * math.prod(result_sizes)
        if not self.dtype.is_floating_point or ceil_mode or reduced_bytes > index_bytes:
            return overload(target)(self, kernel_size, stride, padding, dilation, ceil_mode)
        result, first_spatial = self, self.dim() - spatial_rank
        for dim, (size, *options_of_dim) in enumerate(zip(result_sizes, *options, strict=True), first_spatial):
            result = _max_along(result, dim, size, *options_of_dim)
        return result

    return pool


def _max_along(
    x: Tensor, dim: int, windows: int, kernel: int, stride: int, padding: int, dilation: int
) -> Tensor:  # fmt: skip
    """Return the largest elements of windows along a single dimension.

    Args:
        x: operand.
        dim: dimension.
        windows: their number, the size of the result along ``dim``.
        kernel, stride, padding, dilation: of the pool along ``dim``.
    """
    shape = [*x.shape]
    shape[dim] = windows
    result = x.new_full(shape, -math.inf)
    for offset in range(0, kernel * dilation, dilation):
        # window i reads element i * stride - padding + offset, where that is not padding
        first = max(0, -((offset - padding) // stride))
        last = min(windows - 1, (x.shape[dim] - 1 + padding - offset) // stride)
        if first <= last:
            begin, end = first * stride - padding + offset, last * stride - padding + offset + 1
            part = result.narrow(dim, first, last - first + 1)
            torch.maximum(part, x.narrow(dim, begin, end - begin).unfold(dim, 1, stride).squeeze(-1), out=part)
    return result


class _MaxPool(torch.autograd.Function):
    """A max pool that is computed in channels last. The derivative does not save the operand, whose values it does not
    need."""

    @staticmethod
    def forward(ctx: Any, target: str, spatial_rank: int, x: Tensor, *options: Any) -> Tensor:
        """Return the largest elements of the windows. ``options``: kernel_size to ceil_mode."""
        y, indices = overload(target)(x.contiguous(memory_format=_LAYOUTS[spatial_rank]), *options)
        ctx.target, ctx.options, ctx.shape = target, options, x.shape
        ctx.save_for_backward(indices.contiguous())
        return y.contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the gradient of the operand."""
        (indices,) = ctx.saved_tensors
        # the derivative reads the operand's shape alone: a tensor with a single element of memory
        operand = gradients[0].new_empty(()).expand(ctx.shape)
        derivative = overload(ctx.target.replace("_indices", "_indices_backward"))
        gradient = derivative(gradients[0].contiguous(), operand, *ctx.options, indices)
        return None, None, gradient, *[None] * len(ctx.options)


def _with_derivative(target: str, spatial_rank: int) -> Callable[..., Any]:
    """Return a function with the arguments of a max pool that returns its first result, with its derivative."""

    def pool(
        self: Tensor, kernel_size: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (0,),
        dilation: Sequence[int] = (1,), ceil_mode: bool = False,
    ) -> Any:  # fmt: skip
        """Return the largest elements of the windows."""
        options = kernel_size, stride, padding, dilation, ceil_mode
        if self.dim() < spatial_rank + 2 or self.shape[1] < _MIN_CHANNELS or not self.is_contiguous():
            return overload(target)(self, *options)
        return _MaxPool.apply(target, spatial_rank, self, *options)

    return pool


_POOLS = {f"aten.max_pool{rank}d_with_indices.default": rank for rank in _LAYOUTS}
POOLS_WITHOUT_DERIVATIVE: Mapping[str, Callable[..., Any]] = {
    target: _without_derivative(target, spatial_rank) for target, spatial_rank in _POOLS.items()
}
"""By target of a max pool: a function with its arguments that returns its result alone, without a derivative."""
POOLS_WITH_DERIVATIVE: Mapping[str, Callable[..., Any]] = {
    target: _with_derivative(target, spatial_rank) for target, spatial_rank in _POOLS.items()
}
"""The same with a derivative."""
