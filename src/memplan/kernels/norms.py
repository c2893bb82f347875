"""RMS norm and layer norm over the last dimension, with the addition of a residual before.

For a row h = x + residual of D elements (h = x without a residual), with m the mean of h, or 0 in RMS norm:

    r = 1 / sqrt(mean((h - m)²) + eps)     ĥ = (h - m) r     y = ĥ · weight + bias

    g = dy · weight     dx = dresidual = r (g - mean(g) - ĥ · mean(g · ĥ)) + dh     dweight = Σ dy · ĥ     dbias = Σ dy

where mean(g) is left out in RMS norm, dh is what reaches h by itself, and the sums are over rows. Sums are float32, or
float64 for float64.

Saved for the backward pass: h, which the residual stream holds anyway, r, and in layer norm m, 4 bytes a row each. y is
not saved, and neither is x beside h.

Bytes moved, of b-byte elements and N rows: forward reads x and residual and writes h and y, 4 N D b; backward reads dy,
dh and h and writes dx, 4 N D b (without a residual 2 and 3). That is the least: each is moved once. In the backward
pass each program goes over many rows and keeps its part of dweight in registers, so that this costs no second pass:
8 D bytes a program, two programs a multiprocessor.
"""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor
from torch.library import custom_op

from memplan.errors import InputError
from memplan.kernels.launch import accumulated, block_of, jit, launch, launches, programs, rows_of, tl, warps_of

LARGEST_ROW = 16384
"""Elements of a row that a program of the kernels holds; longer rows go through the plain form."""

_TILE = 1024
"""Elements that a program takes at a time: several rows, where they are short."""


@overload
def rms_norm(x: Tensor, weight: Tensor, residual: None = None, eps: float = 1e-6) -> Tensor: ...
@overload
def rms_norm(x: Tensor, weight: Tensor, residual: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]: ...
def rms_norm(
    x: Tensor, weight: Tensor, residual: Tensor | None = None, eps: float = 1e-6
) -> Tensor | tuple[Tensor, Tensor]:
    """RMS norm of ``x``, or of ``x + residual``, over the last dimension.

    Args:
        x: (..., D).
        weight: (D,), of any dtype.
        residual: of x's shape, or None.
        eps: added to the mean of squares.

    Returns:
        The norm, of the dtype of what is normalized; with a residual also the sum, which is the next residual.

    Raises:
        InputError: shapes that do not fit, and under ``torch.vmap``.

    Example:
        >>> y, residual = rms_norm(torch.randn(2, 8), torch.ones(8), torch.randn(2, 8))
        >>> y.shape
        torch.Size([2, 8])
    """
    return _norm_of(x, weight, None, residual, eps, centred=False)


@overload
def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: None = None, eps: float = 1e-5
) -> Tensor: ...
@overload
def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, residual: Tensor, eps: float = 1e-5
) -> tuple[Tensor, Tensor]: ...
@overload
def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, eps: float = 1e-5
) -> tuple[Tensor, Tensor]: ...
def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, eps: float = 1e-5
) -> Tensor | tuple[Tensor, Tensor]:
    """Layer norm of ``x``, or of ``x + residual``, over the last dimension.

    Args:
        x: (..., D).
        weight: (D,), of any dtype.
        bias: (D,), or None.
        residual: of x's shape, or None.
        eps: added to the variance.

    Returns:
        The norm, of the dtype of what is normalized; with a residual also the sum, which is the next residual.

    Raises:
        InputError: shapes that do not fit, and under ``torch.vmap``.
    """
    return _norm_of(x, weight, bias, residual, eps, centred=True)


def _norm_of(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, eps: float, centred: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """Check the arguments and return the norm over the last dimension: layer norm if `centred`, else RMS norm. With a
    residual, return (norm of x + residual, x + residual)."""
    if residual is not None and residual.shape != x.shape:
        raise InputError(f"residual has the shape {tuple(residual.shape)}", expected=f"x's, {tuple(x.shape)}")
    for name, operand in (("weight", weight), ("bias", bias)):
        if operand is not None and operand.shape != x.shape[-1:]:
            raise InputError(f"{name} has the shape {tuple(operand.shape)}", expected=f"{tuple(x.shape[-1:])}")
    rows = x.reshape(-1, x.shape[-1])
    residual_rows = None if residual is None else residual.reshape(rows.shape)
    y, h, _, _ = norm(rows, residual_rows, weight, bias, eps, centred)
    return y.view(x.shape) if residual is None else (y.view(x.shape), h.view(x.shape))


# The ops


@custom_op("memplan::norm", mutates_args=())
def norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalize rows (N, D): layer norm if `centred`, else RMS norm.

    Returns:
        y, the norm of h = x + residual, (N, D); h itself, empty without a residual; the mean of each row, (N,), empty
        unless `centred`; and the inverse of its standard deviation, or of its root mean square, (N,).
    """
    results = _empty_results(x, residual, weight, bias, eps, centred)
    run = _norm_in_triton if x.shape[1] <= LARGEST_ROW and launches(x, residual, weight, bias) else _norm
    y, h, mean, rstd = results
    run(x, residual, weight, bias, y, h, mean, rstd, eps)
    return results


@norm.register_fake
def _empty_results(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Memory for y, h, mean and rstd, as `norm` returns them: the op's results on fake tensors."""
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    y = x.new_empty(x.shape, dtype=dtype)
    h = x.new_empty((0,) if residual is None else x.shape, dtype=dtype)
    mean = x.new_empty(x.shape[0] if centred else 0, dtype=accumulated(dtype))
    return y, h, mean, x.new_empty(x.shape[0], dtype=accumulated(dtype))


@custom_op("memplan::norm_backward", mutates_args=())
def norm_backward(
    d_y: Tensor,
    d_h: Tensor | None,
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    wanted: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of h (that of x and of the residual), weight and bias; the latter two are empty unless `wanted`.

    Args:
        d_y: gradient of the norm, (N, D).
        d_h: gradient of h = x + residual from its other readers, (N, D), or None.
        h: the normalized rows, (N, D).
        weight, bias: (D,); bias may be None.
        mean: of each row of h, (N,), empty for RMS norm.
        rstd: inverse of each row's standard deviation or root mean square, (N,).
        wanted: whether to compute the gradients of weight and bias.
    """
    run = _backward_in_triton if h.shape[1] <= LARGEST_ROW and launches(d_y, d_h, h, weight) else _backward
    return run(d_y, d_h, h, weight, bias, mean, rstd, wanted)


@norm_backward.register_fake
def _empty_gradients(d_y, d_h, h, weight, bias, mean, rstd, wanted):
    """Memory for the gradients of h, weight and bias: the op's results on fake tensors."""
    d_weight = torch.empty_like(weight) if wanted else weight.new_empty(0)
    d_bias = torch.empty_like(bias) if wanted and bias is not None else weight.new_empty(0)
    return h.new_empty(h.shape), d_weight, d_bias


def _save(ctx, inputs, output):
    """Save for the backward pass what was normalized, and its statistics (`torch.library` calls this after the op)."""
    ctx.set_materialize_grads(False)  # dh of a sum that nothing else reads
    x, residual, weight, bias, _, _ = inputs
    _, h, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd, *((h,) if residual is None else ()))
    ctx.save_for_backward(x if residual is None else h, weight, bias, mean, rstd)


def _differentiate(ctx, d_y, d_h, d_mean, d_rstd):
    """Gradients of the op's arguments, in their order. x and residual have the same gradient, that of their sum h."""
    h, weight, bias, mean, rstd = ctx.saved_tensors
    needs_x, needs_residual, *needs_parameters = ctx.needs_input_grad[:4]
    if d_y is None:
        d_y = torch.zeros_like(h)
    d_x, d_weight, d_bias = norm_backward(d_y, d_h, h, weight, bias, mean, rstd, any(needs_parameters))
    return (
        d_x if needs_x else None,
        d_x if needs_residual else None,
        d_weight if needs_parameters[0] else None,
        d_bias if needs_parameters[1] else None,
        None,
        None,
    )


norm.register_autograd(_differentiate, setup_context=_save)


@norm.register_vmap
def _(info, in_dims, *args):
    raise InputError(
        "memplan.kernels.rms_norm and layer_norm do not run under torch.vmap",
        do="Call them on the whole batch: any leading dimensions are taken",
    )


# In plain torch


def _norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    y: Tensor,
    h: Tensor,
    mean: Tensor,
    rstd: Tensor,
    eps: float,
) -> None:
    """Write y, mean (unless it has no elements, as for RMS norm) and rstd of each row, and with a residual the sum
    h = x + residual."""
    values = x if residual is None else torch.add(x, residual, out=h)
    values = values.to(rstd.dtype)
    if mean.numel():
        torch.mean(values, 1, out=mean)
        values = values - mean[:, None]
    rstd.copy_(values.square().mean(1).add_(eps).rsqrt_())
    values = values * rstd[:, None] * weight
    y.copy_(values if bias is None else values + bias)


def _backward(
    d_y: Tensor,
    d_h: Tensor | None,
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    wanted: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of h, weight and bias; the latter two without elements unless `wanted`.

    With ĥ the normalized h and g = d_y · weight: d_h = (g - mean(g) - ĥ · mean(g · ĥ)) · rstd, without mean(g) for RMS
    norm, plus the gradient from other readers.
    """
    normalized = h.to(rstd.dtype)
    if mean.numel():
        normalized = normalized - mean[:, None]
    normalized = normalized * rstd[:, None]
    d_y = d_y.to(rstd.dtype)
    d_weight = (d_y * normalized).sum(0).to(weight.dtype) if wanted else weight.new_empty(0)
    d_bias = d_y.sum(0).to(bias.dtype) if wanted and bias is not None else weight.new_empty(0)
    scaled = d_y * weight
    d_x = scaled - normalized * (scaled * normalized).mean(1, keepdim=True)
    if mean.numel():
        d_x -= scaled.mean(1, keepdim=True)
    d_x *= rstd[:, None]
    if d_h is not None:
        d_x += d_h
    return d_x.to(h.dtype), d_weight, d_bias


# In Triton


@jit
def norm_kernel(
    x, residual, weight, bias, y, h, mean, rstd, rows, columns, x_stride, residual_stride, eps,
    RESIDUAL: tl.constexpr, CENTRED: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalize ROWS rows of x, or of x + residual, which is then written to h: layer norm if CENTRED, else RMS norm.

    Writes y and, for the backward pass, rstd and (if CENTRED) mean of each row. BLOCK is a power of two from `columns`
    on. One program for each ROWS rows.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    present = row < rows
    inside = present[:, None] & (column < columns)[None, :]
    offset = row[:, None] * columns + column[None, :]
    values = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        values += tl.load(
            residual + row[:, None] * residual_stride + column[None, :], mask=inside, other=0.0
        ).to(tl.float32)  # fmt: skip
        rounded = values.to(h.dtype.element_ty)
        tl.store(h + offset, rounded, mask=inside)
        values = rounded.to(tl.float32)  # as the backward pass reads them
    if CENTRED:
        m = tl.sum(values, 1) / columns
        tl.store(mean + row, m, mask=present)
        values = tl.where(inside, values - m[:, None], 0.0)
    r = 1.0 / tl.sqrt_rn(tl.sum(values * values, 1) / columns + eps)
    tl.store(rstd + row, r, mask=present)
    values *= r[:, None]
    values *= tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    if BIAS:
        values += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    tl.store(y + offset, values.to(y.dtype.element_ty), mask=inside)


@jit
def norm_backward_kernel(
    d_y, d_h, h, weight, mean, rstd, d_x, d_weights, d_biases, rows, columns, d_y_stride, d_h_stride, h_stride,
    SUM: tl.constexpr, CENTRED: tl.constexpr, WEIGHTS: tl.constexpr, BIASES: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient d_x of the normalized rows h, and parts of the gradients of weight and bias.

    Of n programs, each takes every n-th tile of ROWS rows. Row i of d_weights and of d_biases is the sum over the rows
    of program i: the caller adds the rows up. d_h is a further gradient of h, added if SUM. BLOCK is a power of two
    from `columns` on.
    """
    column = tl.arange(0, BLOCK)
    scale = tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)
    d_weight = tl.zeros((BLOCK,), tl.float32)
    d_bias = tl.zeros((BLOCK,), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        present = row < rows
        inside = present[:, None] & (column < columns)[None, :]
        r = tl.load(rstd + row, mask=present, other=0.0)
        normalized = tl.load(h + row[:, None] * h_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        if CENTRED:
            normalized -= tl.load(mean + row, mask=present, other=0.0)[:, None]
        normalized = tl.where(inside, normalized * r[:, None], 0.0)
        grad = tl.load(d_y + row[:, None] * d_y_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        if WEIGHTS:
            d_weight += tl.sum(grad * normalized, 0)
        if BIASES:
            d_bias += tl.sum(grad, 0)
        grad *= scale[None, :]
        values = grad - normalized * (tl.sum(grad * normalized, 1) / columns)[:, None]
        if CENTRED:
            values -= (tl.sum(grad, 1) / columns)[:, None]
        values *= r[:, None]
        if SUM:
            values += tl.load(d_h + row[:, None] * d_h_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.store(d_x + row[:, None] * columns + column[None, :], values.to(d_x.dtype.element_ty), mask=inside)
    offset = tl.program_id(0) * columns + column
    if WEIGHTS:
        tl.store(d_weights + offset, d_weight, mask=column < columns)
    if BIASES:
        tl.store(d_biases + offset, d_bias, mask=column < columns)


def _tile(columns: int) -> dict[str, int]:
    """Compile-time arguments of the kernels for rows of this length: rows and columns of a tile, and warps."""
    block = block_of(columns, LARGEST_ROW)
    rows = max(1, _TILE // block)
    return {"ROWS": rows, "BLOCK": block, "num_warps": warps_of(rows * block)}


def _norm_in_triton(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    y: Tensor,
    h: Tensor,
    mean: Tensor,
    rstd: Tensor,
    eps: float,
) -> None:
    """As `_norm`, by a Triton kernel."""
    (rows, columns), tile = x.shape, _tile(x.shape[1])
    x = rows_of(x)
    residual_rows = x if residual is None else rows_of(residual)  # without one any tensor, which is not read
    launch(
        norm_kernel, (-(-rows // tile["ROWS"]),),
        x, residual_rows, weight.contiguous(), weight if bias is None else bias.contiguous(), y, h, mean, rstd,
        rows, columns, x.stride(0), residual_rows.stride(0), eps,
        RESIDUAL=residual is not None, CENTRED=mean.numel() > 0, BIAS=bias is not None, **tile,
    )  # fmt: skip


def _backward_in_triton(
    d_y: Tensor,
    d_h: Tensor | None,
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    wanted: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `_backward`, by Triton's kernels."""
    (rows, columns), tile = h.shape, _tile(h.shape[1])
    d_y, h = rows_of(d_y), rows_of(h)
    d_h_rows = d_y if d_h is None else rows_of(d_h)
    d_x = h.new_empty(h.shape)
    count = min(-(-rows // tile["ROWS"]), programs(h.device))
    d_weights = rstd.new_empty(count if wanted else 0, columns)
    d_biases = rstd.new_empty(count if wanted and bias is not None else 0, columns)
    launch(
        norm_backward_kernel, (count,),
        d_y, d_h_rows, h, weight.contiguous(), mean, rstd, d_x, d_weights, d_biases,
        rows, columns, d_y.stride(0), d_h_rows.stride(0), h.stride(0),
        SUM=d_h is not None, CENTRED=mean.numel() > 0, WEIGHTS=wanted, BIASES=d_biases.numel() > 0, **tile,
    )  # fmt: skip
    d_weight = d_weights.sum(0).to(weight.dtype) if wanted else weight.new_empty(0)
    d_bias = weight.new_empty(0) if bias is None or not wanted else d_biases.sum(0).to(bias.dtype)
    return d_x, d_weight, d_bias
