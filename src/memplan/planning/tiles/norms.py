"""Norms whose statistics are over the axis of a tile: statistics, normalization and derivative in parts.

With x' = (x - mean) / deviation and y = w x' + b, the derivative of a norm over n elements is
dx = (w dy - sum(w dy) / n - x' sum(w dy x') / n) / deviation (Ioffe and Szegedy, 2015, section 3). It is linear in dy:
parts of dy that overlap, as those of neighbouring pieces with their borders, add up, if the two sums are subtracted
once for each element.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memplan.planning.graph.joint_graph import Ref
from memplan.planning.graph.op_schema import arguments_of
from memplan.planning.tiles.program import BATCH_NORMS, Node


@dataclass(frozen=True)
class Norm:
    """A norm of a program, over all elements of a channel, or of a group of channels of a sample."""

    node: Node
    input: int
    weight: int | None
    bias: int | None
    eps: float
    groups: int | None = None
    """Groups of a group norm; None for a batch norm."""

    @property
    def output(self) -> int:
        """The normalized value."""
        return self.node.outputs[0]

    def per_channel(self, vector: Tensor, rank: int) -> Tensor:
        """Return a vector over channels, or a matrix over (samples, channels), in a shape that broadcasts to the
        input's rank."""
        return vector.reshape(-1, vector.shape[-1], *[1] * (rank - 2))

    def per_group(self, statistic: Tensor, channels: int, rank: int) -> Tensor:
        """Return a statistic in a shape that broadcasts to the input: (1, C) of a batch norm, (N, groups) of a group
        norm."""
        if self.groups is not None:
            statistic = statistic.repeat_interleave(channels // self.groups, dim=1)
        return self.per_channel(statistic, rank)

    def grouped(self, sums: Tensor) -> Tensor:
        """Return sums over (samples, channels) as sums over what shares a statistic: those of a group norm by group."""
        return sums if self.groups is None else sums.reshape(sums.shape[0], self.groups, -1).sum(2)


def norm_of(node: Node, dim: int) -> Norm | None:
    """Return the norm that a node is, if its statistics are over dimension ``dim`` of its input; None for other ops."""
    arguments = arguments_of(node.target, node.args, node.kwargs)

    def norm(groups: int | None) -> Norm:
        names = ("input", "weight", "bias")
        x, weight, bias = (arguments[n].value if isinstance(arguments.get(n), Ref) else None for n in names)
        assert x is not None, "the input of a norm is a tensor"
        return Norm(node, x, weight, bias, arguments["eps"], groups)

    if node.target in BATCH_NORMS and dim != 1 and arguments.get("training", True) is True:
        return norm(None)
    if node.target == "aten.native_group_norm.default" and dim >= 2:
        return norm(arguments["group"])
    return None


class Statistics:
    """Mean and variance of a norm, added up part by part (Chan, Golub and LeVeque, 1979), in float64."""

    def __init__(self, norm: Norm) -> None:
        self._norm = norm
        self.count = 0
        """Elements so far that share a statistic."""
        self._mean: Any = 0.0
        self._squares: Any = 0.0
        """Sum of the squares of deviations from the mean."""

    def add(self, x: Tensor) -> None:
        """Add a part of the input; parts do not overlap."""
        if self._norm.groups is None:  # a batch norm: over all but the channels
            dims, part = [0, *range(2, x.dim())], x
        else:
            part = x.reshape(x.shape[0], self._norm.groups, -1)
            dims = [2]
        variance, mean = torch.var_mean(_wide(part), dims, correction=0)
        count = part.numel() // mean.numel()
        variance, mean = variance.double(), mean.double()
        # the squares of deviations from the common mean
        total, difference = self.count + count, mean - self._mean
        self._squares = self._squares + variance * count + difference**2 * (self.count * count / total)
        self._mean = self._mean + difference * (count / total)
        self.count = total

    def result(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return mean and biased variance: (1, C), or (N, groups)."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        mean, variance = self._mean.to(wide), (self._squares / self.count).to(wide)
        return (mean[None], variance[None]) if self._norm.groups is None else (mean, variance)


def _wide(x: Tensor) -> Tensor:
    """Return a tensor in the dtype in which norms compute."""
    return x if x.dtype == torch.float64 else x.float()


def normalized(norm: Norm, x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Return x' = (x - mean) / deviation of a part of a norm's input, in the dtype in which norms compute."""
    rank, channels = x.dim(), x.shape[1]
    inverse = torch.rsqrt(variance + norm.eps)
    return (_wide(x) - norm.per_group(mean, channels, rank)).mul_(norm.per_group(inverse, channels, rank))


def gradient_sums(norm: Norm, x: Tensor, mean: Tensor, variance: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Return sum(dy) and sum(dy x') of a part: by channel (1, C) of a batch norm, by (sample, channel) of a group norm.

    Args:
        norm, x, mean, variance: the norm, a part of its input, and the statistics of the whole.
        dy: gradient of the part's result.
    """
    dims = [*([0] if norm.groups is None else []), *range(2, x.dim())]
    dy, hat = _wide(dy), normalized(norm, x, mean, variance)
    plain, weighted = dy.sum(dims), hat.mul_(dy).sum(dims)
    return (plain[None], weighted[None]) if norm.groups is None else (plain, weighted)


def input_gradient(
    norm: Norm, x: Tensor, weight: Tensor | None, mean: Tensor, variance: Tensor, dy: Tensor,
    sums: tuple[Tensor, Tensor], count: int, own: tuple[int, int, int] | None = None,
) -> Tensor:  # fmt: skip
    """Return the gradient of a part of a norm's input: see the formula in this module's docstring.

    Args:
        norm, x, weight, mean, variance: the norm, a part of its input, its weight, and the statistics of the whole.
        dy: gradient of the part's result.
        sums: of `gradient_sums` over all parts.
        count: elements that share a statistic.
        own: dimension, first element and number of the elements of this part that no other part counts; None: all.
    """
    rank, channels = x.dim(), x.shape[1]
    dx = _wide(dy)
    if weight is not None:
        dx = dx * norm.per_channel(weight, rank)
    elif dx is dy:
        dx = dx.clone()  # it is changed in place
    plain, weighted = sums if weight is None else (total * weight for total in sums)
    dim, first, length = own or (0, 0, x.shape[0])
    # the sums are subtracted once for each element, though parts overlap
    hat = normalized(norm, x.narrow(dim, first, length), mean, variance)
    hat.mul_(norm.per_group(norm.grouped(weighted) / count, channels, rank))
    hat.add_(norm.per_group(norm.grouped(plain) / count, channels, rank))
    dx.narrow(dim, first, length).sub_(hat)
    return dx.mul_(norm.per_group(torch.rsqrt(variance + norm.eps), channels, rank)).to(x.dtype)


class Normalize(torch.autograd.Function):
    """A norm with known statistics, whose derivative takes the sums over all parts as given."""

    @staticmethod
    def forward(
        ctx: Any, norm: Norm, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor,
        sums: tuple[Tensor, Tensor] | None, count: int, own: tuple[int, int, int], first: bool,
    ) -> Tensor:  # fmt: skip
        """Return the normalized part, scaled by the weight, plus the bias.

        Args:
            ctx: autograd's context.
            norm, x, weight, bias, mean, variance: the norm, a part of its input, and the statistics of the whole.
            sums: of `gradient_sums` over all parts; None if there will be no backward pass.
            count: elements that share a statistic.
            own: dimension, first element and number of the elements of this part that no other part counts.
            first: whether this part returns the gradients of weight and bias, for all.
        """
        ctx.norm, ctx.sums, ctx.count, ctx.own, ctx.first = norm, sums, count, own, first
        ctx.dtypes = [None if vector is None else vector.dtype for vector in (weight, bias)]
        ctx.save_for_backward(x, weight, mean, variance)
        y, rank = normalized(norm, x, mean, variance), x.dim()
        if weight is not None:
            y.mul_(norm.per_channel(weight, rank))
        if bias is not None:
            y.add_(norm.per_channel(bias, rank))
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the gradients of a part's input and, from the first part, those of weight and bias."""
        (dy,) = gradients
        x, weight, mean, variance = ctx.saved_tensors
        dx = input_gradient(ctx.norm, x, weight, mean, variance, dy, ctx.sums, ctx.count, ctx.own)
        (of_bias, of_weight), (weight_dtype, bias_dtype) = ctx.sums, ctx.dtypes
        of_weight = of_weight.sum(0).to(weight_dtype) if ctx.first and weight_dtype is not None else None
        of_bias = of_bias.sum(0).to(bias_dtype) if ctx.first and bias_dtype is not None else None
        return None, dx, of_weight, of_bias, None, None, None, None, None, None
