"""Convolutions as two kernels that gather and scatter, and their derivatives one by one.

The derivative of a convolution by its input scatters as a transposed convolution does, and that of a transposed one
gathers as a convolution does; so that the same two kernels make forward and backward passes of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memplan.exporting.lowering.device_graph import Lowering, refusal
from memplan.planning.graph.joint_graph import GraphOp, Ref

GATHER = "memplan.convolution_gather.default"
SCATTER = "memplan.convolution_scatter.default"
WEIGHT_GRADIENT = "memplan.convolution_weight_gradient.default"
CHANNEL_SUM = "memplan.channel_sum.default"
BEFORE = 7
"""Position of what a gather or scatter adds its result to, among its arguments: it may be missing."""

Pair = tuple[int, int]


def convolution(low: Lowering, op: GraphOp) -> None:
    """Lower a convolution of one or two dimensions, or a transposed one."""
    x, weight, bias, stride, padding, dilation, transposed, _, groups = op.args
    made = op.outputs[0]
    assert made is not None, "somebody reads the result of a convolution"
    _check(low, op, x)
    args = (low.dense(op, x), low.dense(op, weight), bias, *_geometry(stride, padding, dilation), groups)
    low.change(made, stride=contiguous(low.values[made].shape))
    low.call(op, SCATTER if transposed else GATHER, args, (made,))


def convolution_backward(low: Lowering, op: GraphOp) -> None:
    """Lower a part of a convolution's derivative."""
    g, x, weight, _, stride, padding, dilation, transposed, _, groups, _ = op.args
    input_gradient, weight_gradient, bias_gradient = op.outputs
    g = low.dense(op, g)
    _check(low, op, g)
    geometry = (*_geometry(stride, padding, dilation), groups)
    if input_gradient is not None:
        low.change(input_gradient, stride=contiguous(low.values[input_gradient].shape))
        args = (g, low.dense(op, weight), None, *geometry)
        low.call(op, GATHER if transposed else SCATTER, args, (input_gradient,))
    if bias_gradient is not None:
        low.call(op, CHANNEL_SUM, (g,), (bias_gradient,))
    if weight_gradient is not None:
        x = low.dense(op, x)
        wide, narrow = (x, g) if transposed else (g, x)
        low.call(op, WEIGHT_GRADIENT, (wide, narrow, *geometry), (weight_gradient,))


def _check(low: Lowering, op: GraphOp, x: Ref) -> None:
    if len(low.shape(x)) not in (3, 4):
        raise refusal(op, f" over {len(low.shape(x)) - 2} dimensions", near="convolutions over one or two dimensions")


def _geometry(*given: Sequence[int]) -> tuple[Any, ...]:
    """Return stride, padding and dilation as pairs: of one dimension, the first is 1, 0 and 1."""
    neutral = (1, 0, 1)
    return tuple((first, one[0]) if len(one) == 1 else tuple(one) for first, one in zip(neutral, given, strict=True))


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the steps of a tensor whose elements follow one another."""
    strides, step = list[int](), 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
