"""Batch, group and instance norm of (N, C, ...) with the activation that follows, and with a residual before it.

For a set of M elements that share their statistics (batch norm: a channel of all samples; group norm: a group of
channels of a sample; instance norm: a channel of a sample), with the mean m and the variance v of x over the set:

    r = 1 / sqrt(v + eps)     x̂ = (x - m) r     z = x̂ · weight + bias + residual     y = a(z)

    g = dy · a'(z)     h = g · weight     dx = r (h - mean(h) - x̂ · mean(h · x̂))
    dresidual = g      dweight = Σ g · x̂  dbias = Σ g

where means are over the set and sums over all elements of a channel, in float32, or float64 for float64. a is the
identity, ReLU, leaky ReLU or SiLU.

Saved for the backward pass: x, m and v, 8 bytes a set. z is computed again from them, element by element, so that
neither z nor y is saved: plain torch saves y for ReLU and z for the others (in place, leaky ReLU saves y). y alone
would not do for ReLU: where y is 0, x̂ is lost, and dx needs it there, too. With a residual y is saved instead of the
residual: its sign is that of z, and the layer that reads it saves it anyway. SiLU has no residual.

Bytes moved, of b-byte elements and n of them: forward reads x for the moments, reads it again and writes y, 3 n b
(with a residual 4); backward reads dy and x for the two sums, reads both again and writes dx, 5 n b (with a residual
8). That is the least where a set does not fit into a multiprocessor: no dx is known before the last element of its set
was read. Plain torch moves 5 and 8 (with a residual 8 and 8).

Held: besides x, dy and y nothing of their size. Backward allocates dx alone, where plain torch has g, too; an engine
that knows that nothing else reads dy has dx written over it. Sums are made of parts in a fixed order: no atomics.
Moments of a part are computed in two passes over it, m first, and joined: Σ (x - m)² = Σ_i (q_i + n_i (m_i - m)²).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.library import custom_op
from torch.nn import functional as F

from memplan.errors import InputError
from memplan.kernels.launch import accumulated, block_of, jit, launch, launches, sigmoid, tl, warps_of

Activation = Literal["none", "relu", "leaky_relu", "silu"]
ACTIVATIONS: tuple[Activation, ...] = "none", "relu", "leaky_relu", "silu"

_TILE = 1024
"""Elements that a program takes at a time."""
_TILES = 16
"""Tiles of a part whose sums a program makes: its second pass over the part reads it from the cache."""
_LEAST_PIECE = 1 << 13
_PIECES = 32
"""The plain form computes so many pieces of a tensor one after the other, of at least `_LEAST_PIECE` elements."""


def batch_norm_act(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    activation: Activation = "relu",
    slope: float = 0.01,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``activation(F.batch_norm(x, ..., training=True) + residual)``, which saves `x` alone for the backward pass.

    Args:
        x: (N, C, ...), contiguous or channels last; other layouts are copied.
        weight, bias: (C,), of any dtype, or None.
        residual: of x's shape and dtype; `y` is saved, too, unless the activation is "none". Not with "silu".
        activation: "none", "relu", "leaky_relu" or "silu".
        slope: of "leaky_relu" below 0; with a residual at least 0.
        running_mean, running_var: (C,), updated in place, once: with the unbiased variance, as in torch.
        momentum: share of the batch in the running statistics.
        eps: added to the variance.

    Returns:
        A tensor of x's shape, dtype and layout.

    Raises:
        InputError: shapes or options that do not fit, fewer than two elements a channel, and under ``torch.vmap``.

    Example:
        >>> y = batch_norm_act(torch.randn(4, 8, 5, 5, requires_grad=True), torch.ones(8), torch.zeros(8))
        >>> y.shape
        torch.Size([4, 8, 5, 5])
    """
    y, mean, variance = _checked(
        x, residual=residual, weight=weight, bias=bias, groups=0, activation=activation, slope=slope, eps=eps
    )
    _check_vectors(x, running_mean=running_mean, running_var=running_var)
    with torch.no_grad():
        if running_mean is not None:
            running_mean.lerp_(mean.view(-1).to(running_mean.dtype), momentum)
        if running_var is not None:
            count = x.numel() // x.shape[1]
            running_var.lerp_(variance.view(-1).mul(count / (count - 1)).to(running_var.dtype), momentum)
    return y


def group_norm_act(
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    activation: Activation = "relu",
    slope: float = 0.01,
    eps: float = 1e-5,
) -> Tensor:
    """``activation(F.group_norm(x, groups, weight, bias, eps))``, which saves `x` alone for the backward pass.

    Args:
        x: (N, C, ...), contiguous or channels last; other layouts are copied.
        groups: divides C.
        weight, bias, activation, slope, eps: as for `batch_norm_act`.

    Returns:
        A tensor of x's shape, dtype and layout.

    Raises:
        InputError: shapes or options that do not fit, fewer than two elements a group, and under ``torch.vmap``.
    """
    if groups < 1 or x.dim() < 2 or x.shape[1] % groups:
        raise InputError(f"groups is {groups}, x has the shape {tuple(x.shape)}", expected="a number that divides C")
    return _checked(
        x, residual=None, weight=weight, bias=bias, groups=groups, activation=activation, slope=slope, eps=eps
    )[0]


def instance_norm_act(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    activation: Activation = "relu",
    slope: float = 0.01,
    eps: float = 1e-5,
) -> Tensor:
    """``activation(F.instance_norm(x, weight=weight, bias=bias, eps=eps))``, which saves `x` alone for the backward
    pass.

    Args:
        x: (N, C, ...), contiguous or channels last; other layouts are copied.
        weight, bias, activation, slope, eps: as for `batch_norm_act`.

    Returns:
        A tensor of x's shape, dtype and layout.

    Raises:
        InputError: shapes or options that do not fit, fewer than two elements a channel of a sample, and under
            ``torch.vmap``.
    """
    return _checked(
        x,
        residual=None,
        weight=weight,
        bias=bias,
        groups=max(1, x.shape[1] if x.dim() > 1 else 1),
        activation=activation,
        slope=slope,
        eps=eps,
    )[0]


def _checked(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    activation: str,
    slope: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Check the operands and return y, mean and variance, as `channel_norm`."""
    if x.dim() < 2 or not x.is_floating_point():
        raise InputError(f"x has the shape {tuple(x.shape)} and is of {x.dtype}", expected="(N, C, ...) of floats")
    if activation not in ACTIVATIONS:
        raise InputError(f"activation is {activation!r}", expected=" or ".join(map(repr, ACTIVATIONS)))
    _check_vectors(x, weight=weight, bias=bias)
    if residual is not None:
        if residual.shape != x.shape or residual.dtype != x.dtype:
            problem = f"{tuple(residual.shape)} and is of {residual.dtype}"
            raise InputError(f"residual has the shape {problem}", expected=f"x's, {tuple(x.shape)} of {x.dtype}")
        if activation == "silu" or (activation == "leaky_relu" and slope < 0):
            raise InputError(
                f"activation {activation!r}{'' if activation == 'silu' else f' with slope {slope}'} has a residual",
                expected="one whose result has the sign of its input",
                do="Add the residual by itself",
            )
    count = _Sets.of(x, groups).count
    if x.numel() == 0 or count < 2:
        raise InputError(
            f"x has the shape {tuple(x.shape)}: {count if x.numel() else 0} element(s) share a mean",
            expected="two or more",
        )
    if not _is_dense(x):
        x = x.contiguous()
    return channel_norm(x, residual, weight, bias, groups, activation, slope, eps)


def _check_vectors(x: Tensor, **vectors: Tensor | None) -> None:
    """Raise InputError unless each vector, by its name in the message, has a number for each channel of x."""
    for name, vector in vectors.items():
        if vector is not None and vector.shape != x.shape[1:2]:
            raise InputError(f"{name} has the shape {tuple(vector.shape)}", expected=f"{tuple(x.shape[1:2])}")


@dataclass(frozen=True)
class _Sets:
    """The sets of elements that share their statistics: x seen as (N, groups, channels of a group, positions)."""

    shape: tuple[int, int, int, int]
    dims: tuple[int, int]
    """Dimensions over which means and variances are taken."""

    @staticmethod
    def of(x: Tensor, groups: int) -> _Sets:
        """Return the sets of group norm, or for ``groups`` of 0 of batch norm."""
        samples, channels, positions = x.shape[0], x.shape[1], x.shape[2:].numel()
        if groups == 0:
            return _Sets((samples, channels, 1, positions), (0, 3))
        return _Sets((samples, groups, channels // groups, positions), (2, 3))

    @property
    def count(self) -> int:
        """Elements of a set."""
        return self.shape[self.dims[0]] * self.shape[self.dims[1]]

    @property
    def statistics(self) -> tuple[int, int]:
        """Shape of the means: (1, C) for batch norm, else (N, groups)."""
        return (1 if self.dims[0] == 0 else self.shape[0]), self.shape[1]

    def of_channels(self, statistics: Tensor) -> Tensor:
        """Statistics, (1, C) or (N, groups), for each channel: (1, C) or (N, C)."""
        return statistics.repeat_interleave(self.shape[2], 1) if self.shape[2] > 1 else statistics

    def sums(self, by_channel: Tensor) -> Tensor:
        """Sums over the sets of numbers of each channel of a sample, (N, C): (1, C) or (N, groups)."""
        if self.dims[0] == 0:
            return by_channel.sum(0, keepdim=True)
        return by_channel.unflatten(1, self.shape[1:3]).sum(2)


def _is_dense(x: Tensor) -> bool:
    """Whether positions follow each other evenly, in each channel or with the channels of each innermost."""
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim(), torch.contiguous_format)
    return x.is_contiguous() or x.is_contiguous(memory_format=channels_last)


# The ops


@custom_op("memplan::channel_norm", mutates_args=())
def channel_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    activation: str,
    slope: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, and the means and variances of the sets, (1, C) or (N, groups).

    Args:
        x: (N, C, ...), contiguous or channels last.
        residual: of x's shape and dtype, or None.
        weight, bias: (C,), or None.
        groups: of group norm; C for instance norm, 0 for batch norm.
        activation, slope: as for `batch_norm_act`.
        eps: added to the variance.
    """
    results = _empty_results(x, residual, weight, bias, groups, activation, slope, eps)
    y, mean, variance = results
    run = _norm_in_triton if launches(x, residual, weight, bias) else _norm
    residual = None if residual is None else _laid_out(residual, x)
    run(x, residual, weight, bias, _Sets.of(x, groups), activation, slope, eps, y, mean, variance)
    return results


@channel_norm.register_fake
def _empty_results(x, residual, weight, bias, groups, activation, slope, eps):
    """Memory for y, mean and variance: the op's results on fake tensors."""
    shape, dtype = _Sets.of(x, groups).statistics, accumulated(x.dtype)
    return torch.empty_like(x), x.new_empty(shape, dtype=dtype), x.new_empty(shape, dtype=dtype)


@custom_op("memplan::channel_norm_backward", mutates_args=())
def channel_norm_backward(
    d_y: Tensor,
    x: Tensor,
    y: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    groups: int,
    activation: str,
    slope: float,
    eps: float,
    added: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weight, bias and residual; empty where there is no such operand.

    Args:
        y: the result, where it says of which sign z was; None where z is computed again.
        added: whether there was a residual.
    """
    return differentiate(None, d_y, x, y, weight, bias, mean, variance, groups, activation, slope, eps, added)


@channel_norm_backward.register_fake
def _empty_gradients(d_y, x, y, weight, bias, mean, variance, groups, activation, slope, eps, added):
    return torch.empty_like(x), *_empty_other_gradients(x, weight, bias, added)


def _empty_other_gradients(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, added: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for the gradients of weight, bias and, if a residual was ``added``, of that; else without elements."""
    vectors = (x.new_empty(0) if vector is None else torch.empty_like(vector) for vector in (weight, bias))
    return *vectors, torch.empty_like(x) if added else x.new_empty(0)  # pyright: ignore[reportReturnType]


def differentiate(
    into: Tensor | None,
    d_y: Tensor,
    x: Tensor,
    y: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    groups: int,
    activation: str,
    slope: float,
    eps: float,
    added: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `channel_norm_backward`, with x's gradient written to ``into``, of x's layout: new memory if it is None, or
    that of ``d_y`` or ``x``."""
    d_x = torch.empty_like(x) if into is None else into
    other_gradients = _empty_other_gradients(x, weight, bias, added)
    run = _backward_in_triton if launches(d_y, x, y, weight, bias) else _backward
    d_y, y = _laid_out(d_y, x), None if y is None else _laid_out(y, x)
    run(d_y, x, y, weight, bias, mean, variance, _Sets.of(x, groups), activation, slope, eps, d_x, *other_gradients)
    return d_x, *other_gradients


def _laid_out(tensor: Tensor, x: Tensor) -> Tensor:
    """The tensor in x's layout."""
    if tensor.stride() == x.stride():
        return tensor
    return torch.empty_like(x, dtype=tensor.dtype).copy_(tensor)


def _save(ctx, inputs, output):
    """Save for the backward pass: x and the statistics, and y where its sign is needed (`torch.library` calls this
    after the op)."""
    x, residual, weight, bias, *ctx.options = inputs
    y, mean, variance = output
    ctx.mark_non_differentiable(mean, variance)
    ctx.added = residual is not None
    signs = y if ctx.added and ctx.options[1] != "none" else None
    ctx.save_for_backward(x, signs, weight, bias, mean, variance)


def _differentiate(ctx, d_y, d_mean, d_variance):
    """Gradients of the op's arguments, in their order. Those of mean and variance are not differentiable."""
    gradients = channel_norm_backward(d_y, *ctx.saved_tensors, *ctx.options, ctx.added)
    d_x, d_weight, d_bias, d_residual = gradients
    wanted = zip((d_x, d_residual, d_weight, d_bias), ctx.needs_input_grad, strict=False)
    return *(gradient if needed else None for gradient, needed in wanted), None, None, None, None


channel_norm.register_autograd(_differentiate, setup_context=_save)


@channel_norm.register_vmap
def _(info, in_dims, *args):
    raise InputError(
        "memplan.kernels.batch_norm_act, group_norm_act and instance_norm_act do not run under torch.vmap",
        do="Call them on the whole batch",
    )


# In plain torch


def _norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    sets: _Sets,
    activation: str,
    slope: float,
    eps: float,
    y: Tensor,
    mean: Tensor,
    variance: Tensor,
) -> None:
    """Write y, mean and variance of each set of elements that are normalized together, a piece at a time, in plain
    torch."""
    viewed = _by_sets(sets, x, residual, y)
    scales = _vectors(sets, mean.dtype, weight, bias)
    statistics = mean.view(_statistics_shape(sets)), variance.view(_statistics_shape(sets))
    for piece in _pieces(sets):
        values, added, out = (None if tensor is None else tensor[piece] for tensor in viewed)
        mean_part, variance_part = (tensor[piece] for tensor in statistics)
        assert values is not None
        assert out is not None
        mean_part.copy_(values.mean(sets.dims, keepdim=True, dtype=torch.float64))
        z = values.to(mean.dtype, copy=True).sub_(mean_part)
        variance_part.copy_(z.square().mean(sets.dims, keepdim=True, dtype=torch.float64))
        z = _affine(z.mul_(variance_part.add(eps).rsqrt_()), piece, scales)
        if added is not None:
            z += added
        out.copy_(_activated(z, activation, slope))


def _backward(
    d_y: Tensor,
    x: Tensor,
    y: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    sets: _Sets,
    activation: str,
    slope: float,
    eps: float,
    d_x: Tensor,
    d_weight: Tensor,
    d_bias: Tensor,
    d_residual: Tensor,
) -> None:
    """Write the gradient of x, and those of weight, bias and residual that have elements, in plain torch.

    With g the gradient before the activation, h = g · weight and x̂ the normalized x: d_x = (h - mean(h) - x̂ ·
    mean(h · x̂)) / deviation, d_weight = Σ g · x̂ and d_bias = Σ g.
    """
    residual_gradient = d_residual if d_residual.numel() else None
    viewed = _by_sets(sets, d_y, x, y, d_x, residual_gradient)
    scales = _vectors(sets, mean.dtype, weight, bias)
    means, variances = mean.view(_statistics_shape(sets)), variance.view(_statistics_shape(sets))
    weight_sums, bias_sums = (
        mean.new_zeros(sets.shape[1:3], dtype=torch.float64) if gradient.numel() else None
        for gradient in (d_weight, d_bias)
    )
    for piece in _pieces(sets):
        grad, values, result, out, out_residual = (None if tensor is None else tensor[piece] for tensor in viewed)
        assert grad is not None
        assert values is not None
        assert out is not None
        rstd = variances[piece].add(eps).rsqrt_()
        normalized = values.to(mean.dtype, copy=True).sub_(means[piece]).mul_(rstd)
        if result is None and activation != "none":
            z = _affine(normalized.clone(), piece, scales)
        else:
            z = result if result is None else result.to(mean.dtype)
        gradient = _before_activation(grad.to(mean.dtype), z, activation, slope)
        del z
        for sums, terms in ((bias_sums, gradient), (weight_sums, gradient * normalized)):
            if sums is not None:
                sums[piece[1]] += terms.sum((0, 3), dtype=torch.float64)
        if out_residual is not None:
            out_residual.copy_(gradient)
        scale = scales[0]
        if scale is not None:
            gradient = gradient * scale[:, piece[1]]
        mean_gradient = gradient.mean(sets.dims, keepdim=True, dtype=torch.float64).to(rstd.dtype)
        normalized *= -(gradient * normalized).mean(sets.dims, keepdim=True, dtype=torch.float64)
        out.copy_(normalized.add_(gradient).sub_(mean_gradient).mul_(rstd))
    if weight_sums is not None:
        d_weight.copy_(weight_sums.view(-1))
    if bias_sums is not None:
        d_bias.copy_(bias_sums.view(-1))


def _by_sets(sets: _Sets, *tensors: Tensor | None) -> list[Tensor | None]:
    """Views of tensors as (N, groups, channels of a group, positions)."""
    return [
        None
        if tensor is None
        else (tensor.flatten(2) if tensor.dim() > 2 else tensor[:, :, None]).unflatten(1, sets.shape[1:3])
        for tensor in tensors
    ]


def _statistics_shape(sets: _Sets) -> tuple[int, int, int, int]:
    return *sets.statistics, 1, 1


def _vectors(sets: _Sets, dtype: torch.dtype, *vectors: Tensor | None) -> list[Tensor | None]:
    """Weight and bias as (1, groups, channels of a group, 1)."""
    return [None if tensor is None else tensor.to(dtype).view(1, *sets.shape[1:3], 1) for tensor in vectors]


def _pieces(sets: _Sets) -> Iterator[tuple[slice, slice]]:
    """Ranges of samples and groups whose sets are computed at a time; batch norm's sets have all samples."""
    samples, groups, *inner = sets.shape
    group_size = inner[0] * inner[1]  # elements of a group of a sample
    most_elements = max(_LEAST_PIECE, samples * groups * group_size // _PIECES)
    if sets.dims[0] == 0:
        step = max(1, most_elements // (samples * group_size))
        yield from ((slice(None), slice(first, first + step)) for first in range(0, groups, step))
        return
    group_step = max(1, min(groups, most_elements // group_size))
    sample_step = max(1, most_elements // (groups * group_size))
    for sample in range(0, samples, sample_step):
        for group in range(0, groups, group_step):
            yield slice(sample, sample + sample_step), slice(group, group + group_step)


def _affine(values: Tensor, piece: tuple[slice, slice], scales: list[Tensor | None]) -> Tensor:
    """values · weight + bias, in place. ``scales``: weight and bias, each None or (1, groups, channels of a group,
    1)."""
    weight, bias = scales
    if weight is not None:
        values *= weight[:, piece[1]]
    if bias is not None:
        values += bias[:, piece[1]]
    return values


def _activated(z: Tensor, activation: str, slope: float) -> Tensor:
    """The activation of z, in place."""
    if activation == "relu":
        return z.relu_()
    if activation == "leaky_relu":
        return F.leaky_relu_(z, slope)
    return F.silu(z, inplace=True) if activation == "silu" else z


def _before_activation(d_y: Tensor, z: Tensor | None, activation: str, slope: float) -> Tensor:
    """Gradient before the activation, from that after it. z is the activation's input, or its result where that has the
    same sign; None without an activation."""
    if z is None or activation == "none":
        return d_y
    if activation == "silu":
        return torch.ops.aten.silu_backward(d_y, z)
    if activation == "relu":
        return torch.ops.aten.threshold_backward(d_y, z, 0)
    return torch.ops.aten.leaky_relu_backward(d_y, z, slope, False)


# In Triton: x as (N, C, S), whose channels or positions lie side by side


@jit
def _gradient(grad, z, slope, ACTIVATION: tl.constexpr):
    """Gradient before the activation, from that after it (``grad``). z is the activation's input, or its result where
    that has the same sign."""
    if ACTIVATION == "relu":
        grad = tl.where(z <= 0, 0.0, grad)
    elif ACTIVATION == "leaky_relu":
        grad = tl.where(z > 0, grad, grad * slope)
    elif ACTIVATION == "silu":
        sigma, sigma_slope = sigmoid(z)
        grad *= sigma + z * sigma_slope
    return grad


@jit
def moments_kernel(
    x, means, squares, channels, positions, parts, length, channel_stride, position_stride,
    CHANNELS: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """One program for CHANNELS channels of a part of the positions of a sample: their mean, and the sum of squared
    differences from it.

    A sample has ``parts`` parts of ``length`` positions. Results are of shape (N, parts, channels).
    """
    sample_part = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    present = channel < channels
    begin = (sample_part % parts) * length
    end = tl.minimum(begin + length, positions)
    x += (sample_part // parts).to(tl.int64) * channels * positions
    channel_offset = channel.to(tl.int64)[:, None] * channel_stride
    total = tl.zeros((CHANNELS, POSITIONS), tl.float32)
    for first in range(begin, end, POSITIONS):
        position = first + tl.arange(0, POSITIONS)
        inside = present[:, None] & (position < end)[None, :]
        offset = channel_offset + position.to(tl.int64)[None, :] * position_stride
        total += tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(total, 1) / (end - begin)
    total_squared = tl.zeros((CHANNELS, POSITIONS), tl.float32)
    for first in range(begin, end, POSITIONS):
        position = first + tl.arange(0, POSITIONS)
        inside = present[:, None] & (position < end)[None, :]
        offset = channel_offset + position.to(tl.int64)[None, :] * position_stride
        value = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
        difference = tl.where(inside, value - mean[:, None], 0.0)
        total_squared += difference * difference
    result_offset = sample_part.to(tl.int64) * channels + channel
    tl.store(means + result_offset, mean, mask=present)
    tl.store(squares + result_offset, tl.sum(total_squared, 1), mask=present)


@jit
def normalize_kernel(
    x, residual, y, mean, scale, shift, channels, positions, parts, sample_stride,
    channel_stride, position_stride, slope,
    RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr, CHANNELS: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """y = activation((x - mean) · scale + shift + residual); a program for CHANNELS channels and POSITIONS positions of
    a sample.

    ``mean`` and ``scale`` have a number for each channel, of a sample after ``sample_stride`` numbers, which is 0 where
    samples share them; ``shift`` has one for each channel.
    """
    sample_part = tl.program_id(0)
    sample = (sample_part // parts).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    position = (sample_part % parts) * POSITIONS + tl.arange(0, POSITIONS)
    present = channel < channels
    inside = present[:, None] & (position < positions)[None, :]
    offset = sample * channels * positions
    offset += channel.to(tl.int64)[:, None] * channel_stride + position.to(tl.int64)[None, :] * position_stride
    z = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
    z -= tl.load(mean + sample * sample_stride + channel, mask=present, other=0.0)[:, None]
    z *= tl.load(scale + sample * sample_stride + channel, mask=present, other=0.0)[:, None]
    z += tl.load(shift + channel, mask=present, other=0.0)[:, None]
    if RESIDUAL:
        z += tl.load(residual + offset, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "relu":
        z = tl.where(z < 0, 0.0, z)
    elif ACTIVATION == "leaky_relu":
        z = tl.where(z > 0, z, z * slope)
    elif ACTIVATION == "silu":
        sigma, _ = sigmoid(z)
        z *= sigma
    tl.store(y + offset, z.to(y.dtype.element_ty), mask=inside)


@jit
def gradient_sums_kernel(
    d_y, x, y, mean, scale, shift, sums, products, channels, positions, parts, length, sample_stride,
    channel_stride, position_stride, slope,
    SIGNS: tl.constexpr, ACTIVATION: tl.constexpr, CHANNELS: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """One program for CHANNELS channels of a part of the positions of a sample: the sums of g and of g · (x - m).

    g is the gradient before the activation, whose input z has the sign of ``y`` if SIGNS, else is computed again from
    x. The other arguments are as for `normalize_kernel`, parts as for `moments_kernel`.
    """
    sample_part = tl.program_id(0)
    sample = (sample_part // parts).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    present = channel < channels
    begin = (sample_part % parts) * length
    end = tl.minimum(begin + length, positions)
    channel_offset = sample * channels * positions + channel.to(tl.int64)[:, None] * channel_stride
    channel_mean = tl.load(mean + sample * sample_stride + channel, mask=present, other=0.0)[:, None]
    channel_scale = tl.load(scale + sample * sample_stride + channel, mask=present, other=0.0)[:, None]
    channel_shift = tl.load(shift + channel, mask=present, other=0.0)[:, None]
    gradient_sum = tl.zeros((CHANNELS, POSITIONS), tl.float32)
    product_sum = tl.zeros((CHANNELS, POSITIONS), tl.float32)
    for first in range(begin, end, POSITIONS):
        position = first + tl.arange(0, POSITIONS)
        inside = present[:, None] & (position < end)[None, :]
        offset = channel_offset + position.to(tl.int64)[None, :] * position_stride
        grad = tl.load(d_y + offset, mask=inside, other=0.0).to(tl.float32)
        centred = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32) - channel_mean
        if SIGNS:  # as a statement: both sides of a conditional expression are compiled
            z = tl.load(y + offset, mask=inside, other=0.0).to(tl.float32)
        else:
            z = centred * channel_scale + channel_shift
        grad = tl.where(inside, _gradient(grad, z, slope, ACTIVATION), 0.0)
        gradient_sum += grad
        product_sum += grad * centred
    result_offset = sample_part.to(tl.int64) * channels + channel
    tl.store(sums + result_offset, tl.sum(gradient_sum, 1), mask=present)
    tl.store(products + result_offset, tl.sum(product_sum, 1), mask=present)


@jit
def differentiate_kernel(
    d_y, x, y, mean, scale, shift, through_mean, through_variance, d_x, d_residual, channels, positions, parts,
    sample_stride, channel_stride, position_stride, slope,
    SIGNS: tl.constexpr, RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
    CHANNELS: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """d_x = g · scale - through_mean - (x - mean) · through_variance, with g the gradient before the activation.

    One program for CHANNELS channels and POSITIONS positions of a sample: reads them all before it writes any, so that
    d_x may be d_y or x. ``through_mean`` and ``through_variance`` have a number for each channel, as ``scale`` has; the
    other arguments are as for `gradient_sums_kernel`.
    """
    sample_part = tl.program_id(0)
    sample = (sample_part // parts).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    position = (sample_part % parts) * POSITIONS + tl.arange(0, POSITIONS)
    present = channel < channels
    inside = present[:, None] & (position < positions)[None, :]
    offset = sample * channels * positions
    offset += channel.to(tl.int64)[:, None] * channel_stride + position.to(tl.int64)[None, :] * position_stride
    statistics_offset = sample * sample_stride + channel
    channel_scale = tl.load(scale + statistics_offset, mask=present, other=0.0)[:, None]
    grad = tl.load(d_y + offset, mask=inside, other=0.0).to(tl.float32)
    centred = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
    centred -= tl.load(mean + statistics_offset, mask=present, other=0.0)[:, None]
    if SIGNS:
        z = tl.load(y + offset, mask=inside, other=0.0).to(tl.float32)
    else:
        z = centred * channel_scale + tl.load(shift + channel, mask=present, other=0.0)[:, None]
    grad = _gradient(grad, z, slope, ACTIVATION)
    if RESIDUAL:
        tl.store(d_residual + offset, grad.to(d_residual.dtype.element_ty), mask=inside)
    grad *= channel_scale
    grad -= tl.load(through_mean + statistics_offset, mask=present, other=0.0)[:, None]
    grad -= centred * tl.load(through_variance + statistics_offset, mask=present, other=0.0)[:, None]
    tl.store(d_x + offset, grad.to(d_x.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class _Grid:
    """How programs share (N, C, S)."""

    samples: int
    channels: int
    positions: int
    """S."""
    channels_last: bool

    @staticmethod
    def of(x: Tensor) -> _Grid:
        return _Grid(x.shape[0], x.shape[1], x.shape[2:].numel(), not x.is_contiguous())

    @property
    def tile(self) -> dict[str, int]:
        """Channels and positions of a tile, and warps."""
        if self.channels_last:
            channels = block_of(self.channels, largest=64)
            positions = max(1, _TILE // channels)
        else:
            positions = block_of(self.positions, _TILE)
            channels = max(1, _TILE // positions)
        return {"CHANNELS": channels, "POSITIONS": positions, "num_warps": warps_of(channels * positions)}

    @property
    def strides(self) -> tuple[int, int]:
        """Of channels and of positions."""
        return (1, self.channels) if self.channels_last else (self.positions, 1)

    @property
    def length(self) -> int:
        """Positions of a part whose sums a program makes."""
        return _TILES * self.tile["POSITIONS"]

    def parts(self, length: int) -> int:
        """Parts of this length of the positions of a sample."""
        return -(-self.positions // length)

    def programs(self, length: int) -> tuple[int, int]:
        """Programs, each for a part of the positions of a sample, and for a tile's channels."""
        return self.samples * self.parts(length), -(-self.channels // self.tile["CHANNELS"])


def _coefficients(
    weight: Tensor | None, bias: Tensor | None, sets: _Sets, mean: Tensor, variance: Tensor, eps: float, channels: int
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Coefficients of y = (x - mean) · scale + shift: mean and scale of each channel, (1, C) or (N, C), shift, (C,),
    and the stride between samples in the first two, 0 where all samples share them."""
    scale = sets.of_channels(variance.add(eps).rsqrt_())
    scale = scale if weight is None else scale * weight
    shift = mean.new_zeros(channels) if bias is None else bias.to(mean.dtype)
    return sets.of_channels(mean), scale, shift, 0 if sets.dims[0] == 0 else channels


def _norm_in_triton(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    sets: _Sets,
    activation: str,
    slope: float,
    eps: float,
    y: Tensor,
    mean: Tensor,
    variance: Tensor,
) -> None:
    """As `_norm`, by Triton's kernels."""
    grid = _Grid.of(x)
    tile, length, parts = grid.tile, grid.length, grid.parts(grid.length)
    means, squares = mean.new_empty(2, grid.samples, parts, grid.channels).unbind()
    launch(
        moments_kernel, grid.programs(length),
        x, means, squares, grid.channels, grid.positions, parts, length, *grid.strides, **tile,
    )  # fmt: skip
    _join(means, squares, sets, grid, mean, variance)
    del means, squares
    coefficients = _coefficients(weight, bias, sets, mean, variance, eps, grid.channels)
    channel_means, scale, shift, sample_stride = coefficients
    launch(
        normalize_kernel, grid.programs(tile["POSITIONS"]),
        x, x if residual is None else residual, y, channel_means, scale, shift, grid.channels, grid.positions,
        grid.parts(tile["POSITIONS"]), sample_stride, *grid.strides, slope,
        RESIDUAL=residual is not None, ACTIVATION=activation, **tile,
    )  # fmt: skip


def _join(means: Tensor, squares: Tensor, sets: _Sets, grid: _Grid, mean: Tensor, variance: Tensor) -> None:
    """Write mean and variance of each set from those of parts, both (N, parts, C): the means of a channel over a part,
    and the sums of squared differences from them."""
    counts = means.new_full((grid.parts(grid.length), 1, 1), grid.length)
    counts[-1] = grid.positions - (grid.parts(grid.length) - 1) * grid.length  # the last part may be shorter
    by_sets = (0, 1, 3) if sets.dims[0] == 0 else (1, 3)
    means, squares = (part.unflatten(2, sets.shape[1:3]) for part in (means, squares))  # (N, parts, groups, channels)
    shape = (mean.shape[0], 1, mean.shape[1], 1)
    mean.copy_((means * counts).sum(by_sets).view(mean.shape).div_(sets.count))
    between = (means - mean.view(shape)).square_().mul_(counts)
    variance.copy_(between.add_(squares).sum(by_sets).view(mean.shape).div_(sets.count))


def _backward_in_triton(
    d_y: Tensor,
    x: Tensor,
    y: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    sets: _Sets,
    activation: str,
    slope: float,
    eps: float,
    d_x: Tensor,
    d_weight: Tensor,
    d_bias: Tensor,
    d_residual: Tensor,
) -> None:
    """As `_backward`, by Triton's kernels."""
    grid = _Grid.of(x)
    tile, length, parts = grid.tile, grid.length, grid.parts(grid.length)
    channel_means, scale, shift, sample_stride = _coefficients(weight, bias, sets, mean, variance, eps, grid.channels)
    gradient_sums, product_sums = mean.new_empty(2, grid.samples, parts, grid.channels).unbind()
    signs = x if y is None else y  # without y any tensor, which is not read
    launch(
        gradient_sums_kernel, grid.programs(length),
        d_y, x, signs, channel_means, scale, shift, gradient_sums, product_sums, grid.channels, grid.positions, parts,
        length, sample_stride, *grid.strides, slope, SIGNS=y is not None, ACTIVATION=activation, **tile,
    )  # fmt: skip
    gradient_sums, product_sums = gradient_sums.sum(1), product_sums.sum(1)  # (N, C)
    rstd = variance.add(eps).rsqrt_()
    product_sums *= sets.of_channels(rstd)
    if d_weight.numel():
        d_weight.copy_(product_sums.sum(0))
    if d_bias.numel():
        d_bias.copy_(gradient_sums.sum(0))
    if weight is not None:
        gradient_sums, product_sums = gradient_sums * weight, product_sums * weight
    through_mean = sets.of_channels(sets.sums(gradient_sums).div_(sets.count).mul_(rstd))
    through_variance = sets.of_channels(sets.sums(product_sums).div_(sets.count).mul_(rstd).mul_(rstd))
    has_residual = d_residual.numel() > 0
    launch(
        differentiate_kernel, grid.programs(tile["POSITIONS"]),
        d_y, x, signs, channel_means, scale, shift, through_mean, through_variance,
        d_x, d_residual if has_residual else d_x,
        grid.channels, grid.positions, grid.parts(tile["POSITIONS"]), sample_stride, *grid.strides, slope,
        SIGNS=y is not None, RESIDUAL=has_residual, ACTIVATION=activation, **tile,
    )  # fmt: skip
