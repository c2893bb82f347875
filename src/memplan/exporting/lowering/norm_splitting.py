"""Split norms into a kernel for the statistics and an elementwise one, which can be recomputed or run in place.

The statistics kernel of a batch norm in training also updates the running statistics, once a step. Group norm and layer
norm share their kernels: each row of elements has a mean and a deviation, and a fixed number of successive elements of
a row share a weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from memplan.exporting.lowering.convolution_splitting import CHANNEL_SUM
from memplan.exporting.lowering.device_graph import Lowering, first_output, refusal
from memplan.planning.graph.joint_graph import GraphOp, Ref, Value

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
    """Split a batch norm, with running statistics or without.

    The results of ``_native_batch_norm_legit_functional`` from the fourth on are the new running statistics.
    """
    x, weight, bias = low.as_contiguous(op, op.args[0]), op.args[1], op.args[2]
    running: tuple[Any, Any]
    if op.target.endswith("no_stats"):
        running, (training, momentum, eps) = (None, None), op.args[3:6]
    else:
        running, (training, momentum, eps) = op.args[3:5], op.args[5:8]
    if not training:
        fixed_batch_norm(low, op, eps)
        return
    output = low.set_contiguous(first_output(op))
    like, channels = low.values[output], low.values[x.value].shape[1]
    mean, deviation = _outputs_or_buffers(low, op.outputs[1:3], ("mean", "deviation"), like, (channels,))
    new_running = [value for value in op.outputs[3:] if value is not None]
    if any(value not in low.mutations.values() for value in new_running):
        raise refusal(op, " whose running statistics are no buffers", do="Use track_running_stats=False")
    for buffer, new_value in list(low.mutations.items()):
        if new_value in new_running:  # the kernel writes the buffer itself
            del low.mutations[buffer]
    # once: a second run would update the running statistics again
    low.call(op, BATCH_STATISTICS, (x, *running, momentum, eps), (mean, deviation), must_run_once=True)
    args = (x, weight, bias, Ref(mean), Ref(deviation))
    low.call(op, BATCH_APPLY, args, (output,), overwrites=low.overwritable_storages(output, x), must_run_once=False)


def fixed_batch_norm(low: Lowering, op: GraphOp, eps: float | None = None) -> None:
    """Lower a batch norm in evaluation mode, which normalizes by its running statistics. `eps`: None for an op whose
    last argument it is."""
    output, x = low.set_contiguous(first_output(op)), low.as_contiguous(op, op.args[0])
    args = (x, *op.args[1:5], op.args[-1] if eps is None else eps)  # weight, bias, running mean and variance
    low.call(op, BATCH_FIXED, args, (output,), overwrites=low.overwritable_storages(output, x), must_run_once=False)


def batch_norm_backward(low: Lowering, op: GraphOp) -> None:
    """Lower the gradients of a batch norm to two kernels: sums over each channel, which are the gradients of weight and
    bias, then the gradient of the input, which reads these sums in training."""
    g, x, weight, mean, variance, saved_mean, saved_deviation, training, eps, _ = op.args
    g, x = low.as_contiguous(op, g), low.as_contiguous(op, x)
    like, channels = low.values[x.value], (low.values[x.value].shape[1],)
    input_gradient, weight_sum, bias_sum = op.outputs
    if input_gradient is not None:
        low.set_contiguous(input_gradient)
    if not training:
        if weight_sum is not None:
            sums = _outputs_or_buffers(low, (weight_sum, bias_sum), ("sum", "sum"), like, channels)
            low.call(op, BATCH_SUMS, (g, x, mean, variance, eps), sums)
        elif bias_sum is not None:  # the norm's input need not be kept for it
            low.call(op, CHANNEL_SUM, (g,), (bias_sum,))
        if input_gradient is not None:
            args = (g, weight, variance, eps)
            low.call(
                op, BATCH_FIXED_INPUT, args, (input_gradient,), overwrites=low.overwritable_storages(input_gradient, g)
            )
        return
    sums = _outputs_or_buffers(low, (weight_sum, bias_sum), ("sum", "sum"), like, channels)
    eps = None  # of a variance alone, not of a deviation
    low.call(op, BATCH_SUMS, (g, x, saved_mean, saved_deviation, eps), sums)
    if input_gradient is not None:
        args = (g, x, weight, saved_mean, saved_deviation, Ref(sums[0]), Ref(sums[1]))
        low.call(op, BATCH_INPUT, args, (input_gradient,), overwrites=low.overwritable_storages(input_gradient, g, x))


def layer_norm(low: Lowering, op: GraphOp) -> None:
    """Split a norm over the last dimensions."""
    x, shape, weight, bias, eps = op.args
    _row_norm(low, op, x, weight, bias, eps, _layer_rows(low, x, shape))


def layer_norm_backward(low: Lowering, op: GraphOp) -> None:
    """Split the gradients of a norm over the last dimensions."""
    g, x, shape, mean, deviation, weight, _, _ = op.args
    _row_norm_backward(low, op, (g, x, mean, deviation, weight), _layer_rows(low, x, shape))


def group_norm(low: Lowering, op: GraphOp) -> None:
    """Split a norm over groups of channels."""
    x, weight, bias, n, channels, plane, groups, eps = op.args
    _row_norm(low, op, x, weight, bias, eps, _group_rows(n, channels, plane, groups))


def group_norm_backward(low: Lowering, op: GraphOp) -> None:
    """Split the gradients of a norm over groups of channels."""
    g, x, mean, deviation, weight, n, channels, plane, groups, _ = op.args
    _row_norm_backward(low, op, (g, x, mean, deviation, weight), _group_rows(n, channels, plane, groups))


class _Rows(NamedTuple):
    """Rows of elements, each with a mean and a deviation: arguments of the kernels, in this order."""

    rows: int
    row_size: int
    elements_per_weight: int
    """Successive elements that share a weight."""
    weights: int


def _layer_rows(low: Lowering, x: Ref, shape: Any) -> _Rows:
    size = math.prod(shape)
    return _Rows(math.prod(low.shape(x)) // size, row_size=size, elements_per_weight=1, weights=size)


def _group_rows(n: int, channels: int, plane: int, groups: int) -> _Rows:
    return _Rows(n * groups, row_size=channels // groups * plane, elements_per_weight=plane, weights=channels)


def _row_norm(low: Lowering, op: GraphOp, x: Ref, weight: Any, bias: Any, eps: float, rows: _Rows) -> None:
    """Add the kernels of a layer or group norm: one for mean and deviation of each row, one that normalizes."""
    output, x = low.set_contiguous(first_output(op)), low.as_contiguous(op, x)
    shape = (rows.rows,)
    mean, deviation = _outputs_or_buffers(low, op.outputs[1:3], ("mean", "deviation"), low.values[output], shape)
    low.call(op, ROW_STATISTICS, (x, eps, rows.rows, rows.row_size), (mean, deviation))
    args = (x, weight, bias, Ref(mean), Ref(deviation), *rows)
    low.call(op, ROW_APPLY, args, (output,), overwrites=low.overwritable_storages(output, x))


def _row_norm_backward(low: Lowering, op: GraphOp, operands: tuple[Ref, Ref, Ref, Ref, Any], rows: _Rows) -> None:
    """Add the kernels of the gradients of a layer or group norm that are read: sums for weight and bias, and the
    input's."""
    g, x, mean, deviation, weight = operands
    g, x = low.as_contiguous(op, g), low.as_contiguous(op, x)
    input_gradient, weight_sum, bias_sum = op.outputs
    if weight_sum is not None or bias_sum is not None:
        sums = _outputs_or_buffers(low, (weight_sum, bias_sum), ("sum", "sum"), low.values[x.value], (rows.weights,))
        low.call(op, ROW_SUMS, (g, x, mean, deviation, *rows), sums)
    if input_gradient is not None:
        low.set_contiguous(input_gradient)
        args = (g, x, weight, mean, deviation, *rows)
        low.call(op, ROW_INPUT, args, (input_gradient,), overwrites=low.overwritable_storages(input_gradient, g, x))


def _outputs_or_buffers(
    low: Lowering, outputs: Sequence[int | None], names: tuple[str, str], like: Value, shape: tuple[int, ...]
) -> tuple[int, int]:
    """Return two outputs of an op, with a new buffer in place of each that nothing reads: kernels write both."""
    first, second = (
        low.buffer(f"{like.name}_{name}", like, shape) if output is None else output
        for output, name in zip(outputs, names, strict=True)
    )
    return first, second
