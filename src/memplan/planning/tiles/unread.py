"""Ops whose derivative does not read their result, where only the derivative is wanted.

Each takes the arguments of its op and returns a tensor of the result's shape without values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class _Convolution(torch.autograd.Function):
    """``aten::convolution`` without its result."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.bias, ctx.options = None if bias is None else list(bias.shape), options
        return input.new_empty(()).expand(_shape(input, weight, *options))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        input, weight = ctx.saved_tensors
        mask = list(ctx.needs_input_grad[:3])
        computed = torch.ops.aten.convolution_backward.default(
            gradients[0], input, weight, ctx.bias, *ctx.options, mask
        )
        return *computed, *[None] * len(ctx.options)


def _shape(
    input: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    transposed: bool, output_padding: Sequence[int], groups: int,
) -> list[int]:  # fmt: skip
    """Return the shape of a convolution's result."""
    space = input.dim() - 2
    s, p, d, more = (list(v) * (space if len(v) == 1 else 1) for v in (stride, padding, dilation, output_padding))
    sizes = list[int]()
    for dim, size in enumerate(input.shape[2:]):
        reach = d[dim] * (weight.shape[2 + dim] - 1)
        if transposed:
            sizes.append((size - 1) * s[dim] - 2 * p[dim] + reach + more[dim] + 1)
        else:
            sizes.append((size + 2 * p[dim] - reach - 1) // s[dim] + 1)
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    return [input.shape[0], channels, *sizes]


def _convolution(
    input: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int,
) -> Any:  # fmt: skip
    return _Convolution.apply(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)


UNREAD: Mapping[str, Callable[..., Any]] = {"aten.convolution.default": _convolution}
"""Functions by the target of an op."""
