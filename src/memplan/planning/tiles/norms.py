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
    """Id of the value that is normalized."""
    weight: int | None
    """Ids of weight and bias, vectors over channels."""
    bias: int | None
    eps: float
    groups: int | None = None
    """Groups of a group norm; None for a batch norm."""

    @property
    def output(self) -> int:
        """Id of the normalized value."""
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
        """Return sums for each sample and channel as sums for each statistic: of a group norm (samples, groups)."""
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
        part = _wide(part)
        if part.is_contiguous():  # as exact, and three times as fast on the CPU; the groups of samples are channels
            channels = part if self._norm.groups is None else part.reshape(1, -1, part.shape[-1])
            mean, variance = torch.batch_norm_update_stats(channels, running_mean=None, running_var=None, momentum=0.0)
            if self._norm.groups is not None:
                mean, variance = mean.reshape(part.shape[:2]), variance.reshape(part.shape[:2])
        else:
            variance, mean = torch.var_mean(part, dims, correction=0)
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
    if _has_kernel(x, mean) and dy.is_contiguous():
        return _gradient_sums_in_one_pass(norm, x, mean, variance, dy)
    dims = [*([0] if norm.groups is None else []), *range(2, x.dim())]
    rank, channels = x.dim(), x.shape[1]
    dy, inverse = _wide(dy), torch.rsqrt(variance + norm.eps)
    sum_dy = dy.sum(dims)
    sum_dy_deviation = (_wide(x) - norm.per_group(mean, channels, rank)).mul_(dy).sum(dims)
    if norm.groups is None:
        return sum_dy[None], (sum_dy_deviation * inverse[0])[None]
    return sum_dy, sum_dy_deviation * inverse.repeat_interleave(channels // norm.groups, dim=1)


def _has_kernel(x: Tensor, mean: Tensor) -> bool:
    """Return whether torch's kernels of a batch norm take a part of a norm's input: a contiguous one in the dtype of
    the statistics."""
    return x.is_contiguous() and x.dtype == mean.dtype


def _gradient_sums_in_one_pass(
    norm: Norm, x: Tensor, mean: Tensor, variance: Tensor, dy: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what `gradient_sums` does, by torch's kernel of a batch norm's derivative, which computes them as the
    gradients of bias and weight."""
    samples, channels = x.shape[:2]
    inverse = torch.rsqrt(variance + norm.eps)
    if norm.groups is not None:  # the channels of samples are channels
        x, dy = x.reshape(1, samples * channels, -1), dy.reshape(1, samples * channels, -1)
        mean, inverse = (each.repeat_interleave(channels // norm.groups, dim=1) for each in (mean, inverse))
    _, sum_dy_x, sum_dy = torch.ops.aten.native_batch_norm_backward.default(
        dy, x, None, None, None, mean.reshape(-1), inverse.reshape(-1), True, norm.eps, [False, True, True]
    )
    shape = (1, channels) if norm.groups is None else (samples, channels)
    return sum_dy.reshape(shape), sum_dy_x.reshape(shape)


def input_gradient(
    norm: Norm, x: Tensor, weight: Tensor | None, mean: Tensor, variance: Tensor, dy: Tensor,
    sums: tuple[Tensor, Tensor], count: int, own_range: tuple[int, int, int] | None = None,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return dx = (w dy - sum(w dy) / n - x' sum(w dy x') / n) / deviation, the gradient of a part of a norm's input.

    Args:
        norm, x, weight, mean, variance: the norm, a part of its input, its weight, and the statistics of the whole.
        dy: gradient of the part's result.
        sums: of `gradient_sums` over all parts.
        count: elements that share a statistic: n.
        own_range: the elements of this part that no other part counts, as (dim, start, length) of `narrow`; None: all.
        out: the result is written to it; it may be ``dy``.
    """
    rank, channels = x.dim(), x.shape[1]
    inverse = torch.rsqrt(variance + norm.eps)
    scale = norm.per_group(inverse, channels, rank)
    scale = scale if weight is None else scale * norm.per_channel(_wide(weight), rank)
    plain, weighted = sums if weight is None else (total * weight for total in sums)
    of_deviation, of_all = (norm.grouped(total) / count * inverse for total in (weighted, plain))
    own_range = own_range or (0, 0, x.shape[0])
    is_whole = own_range == (own_range[0], 0, x.shape[own_range[0]])
    if is_whole and _has_kernel(x, mean) and dy.dtype == x.dtype:
        # centred first, as torch does: far from 0, x scaled and shifted by its kernel of a norm rounds more
        of_sums = x - norm.per_group(mean, channels, rank)
        of_sums.mul_(norm.per_group(-of_deviation * inverse, channels, rank))
        of_sums.sub_(norm.per_group(of_all, channels, rank))
        return torch.addcmul(of_sums, dy, scale, out=of_sums if out is None else out)
    dx = _wide(dy) * scale
    # the sums are subtracted once for each element, though parts overlap
    part = dx.narrow(*own_range)
    deviation = _wide(x.narrow(*own_range)) - norm.per_group(mean, channels, rank)
    part.addcmul_(deviation, norm.per_group(of_deviation * inverse, channels, rank), value=-1)
    part.sub_(norm.per_group(of_all, channels, rank))
    return dx.to(x.dtype) if out is None else out.copy_(dx)


def _in_one_pass(
    norm: Norm, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor
) -> Tensor:
    """Return a contiguous part of a norm's input, normalized, scaled and shifted by torch's kernel of a batch norm, for
    which the channels of a group norm's samples are channels, too.

    Arguments: see `Normalize`.
    """
    samples, channels, rows = x.shape[0], x.shape[1], x
    if norm.groups is not None:
        rows = x.reshape(1, samples * channels, -1)
        weight, bias = (None if each is None else each.expand(samples, channels) for each in (weight, bias))
        mean, variance = (each.repeat_interleave(channels // norm.groups, dim=1) for each in (mean, variance))
        weight, bias = (None if each is None else each.reshape(-1) for each in (weight, bias))
    result, _, _ = torch.native_batch_norm(
        rows, weight, bias, mean.reshape(-1), variance.reshape(-1), training=False, momentum=0.0, eps=norm.eps
    )
    return result.reshape(x.shape)


class Normalize(torch.autograd.Function):
    """A norm with known statistics, whose derivative takes the sums over all parts as given."""

    @staticmethod
    def forward(
        ctx: Any, norm: Norm, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor,
        sums: tuple[Tensor, Tensor] | None, count: int, own_range: tuple[int, int, int],
        has_parameter_gradients: bool,
    ) -> Tensor:  # fmt: skip
        """Return the normalized part, scaled by the weight, plus the bias.

        Args:
            ctx: autograd's context.
            norm, x, weight, bias, mean, variance: the norm, a part of its input, and the statistics of the whole.
            sums: of `gradient_sums` over all parts; None if there will be no backward pass.
            count: elements that share a statistic.
            own_range: the elements of this part that no other part counts, as (dim, start, length) of `narrow`.
            has_parameter_gradients: whether this part returns the gradients of weight and bias, those of all parts.
        """
        ctx.norm, ctx.sums, ctx.count, ctx.own_range = norm, sums, count, own_range
        ctx.has_parameter_gradients = has_parameter_gradients
        ctx.dtypes = [None if vector is None else vector.dtype for vector in (weight, bias)]
        ctx.save_for_backward(x, weight, mean, variance)
        if _has_kernel(x, mean):
            return _in_one_pass(norm, x, weight, bias, mean, variance)
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
        dx = input_gradient(ctx.norm, x, weight, mean, variance, dy, ctx.sums, ctx.count, ctx.own_range)
        weight_gradient = bias_gradient = None
        if ctx.has_parameter_gradients:
            (sum_dy, sum_dy_x), (weight_dtype, bias_dtype) = ctx.sums, ctx.dtypes
            weight_gradient = None if weight_dtype is None else sum_dy_x.sum(0).to(weight_dtype)
            bias_gradient = None if bias_dtype is None else sum_dy.sum(0).to(bias_dtype)
        return None, dx, weight_gradient, bias_gradient, None, None, None, None, None, None
