"""Convolutions of a piece of a volume, in less time and workspace than torch's kernel takes for small batches of one.

For a single sample in float32, torch runs oneDNN only if channels times the first two dimensions of space are more than
20480 elements (``ConvParams::use_mkldnn``, aten/src/ATen/native/Convolution.cpp). Else it copies each window of the
input into a matrix: for a kernel of 3 x 3 x 3, that is 27 times the input, and took six to nine times as long. A piece
of a volume is often so small where the volume is not. Its halves, each with the border that it reads, run as a batch of
two here, for which torch always runs oneDNN. Values are those of torch's kernel but for the order of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memplan.planning.graph.op_schema import overload
from memplan.trace.semantics.cpu.convolution import uses_onednn
from memplan.trace.semantics.layout import suggests_channels_last

_CONVOLUTION = "aten.convolution.default"
_VOLUME_DIMS = 5
"""Dimensions of a batch of volumes. Of images, the matrix of so few elements takes less than 1 MiB."""


@dataclass(frozen=True)
class _Halves:
    """How a convolution of a single sample is computed as one of two halves of its result."""

    dim: int
    """Dimension along which the result is halved."""
    size: int
    """Size of the result along it."""
    input_size: int
    """Size of the input along it."""
    kernel: int
    """Elements of the input that an element of the result spans along it, those between dilated weights included."""
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def half(self) -> int:
        """Size of a half along the dimension. If the whole is odd, both halves have the element in the middle."""
        return (self.size + 1) // 2

    @property
    def begins(self) -> tuple[int, int]:
        """Elements of the result at which the halves begin."""
        return 0, self.size - self.half

    def input_parts(self) -> list[tuple[int, int, int]]:
        """Return for each half the first element of the input that it reads, their number, and how many elements of
        padding come before them."""
        spatial = self.dim - 2
        stride, padding = self.stride[spatial], self.padding[spatial]
        parts = list[tuple[int, int, int]]()
        for begin in self.begins:
            low = begin * stride - padding
            high = min(low + self._input_half, self.input_size)
            parts.append((max(low, 0), high - max(low, 0), max(-low, 0)))
        return parts

    @property
    def _input_half(self) -> int:
        """Elements of the input, with padding, that a half reads."""
        return (self.half - 1) * self.stride[self.dim - 2] + self.kernel

    def input_halves(self, x: Tensor) -> Tensor:
        """Return the halves of the input as a batch of two, padded along the dimension."""
        shape = [2, *x.shape[1:]]
        shape[self.dim] = self._input_half
        parts = self.input_parts()
        is_padded = any(count < self._input_half for _, count, _ in parts)
        halves = x.new_zeros(shape) if is_padded else x.new_empty(shape)
        for index, (first, count, before) in enumerate(parts):
            halves[index : index + 1].narrow(self.dim, before, count).copy_(x.narrow(self.dim, first, count))
        return halves

    def options(self) -> tuple[list[int], list[int], list[int], bool, list[int], int]:
        """Return stride to groups of the convolution of the halves, which are padded along the dimension already."""
        padding = [*self.padding]
        padding[self.dim - 2] = 0
        return [*self.stride], padding, [*self.dilation], False, [0] * len(padding), self.groups


class _InHalves(torch.autograd.Function):
    """A convolution whose two halves run as a batch, forward and backward."""

    @staticmethod
    def forward(ctx: Any, halves: _Halves, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the result of the convolution of ``x``, of shape (1, channels, depth, height, width)."""
        ctx.halves, ctx.has_bias = halves, bias is not None
        ctx.save_for_backward(x, weight)
        of_halves = overload(_CONVOLUTION)(halves.input_halves(x), weight, bias, *halves.options())
        shape = [1, *of_halves.shape[1:]]
        shape[halves.dim] = halves.size
        y = of_halves.new_empty(shape)
        for index, begin in enumerate(halves.begins):
            y.narrow(halves.dim, begin, halves.half).copy_(of_halves[index : index + 1])
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the gradients of input, weight and bias."""
        x, weight = ctx.saved_tensors
        mask = [*ctx.needs_input_grad[1:3], ctx.has_bias and ctx.needs_input_grad[3]]
        return None, *_gradients_in_halves(ctx.halves, gradients[0], x, weight, ctx.has_bias, mask)


def _gradients_in_halves(
    halves: _Halves, dy: Tensor, x: Tensor, weight: Tensor, has_bias: bool, mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of input, weight and bias. Arguments: see `convolution_gradients`."""
    shape = [2, *dy.shape[1:]]
    shape[halves.dim] = halves.half
    dy_halves = dy.new_empty(shape)
    for index, begin in enumerate(halves.begins):
        dy_halves[index : index + 1].copy_(dy.narrow(halves.dim, begin, halves.half))
    # an element that both halves have counts in the first
    dy_halves[1:].narrow(halves.dim, 0, 2 * halves.half - halves.size).zero_()
    dx_halves, dw, db = torch.ops.aten.convolution_backward.default(
        dy_halves, halves.input_halves(x), weight, [dy.shape[1]] if has_bias else None, *halves.options(), mask
    )
    del dy_halves
    if not mask[0]:
        return None, dw, db
    dx = x.new_zeros(x.shape)
    for index, (first, count, before) in enumerate(halves.input_parts()):
        dx.narrow(halves.dim, first, count).add_(dx_halves[index : index + 1].narrow(halves.dim, before, count))
    return dx, dw, db


def convolution_gradients(
    dy: Tensor, x: Tensor, weight: Tensor, has_bias: bool, options: Sequence[Any], mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of a convolution's input, weight and bias.

    Args:
        dy: gradient of the result.
        x, weight: operands.
        has_bias: whether the convolution has a bias.
        options: stride to groups, as of ``aten::convolution``.
        mask: whether input, weight and bias need a gradient; without, it is None.
    """
    halves = _halves_of(x, weight, *options)
    if halves is not None:
        return _gradients_in_halves(halves, dy, x, weight, has_bias, mask)
    bias_shape = [dy.shape[1]] if has_bias else None
    return torch.ops.aten.convolution_backward.default(dy, x, weight, bias_shape, *options, list(mask))


def _convolution(
    input: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int,
) -> Tensor:  # fmt: skip
    """Return the result of ``aten::convolution``, computed in halves where oneDNN runs only these."""
    options = stride, padding, dilation, transposed, output_padding, groups
    halves = _halves_of(input, weight, *options)
    if halves is None:
        return overload(_CONVOLUTION)(input, weight, bias, *options)
    return _InHalves.apply(halves, input, weight, bias)  # pyright: ignore[reportReturnType]


def _halves_of(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    transposed: bool, output_padding: Sequence[int], groups: int,
) -> _Halves | None:  # fmt: skip
    """Return how to compute a convolution in halves; None if oneDNN runs it as it is, or does not run the halves."""
    if transposed or x.dim() != _VOLUME_DIMS or x.shape[0] != 1 or x.device.type != "cpu":
        return None
    if suggests_channels_last(x) or suggests_channels_last(weight):
        return None
    spatial_rank = _VOLUME_DIMS - 2
    # a single number stands for all dimensions of space
    stride, padding, dilation = (
        tuple(option) * (spatial_rank if len(option) == 1 else 1) for option in (stride, padding, dilation)
    )
    spans = [spacing * (size - 1) + 1 for size, spacing in zip(weight.shape[2:], dilation, strict=True)]
    sizes = [
        (size + 2 * pad - span) // step + 1
        for size, pad, span, step in zip(x.shape[2:], padding, spans, stride, strict=True)
    ]
    longest = max(range(spatial_rank), key=sizes.__getitem__)
    halves = _Halves(
        2 + longest, sizes[longest], x.shape[2 + longest], spans[longest], stride, padding, dilation, groups
    )
    if halves.size < 2 or any(count < 1 for _, count, _ in halves.input_parts()):
        return None  # there is one element, or a half would read padding alone
    by_onednn = [
        uses_onednn(batch, weight, stride, dilation, transposed, output_padding, groups)
        for batch in (x, x.expand(2, *x.shape[1:]))
    ]
    return halves if by_onednn == [False, True] else None


CONVOLUTIONS: Mapping[str, Callable[..., Any]] = {_CONVOLUTION: _convolution}
"""By target: a function with the arguments of a convolution, with a derivative."""
