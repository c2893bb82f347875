"""SwiGLU and GeGLU: an activation of one half of a layer's result, times the other half.

    y = a(gate) · up     where a is silu, gelu or gelu in its tanh form

    dgate = dy · up · a'(gate)     dup = dy · a(gate)

    silu: a = g S(g)      a' = S(g) + g S'(g)                  with S(z) = 1 / (1 + exp(-z)) and S' = S(z) S(-z)
    gelu: a = g Φ(g)      a' = Φ(g) + g φ(g)                   with the normal distribution's Φ and its density φ
    tanh: a = g S(2u)     a' = S(2u) + 2 g S'(2u) u'(g)        with u = sqrt(2 / π) (g + 0.044715 g³)

Saved for the backward pass: gate and up alone. Plain torch saves a(gate), too, and the next linear layer y.

Bytes moved, of b-byte elements and n of them: forward reads gate and up and writes y, 3 n b; backward reads dy, gate
and up and writes dgate and dup, 5 n b. That is the least. Halves of one tensor are read where they lie, without copies.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.library import custom_op
from torch.nn import functional as F

from memplan.errors import InputError
from memplan.kernels.launch import accumulated, block_of, jit, launch, launches, rows_of, sigmoid, tl, warps_of

_BLOCK = 1024


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``F.silu(gate) * up``, which saves `gate` and `up` alone for the backward pass.

    Args:
        gate: of any shape.
        up: of gate's shape and dtype.

    Raises:
        InputError: shapes or dtypes that differ, and under ``torch.vmap``.

    Example:
        >>> gate, up = torch.randn(4, 32, requires_grad=True).chunk(2, -1)
        >>> swiglu(gate, up).shape
        torch.Size([4, 16])
    """
    return _gated(gate, up, "silu")


def geglu(gate: Tensor, up: Tensor, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    """``F.gelu(gate, approximate=approximate) * up``, which saves `gate` and `up` alone for the backward pass.

    Args:
        gate: of any shape.
        up: of gate's shape and dtype.
        approximate: "none" or "tanh", as in ``F.gelu``.

    Raises:
        InputError: shapes or dtypes that differ, and under ``torch.vmap``.
    """
    if approximate not in ("none", "tanh"):
        raise InputError(f"approximate is {approximate!r}", expected="'none' or 'tanh'")
    return _gated(gate, up, "gelu" if approximate == "none" else "tanh")


def _gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Check the operands, and compute them as rows."""
    if gate.shape != up.shape or gate.dtype != up.dtype:
        operands = f"gate is {tuple(gate.shape)} of {gate.dtype}, up {tuple(up.shape)} of {up.dtype}"
        raise InputError(operands, expected="the same shape and dtype")
    if gate.dim() == 0:
        return _gated(gate.view(1), up.view(1), activation).view(())
    rows = gate.shape[:-1].numel(), gate.shape[-1]
    return gated(gate.reshape(rows), up.reshape(rows), activation).view(gate.shape)


# The ops


@custom_op("memplan::gated", mutates_args=())
def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """activation(gate) · up of rows (N, D), a new tensor. Activations: "silu", "gelu", and "tanh" for gelu's tanh
    form."""
    if not launches(gate, up):
        return _activated(gate.to(accumulated(gate.dtype)), activation).mul_(up).to(gate.dtype)
    y = gate.new_empty(gate.shape)
    gate, up = rows_of(gate), rows_of(up)
    grid, block = _grid(gate)
    launch(
        gated_kernel, grid,
        gate, up, y, gate.shape[1], gate.stride(0), up.stride(0),
        ACTIVATION=activation, BLOCK=block, num_warps=warps_of(block),
    )  # fmt: skip
    return y


@gated.register_fake
def _(gate, up, activation):
    return gate.new_empty(gate.shape)


@custom_op("memplan::gated_backward", mutates_args=())
def gated_backward(d_y: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Gradients of `gate` and `up` from that of the result, all of shape (N, D)."""
    if not launches(d_y, gate, up):
        return _backward(d_y, gate, up, activation)
    d_gate, d_up = gate.new_empty(gate.shape), gate.new_empty(gate.shape)
    d_y, gate, up = rows_of(d_y), rows_of(gate), rows_of(up)
    grid, block = _grid(gate)
    launch(
        gated_backward_kernel, grid,
        d_y, gate, up, d_gate, d_up, gate.shape[1], d_y.stride(0), gate.stride(0), up.stride(0),
        ACTIVATION=activation, BLOCK=block, num_warps=warps_of(block),
    )  # fmt: skip
    return d_gate, d_up


@gated_backward.register_fake
def _(d_y, gate, up, activation):
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape)


def _save(ctx, inputs, output):
    """Save gate and up for the backward pass (`torch.library` calls this after the op)."""
    gate, up, ctx.activation = inputs
    ctx.save_for_backward(gate, up)


def _differentiate(ctx, d_y):
    return *gated_backward(d_y, *ctx.saved_tensors, ctx.activation), None


gated.register_autograd(_differentiate, setup_context=_save)


@gated.register_vmap
def _(info, in_dims, *args):
    raise InputError(
        "memplan.kernels.swiglu and geglu do not run under torch.vmap",
        do="Call them on the whole batch: any shape is taken",
    )


def _grid(x: Tensor) -> tuple[tuple[int, int], int]:
    """Return ((rows, blocks of a row), columns of a block): the grid of programs, one for each block of each row."""
    rows, columns = x.shape
    block = block_of(columns, _BLOCK)
    return (rows, -(-columns // block)), block


# In plain torch


def _activated(gate: Tensor, activation: str) -> Tensor:
    """The activation of gate, in new memory."""
    if activation == "silu":
        return F.silu(gate)
    return F.gelu(gate, approximate="tanh" if activation == "tanh" else "none")


def _backward(d_y: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up."""
    dtype = accumulated(gate.dtype)
    wide = gate.to(dtype)
    d_up = _activated(wide, activation).mul_(d_y).to(gate.dtype)
    d_activated = d_y.to(dtype) * up
    if activation == "silu":
        d_gate = torch.ops.aten.silu_backward(d_activated, wide)
    else:
        approximate = "tanh" if activation == "tanh" else "none"
        d_gate = torch.ops.aten.gelu_backward(d_activated, wide, approximate=approximate)
    return d_gate.to(gate.dtype), d_up


# In Triton


@jit
def _value_and_slope(gate, ACTIVATION: tl.constexpr):
    """The activation of gate and its derivative. Each activation is gate · share(gate); slope is share's derivative."""
    if ACTIVATION == "silu":
        share, share_slope = sigmoid(gate)
    elif ACTIVATION == "gelu":  # the normal distribution and its density: with 1 / sqrt(2) and 1 / sqrt(2 π)
        share = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
        share_slope = tl.exp(-0.5 * gate * gate) * 0.3989422804014327
    else:  # (1 + tanh(u)) / 2 = sigmoid(2 u), u = sqrt(2 / π) (gate + 0.044715 gate³)
        share, share_slope = sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
        share_slope *= 1.5957691216057308 * (1.0 + 0.134145 * gate * gate)
    return gate * share, share + gate * share_slope


@jit
def gated_kernel(
    gate, up, y, columns, gate_stride, up_stride, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write activation(gate) · up of BLOCK elements of a row to y, which is contiguous; a program for each block."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    value, _ = _value_and_slope(g, ACTIVATION)
    tl.store(y + row * columns + column, (value * u).to(y.dtype.element_ty), mask=inside)


@jit
def gated_backward_kernel(
    d_y, gate, up, d_gate, d_up, columns, d_y_stride, gate_stride, up_stride,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradients of gate and up for BLOCK elements of a row, both contiguous; a program for each block."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    grad = tl.load(d_y + row * d_y_stride + column, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    value, slope = _value_and_slope(g, ACTIVATION)
    offset = row * columns + column
    tl.store(d_gate + offset, (grad * u * slope).to(d_gate.dtype.element_ty), mask=inside)
    tl.store(d_up + offset, (grad * value).to(d_up.dtype.element_ty), mask=inside)
