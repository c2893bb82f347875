"""Ops whose derivative does not read their result, where only the derivative is wanted.

Each takes the arguments of its op and returns a tensor of the result's shape without values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from memplan.planning.tiles.convolutions import convolution_gradients


class _Convolution(torch.autograd.Function):
    """``aten::convolution`` without its result."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
        """Return a tensor of the result's shape with a single element of memory. ``options``: stride to groups, as of
        ``aten::convolution``."""
        ctx.save_for_backward(input, weight)
        ctx.has_bias, ctx.options = bias is not None, options
        return input.new_empty(()).expand(_convolution_shape(input, weight, *options))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the gradients of input, weight and bias from that of the result."""
        input, weight = ctx.saved_tensors
        mask = list(ctx.needs_input_grad[:3])
        computed = convolution_gradients(gradients[0], input, weight, ctx.has_bias, ctx.options, mask)
        return *computed, *[None] * len(ctx.options)


def _convolution_shape(
    input: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    transposed: bool, output_padding: Sequence[int], groups: int,
) -> list[int]:  # fmt: skip
    """Return the shape of a convolution's result."""
    spatial_rank = input.dim() - 2
    # a single number stands for all dimensions of space
    options = [list(v) * (spatial_rank if len(v) == 1 else 1) for v in (stride, padding, dilation, output_padding)]
    sizes = list[int]()
    for size, kernel, step, pad, spacing, extra in zip(input.shape[2:], weight.shape[2:], *options, strict=True):
        kernel_span = spacing * (kernel - 1)  # from the first to the last element that a kernel reads
        if transposed:
            sizes.append((size - 1) * step - 2 * pad + kernel_span + extra + 1)
        else:
            sizes.append((size + 2 * pad - kernel_span - 1) // step + 1)
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    return [input.shape[0], channels, *sizes]


def _convolution(
    input: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int,
) -> Any:  # fmt: skip
    """Return a tensor of the shape of ``aten::convolution``'s result, with its derivative but without its values."""
    return _Convolution.apply(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)


WITHOUT_VALUES: Mapping[str, Callable[..., Any]] = {"aten.convolution.default": _convolution}
"""By target of an op: a function with its arguments and its derivative, whose result has no values."""
