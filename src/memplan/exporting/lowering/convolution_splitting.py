"""Lower convolutions and their gradients to two kernels, one that gathers and one that scatters.

The input gradient of a convolution scatters as a transposed convolution does, and that of a transposed convolution
gathers as a convolution does: two kernels compute the forward and backward passes of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memplan.exporting.lowering.device_graph import Lowering, first_output, refusal
from memplan.planning.graph.joint_graph import GraphOp, Ref

GATHER = "memplan.convolution_gather.default"
SCATTER = "memplan.convolution_scatter.default"
WEIGHT_GRADIENT = "memplan.convolution_weight_gradient.default"
CHANNEL_SUM = "memplan.channel_sum.default"
ADDEND = 7
"""Position of the optional argument of a gather or scatter to which its result is added."""


def convolution(low: Lowering, op: GraphOp) -> None:
    """Lower a convolution of one or two dimensions, or a transposed one."""
    x, weight, bias, stride, padding, dilation, transposed, _, groups = op.args
    output = first_output(op)
    _check(low, op, x)
    args = (
        low.as_contiguous(op, x),
        low.as_contiguous(op, weight),
        bias,
        *_geometry(stride, padding, dilation),
        groups,
    )
    low.change(output, stride=contiguous_strides(low.values[output].shape))
    low.call(op, SCATTER if transposed else GATHER, args, (output,))


def convolution_backward(low: Lowering, op: GraphOp) -> None:
    """Lower the gradients of a convolution that are read: of input, bias and weight."""
    g, x, weight, _, stride, padding, dilation, transposed, _, groups, _ = op.args
    input_gradient, weight_gradient, bias_gradient = op.outputs
    g = low.as_contiguous(op, g)
    _check(low, op, g)
    geometry = (*_geometry(stride, padding, dilation), groups)
    if input_gradient is not None:
        low.change(input_gradient, stride=contiguous_strides(low.values[input_gradient].shape))
        args = (g, low.as_contiguous(op, weight), None, *geometry)
        low.call(op, GATHER if transposed else SCATTER, args, (input_gradient,))
    if bias_gradient is not None:
        low.call(op, CHANNEL_SUM, (g,), (bias_gradient,))
    if weight_gradient is not None:
        x = low.as_contiguous(op, x)
        # the tensor with the channels of the weight's dimension 0, and that with those of dimension 1
        of_dim_0, of_dim_1 = (x, g) if transposed else (g, x)
        low.call(op, WEIGHT_GRADIENT, (of_dim_0, of_dim_1, *geometry), (weight_gradient,))


def _check(low: Lowering, op: GraphOp, x: Ref) -> None:
    """Raise RecordingError for a convolution over other than one or two dimensions."""
    if len(low.shape(x)) not in (3, 4):
        raise refusal(
            op, f" over {len(low.shape(x)) - 2} dimensions", near="convolutions over one or two dimensions",
            do="Use nn.Conv2d with the depth in the channels, x.flatten(1, 2), or in the batch",
        )  # fmt: skip


def _geometry(stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]) -> tuple[Any, ...]:
    """Return stride, padding and dilation as pairs: a one-dimensional convolution is one over planes of height 1."""
    with_value_for_height_1 = ((stride, 1), (padding, 0), (dilation, 1))
    return tuple((value, sizes[0]) if len(sizes) == 1 else tuple(sizes) for sizes, value in with_value_for_height_1)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides, stride = list[int](), 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)  # torch counts a dimension of size 0 as 1
    return tuple(reversed(strides))
