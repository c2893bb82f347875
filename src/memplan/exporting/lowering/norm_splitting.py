"""Norms as small statistics and an elementwise part, which can be made again, or lie over what it reads.

Of a batch norm in training the statistics kernel also updates the running ones, once a step. A norm over groups of
channels and one over the last dimensions are the same kernel: rows of so many elements, each with a mean and a
deviation, and a weight for every so many elements of a row.
"""

from __future__ import annotations

import math
from typing import Any

from memplan.exporting.lowering.device_graph import Lowering, refusal
from memplan.planning.graph.joint_graph import GraphOp, Ref

BATCH_STATISTICS = "memplan.batch_norm_statistics.default"
BATCH_APPLY = "memplan.batch_norm_apply.default"
BATCH_FIXED = "memplan.batch_norm_fixed.default"
BATCH_SUMS = "memplan.batch_norm_sums.default"
BATCH_INPUT = "memplan.batch_norm_input_gradient.default"
BATCH_FIXED_INPUT = "memplan.batch_norm_fixed_input_gradient.default"
ROW_STATISTICS = "memplan.row_norm_statistics.default"
ROW_APPLY = "memplan.row_norm_apply.default"
ROW_SUMS = "memplan.row_norm_sums.default"
ROW_INPUT = "memplan.row_norm_input_gradient.default"


def batch_norm(low: Lowering, op: GraphOp) -> None:
    """Split a batch norm that updates its running statistics, or takes those of the batch alone."""
    x, weight, bias = low.dense(op, op.args[0]), op.args[1], op.args[2]
    running: tuple[Any, Any]
    if op.target.endswith("no_stats"):
        running, (training, momentum, eps) = (None, None), op.args[3:6]
    else:
        running, (training, momentum, eps) = op.args[3:5], op.args[5:8]
    made = op.outputs[0]
    assert made is not None, "somebody reads the result of a norm"
    if not training:
        fixed_batch_norm(low, op, eps)
        return
    like, channels = low.values[made], low.values[x.value].shape[1]
    mean, deviation = (one if one is not None else low.buffer(f"{like.name}_{name}", like, (channels,))
                       for one, name in zip(op.outputs[1:3], ("mean", "deviation"), strict=True))  # fmt: skip
    for target, source in list(low.mutations.items()):
        if source in op.outputs[3:]:
            del low.mutations[target]
    low.call(op, BATCH_STATISTICS, (x, *running, momentum, eps), (mean, deviation), once=True)
    args = (x, weight, bias, Ref(mean), Ref(deviation))
    low.call(op, BATCH_APPLY, args, (made,), overwrites=low.over(made, x), once=False)


def fixed_batch_norm(low: Lowering, op: GraphOp, eps: float | None = None) -> None:
    """Lower a batch norm by its running statistics."""
    made = op.outputs[0]
    assert made is not None, "somebody reads the result of a norm"
    x = low.dense(op, op.args[0])
    args = (x, *op.args[1:5], op.args[-1] if eps is None else eps)
    low.call(op, BATCH_FIXED, args, (made,), overwrites=low.over(made, x), once=False)


def batch_norm_backward(low: Lowering, op: GraphOp) -> None:
    """Split the derivative of a batch norm: the sums, which are the weight's and the bias's, then the input's."""
    g, x, weight, mean, variance, saved_mean, saved_deviation, training, eps, _ = op.args
    g, x = low.dense(op, g), low.dense(op, x)
    like, channels = low.values[x.value], (low.values[x.value].shape[1],)
    input_gradient, weight_sum, bias_sum = op.outputs
    if not training:
        if weight_sum is not None or bias_sum is not None:
            sums = _made(low, like, channels, weight_sum, bias_sum)
            low.call(op, BATCH_SUMS, (g, x, mean, variance, eps), sums)
        if input_gradient is not None:
            args = (g, weight, variance, eps)
            low.call(op, BATCH_FIXED_INPUT, args, (input_gradient,), overwrites=low.over(input_gradient, g))
        return
    sums = _made(low, like, channels, weight_sum, bias_sum)
    low.call(op, BATCH_SUMS, (g, x, saved_mean, saved_deviation, None), sums)
    if input_gradient is not None:
        args = (g, x, weight, saved_mean, saved_deviation, Ref(sums[0]), Ref(sums[1]))
        low.call(op, BATCH_INPUT, args, (input_gradient,), overwrites=low.over(input_gradient, g, x))


def layer_norm(low: Lowering, op: GraphOp) -> None:
    """Split a norm over the last dimensions."""
    x, shape, weight, bias, eps = op.args
    _row_norm(low, op, x, weight, bias, eps, _layer_rows(low, x, shape))


def layer_norm_backward(low: Lowering, op: GraphOp) -> None:
    """Split the derivative of a norm over the last dimensions."""
    g, x, shape, mean, deviation, weight, _, _ = op.args
    _row_norm_backward(low, op, (g, x, mean, deviation, weight), _layer_rows(low, x, shape))


def group_norm(low: Lowering, op: GraphOp) -> None:
    """Split a norm over groups of channels."""
    x, weight, bias, n, channels, inner, groups, eps = op.args
    rows = (n * groups, channels // groups * inner, inner, channels)
    _row_norm(low, op, x, weight, bias, eps, rows)


def group_norm_backward(low: Lowering, op: GraphOp) -> None:
    """Split the derivative of a norm over groups of channels."""
    g, x, mean, deviation, weight, n, channels, inner, groups, _ = op.args
    rows = (n * groups, channels // groups * inner, inner, channels)
    _row_norm_backward(low, op, (g, x, mean, deviation, weight), rows)


_Rows = tuple[int, int, int, int]
"""Rows, elements of a row, elements that share a weight, weights."""


def _layer_rows(low: Lowering, x: Ref, shape: Any) -> _Rows:
    size = math.prod(shape)
    return math.prod(low.shape(x)) // size, size, 1, size


def _row_norm(low: Lowering, op: GraphOp, x: Ref, weight: Any, bias: Any, eps: float, rows: _Rows) -> None:
    made = op.outputs[0]
    assert made is not None, "somebody reads the result of a norm"
    x, like = low.dense(op, x), low.values[made]
    mean, deviation = (one if one is not None else low.buffer(f"{like.name}_{name}", like, (rows[0],))
                       for one, name in zip(op.outputs[1:3], ("mean", "deviation"), strict=True))  # fmt: skip
    low.call(op, ROW_STATISTICS, (x, eps, *rows[:2]), (mean, deviation))
    args = (x, weight, bias, Ref(mean), Ref(deviation), *rows)
    low.call(op, ROW_APPLY, args, (made,), overwrites=low.over(made, x))


def _row_norm_backward(low: Lowering, op: GraphOp, given: tuple[Ref, Ref, Ref, Ref, Any], rows: _Rows) -> None:
    g, x, mean, deviation, weight = given
    g, x = low.dense(op, g), low.dense(op, x)
    input_gradient, weight_sum, bias_sum = op.outputs
    if weight_sum is not None or bias_sum is not None:
        sums = _made(low, low.values[x.value], (rows[3],), weight_sum, bias_sum)
        low.call(op, ROW_SUMS, (g, x, mean, deviation, *rows), sums)
    if input_gradient is not None:
        args = (g, x, weight, mean, deviation, *rows)
        low.call(op, ROW_INPUT, args, (input_gradient,), overwrites=low.over(input_gradient, g, x))


def _made(low: Lowering, like: Any, shape: tuple[int, ...], *wanted: int | None) -> tuple[int, int]:
    """Return the sums of a norm's derivative: those that are read, and buffers for the others."""
    weight, bias = (low.buffer(f"{like.name}_sum", like, shape) if one is None else one for one in wanted)
    return weight, bias


def refuse_dims(op: GraphOp, dims: int, most: int) -> None:
    """Raise RecordingError for more dimensions than kernels have loops."""
    if dims > most:
        raise refusal(op, f" over {dims} dimensions", near=f"the same over {most} dimensions")
