"""The call of each op that is not elementwise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from memplan.exporting.kernels.call_writer import CallWriter, merged_loops
from memplan.exporting.kernels.elementwise import ELEMENTWISE
from memplan.exporting.kernels.product_calls import PRODUCTS, Emit
from memplan.exporting.kernels.product_calls import emitting as _emitting
from memplan.exporting.kernels.product_calls import result_of as _result
from memplan.exporting.lowering import convolution_splitting as conv
from memplan.exporting.lowering import norm_splitting as norm
from memplan.exporting.lowering.device_graph import FILL, INSERT, refusal
from memplan.planning.graph.joint_graph import GraphOp, Ref, Value
from memplan.planning.graph.op_schema import CROSS_ENTROPY, arguments_of
from memplan.planning.passes.split_dropout import MASK

DROPOUT = "memplan.masked_scale.default"


def calls_of(writer: CallWriter, op: GraphOp) -> list[str]:
    """Return the C statements that run an op.

    Raises:
        RecordingError: no kernel computes it with these arguments.
    """
    if op.target in ELEMENTWISE:
        return [writer.elementwise(op)]
    return CALLS[op.target](writer, op)


# -- convolutions


def geometry(w: CallWriter, wide: Ref, narrow: Ref, weight: Value, given: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the table of a convolution. One of single pixels goes over planes as over one row."""
    (sh, sw), (ph, pw), (dh, dw), groups = given
    batch, channels = w.shape(narrow)[:2]
    height, width = _plane(w.shape(narrow))
    rows, columns = _plane(w.shape(wide))
    kh, kw = weight.shape[2:] if len(weight.shape) == 4 else (1, weight.shape[2])
    if (kh, kw, sh, sw, ph, pw) == (1, 1, 1, 1, 0, 0):
        height, width, rows, columns = 1, height * width, 1, rows * columns
    return (batch, groups, channels // groups, height, width, w.shape(wide)[1] // groups, rows, columns, kh, kw, sh, sw,
            ph, pw, dh, dw, weight.stride[0])  # fmt: skip


def _plane(shape: tuple[int, ...]) -> tuple[int, int]:
    return (1, shape[2]) if len(shape) == 3 else (shape[2], shape[3])


def _gather(w: CallWriter, op: GraphOp) -> list[str]:
    x, weight, bias, *given = op.args
    made = Ref(_result(op))
    table = w.table("convolution", *geometry(w, made, x, w.value(weight), tuple(given[:4])))
    return [_convolve(w, "convolution_gather", made, (x, weight, bias, _before(op)), table)]


def _convolve(w: CallWriter, source: str, made: Ref, given: tuple[Ref, Ref, Any, Ref | None], table: str) -> str:
    x, weight, *added = given
    scales = w.scales_of(weight)
    if scales is None:
        name = w.instance(source, source, {"WEIGHT": "float", "SCALES": "", "SCALED(row, weight)": "(weight)"})
        return w.call(name, made, x, weight, *added, table)
    scaled = "scale[row] * (float)(weight)"
    defines = {"WEIGHT": "signed char", "SCALES": ", const float *scale", "SCALED(row, weight)": scaled}
    return w.call(w.instance(source, f"{source}_int8", defines), made, x, weight, scales, *added, table)


def _scatter(w: CallWriter, op: GraphOp) -> list[str]:
    x, weight, bias, *given = op.args
    made = Ref(_result(op))
    table = w.table("convolution", *geometry(w, x, made, w.value(weight), tuple(given[:4])))
    return [_convolve(w, "convolution_scatter", made, (x, weight, bias, _before(op)), table)]


def _before(op: GraphOp) -> Ref | None:
    """Return what a convolution adds its result to."""
    return op.args[conv.BEFORE] if len(op.args) > conv.BEFORE else None


def _weight_gradient(w: CallWriter, op: GraphOp) -> list[str]:
    wide, narrow, *given = op.args
    gradient = w.graph.values[_result(op)]
    table = w.table("convolution", *geometry(w, wide, narrow, gradient, tuple(given)))
    name, first = _emitting(w, op, "convolution_weight_gradient", "convolution_weight_gradient")
    return [w.call(name, first, wide, narrow, table)]


def _channels(w: CallWriter, x: Ref) -> tuple[int, int, int]:
    shape = w.shape(x)
    return shape[0], shape[1], math.prod(shape[2:])


def _channel_sum(w: CallWriter, op: GraphOp) -> list[str]:
    (x,) = op.args
    return [w.call(w.kernel("channel_sum"), Ref(_result(op)), x, *_channels(w, x))]


# -- norms


def _plain(kernel: str, results: int = 1) -> Emit:
    """Return what writes a call of a kernel with the op's results and arguments as they are."""

    def emit(w: CallWriter, op: GraphOp) -> list[str]:
        made = [None if one is None else Ref(one) for one in op.outputs[:results]]
        return [w.call(w.kernel(kernel), *made, *op.args)]

    return emit


def _by_channel(kernel: str, x_at: int = 0, results: int = 1) -> Emit:
    """Return what writes the same with batch, channels and plane behind."""

    def emit(w: CallWriter, op: GraphOp) -> list[str]:
        made = [None if one is None else Ref(one) for one in op.outputs[:results]]
        return [w.call(w.kernel(kernel), *made, *op.args, *_channels(w, op.args[x_at]))]

    return emit


def _sums(w: CallWriter, op: GraphOp) -> list[str]:
    *given, eps = op.args
    made = [Ref(one) for one in op.outputs if one is not None]
    return [w.call(w.kernel("batch_norm_sums"), *made, *given, -1.0 if eps is None else eps, *_channels(w, given[1]))]


# -- pools and pads


def _pair(given: Any, missing: int) -> tuple[int, int]:
    found = (missing, missing) if given is None or len(given) == 0 else tuple(given)
    return (found[0], found[0]) if len(found) == 1 else (found[0], found[1])


def _pool_table(w: CallWriter, large: Ref, small: Ref, *given: Any) -> str:
    (kernel, stride, padding, step) = (*given, *(None,) * (4 - len(given)))
    window = _pair(kernel, 1)
    strides = window if stride is None or len(stride) == 0 else _pair(stride, 1)
    sides = (*window, *strides, *_pair(padding, 0), *_pair(step, 1))
    planes = math.prod(w.shape(large)[:-2])
    return w.table("pool", planes, *w.shape(large)[-2:], *w.shape(small)[-2:], *sides)


def _max_pool(w: CallWriter, op: GraphOp) -> list[str]:
    x, *given = op.args
    made, places = Ref(_result(op)), op.outputs[1]
    table = _pool_table(w, x, made, *given[:4])
    return [w.call(w.kernel("max_pool"), made, None if places is None else Ref(places), x, table)]


def _max_pool_gradient(w: CallWriter, op: GraphOp) -> list[str]:
    g, _, kernel, stride, padding, step, _, places = op.args
    made = Ref(_result(op))
    return [
        w.call(w.kernel("max_pool_gradient"), made, g, places, _pool_table(w, made, g, kernel, stride, padding, step))
    ]


def _average_pool(w: CallWriter, op: GraphOp) -> list[str]:
    given: dict[str, Any] = {"stride": [], "padding": [0], "count_include_pad": True, "divisor_override": None}
    given |= arguments_of(op.target, op.args, op.kwargs)
    made, backward = Ref(_result(op)), "grad_output" in given
    g = given["grad_output"] if backward else given["self"]
    large, small = (made, g) if backward else (g, made)
    table = _pool_table(w, large, small, given["kernel_size"], given["stride"], given["padding"])
    kernel = w.kernel("average_pool_gradient" if backward else "average_pool_forward")
    name = kernel.removesuffix("_forward")
    return [w.call(name, made, g, table, given["count_include_pad"], given["divisor_override"] or 0)]


def _adaptive(w: CallWriter, op: GraphOp) -> list[str]:
    made, backward = Ref(_result(op)), "backward" in op.target
    small, large = (op.args[0], made) if backward else (made, op.args[0])
    table = _pool_table(w, large, small)
    pointers = [f"(float *){w.at(one)}" for one in (small, large)]
    return [w.call(w.kernel("adaptive_average_pool"), *pointers, table, backward)]


def _mirror(w: CallWriter, op: GraphOp) -> list[str]:
    made, backward = Ref(_result(op)), "backward" in op.target
    pads = op.args[-1]
    small, large = (made, op.args[0]) if backward else (op.args[0], made)
    shape = w.shape(small) if len(pads) == 4 else (*w.shape(small)[:-1], 1, w.shape(small)[-1])
    outer = w.shape(large) if len(pads) == 4 else (*w.shape(large)[:-1], 1, w.shape(large)[-1])
    left, top = pads[0], pads[2] if len(pads) == 4 else 0
    table = w.table("pool", math.prod(shape[:-2]), *shape[-2:], *outer[-2:], 1, 1, 1, 1, top, left, 1, 1)
    pointers = [f"(float *){w.at(one)}" for one in (large, small)]
    return [w.call(w.kernel("pad_mirror"), *pointers, table, "reflection" in op.target, backward)]


# -- softmax and losses


def _along(shape: tuple[int, ...], dim: int) -> tuple[int, int, int]:
    dim %= max(len(shape), 1)
    size = shape[dim] if shape else 1
    return math.prod(shape[:dim]), size, math.prod(shape[dim + 1 :])


def _softmax(kernel: str, *more: int) -> Emit:
    def emit(w: CallWriter, op: GraphOp) -> list[str]:
        return [w.call(w.kernel(kernel), Ref(_result(op)), op.args[0], *_along(w.shape(op.args[0]), op.args[1]), *more)]

    return emit


def _softmax_gradient(kernel: str) -> Emit:
    def emit(w: CallWriter, op: GraphOp) -> list[str]:
        g, result, dim = op.args[:3]
        return [w.call(w.kernel(kernel), Ref(_result(op)), g, result, *_along(w.shape(result), dim))]

    return emit


def _reduction(op: GraphOp, reduction: int) -> bool:
    if reduction == 0:
        raise refusal(op, " without a reduction", near="reduction='mean'")
    return reduction == 1


def _likelihood(w: CallWriter, op: GraphOp) -> list[str]:
    x, target, weight, reduction, ignored = op.args
    loss, total = (None if one is None else Ref(one) for one in op.outputs)
    sizes = _along(w.shape(x), 1 if len(w.shape(x)) > 1 else 0)
    args = (loss, total, x, target, weight, ignored, _reduction(op, reduction), *sizes)
    return [w.call(w.kernel("negative_log_likelihood"), *args)]


def _likelihood_gradient(w: CallWriter, op: GraphOp) -> list[str]:
    g, x, target, weight, reduction, ignored, total = op.args
    sizes = _along(w.shape(x), 1 if len(w.shape(x)) > 1 else 0)
    mean, made = _reduction(op, reduction), Ref(_result(op))
    if op.target == CROSS_ENTROPY:
        return [w.call(w.kernel("cross_entropy_gradient"), made, g, x, target, weight, total, ignored, mean, *sizes)]
    kernel = w.kernel("negative_log_likelihood_gradient")
    return [w.call(kernel, made, g, target, weight, total, ignored, mean, *sizes)]


def _mean_squares(w: CallWriter, op: GraphOp) -> list[str]:
    given: dict[str, Any] = {"reduction": 1} | arguments_of(op.target, op.args, op.kwargs)
    x, y, made = given["self"], given["target"], Ref(_result(op))
    count = math.prod(w.shape(x))
    divisor = float(count) if _reduction(op, given["reduction"]) else 1.0
    if "grad_output" in given:
        return [w.call(w.kernel("mean_squares_gradient"), made, given["grad_output"], x, y, divisor, count)]
    return [w.call(w.kernel("mean_squares"), made, x, y, divisor, count)]


# -- sums, copies, tables


def _sum(w: CallWriter, op: GraphOp) -> list[str]:
    x, dims = op.args[0], op.args[1] if len(op.args) > 1 else None
    shape, steps = w.shape(x), w.value(x).stride
    over = range(len(shape)) if not dims else {dim % max(len(shape), 1) for dim in dims}
    parts = []
    for chosen, loops in (([d for d in range(len(shape)) if d not in over], 2), ([*over], 3)):
        sizes, (found,) = merged_loops([shape[d] for d in chosen], [[steps[d] for d in chosen]])
        if len(sizes) > loops:
            raise refusal(op, f" over {len(sizes)} dimensions that do not follow one another")
        parts.append(([1] * (loops - len(sizes)) + sizes, [0] * (loops - len(found)) + found))
    sizes, found = parts[0][0] + parts[1][0], parts[0][1] + parts[1][1]
    scale = 1.0 / math.prod(shape[d] for d in over) if ".mean." in op.target else 1.0
    return [w.call(w.kernel("reduce_sum"), Ref(_result(op)), x, scale, w.table("reduction", sizes, found))]


def _cat(w: CallWriter, op: GraphOp) -> list[str]:
    tensors, dim = op.args[0], op.args[1] if len(op.args) > 1 else 0
    result = w.graph.values[_result(op)]
    dim %= len(result.shape)
    lines, at = list[str](), 0
    for ref in tensors:
        part = w.value(ref)
        if math.prod(part.shape):
            like = _part(result, part.shape)
            lines.append(w.strided_copy(op, w.at(result.id), like, at * result.stride[dim], w.at(ref), part.stride))
            at += part.shape[dim]
    return lines


def _part(value: Any, shape: tuple[int, ...]) -> Any:
    from dataclasses import replace

    return replace(value, shape=tuple(shape))


def _into_zeros(
    w: CallWriter, op: GraphOp, g: Ref, shape: tuple[int, ...], steps: tuple[int, ...], start: int
) -> list[str]:
    """Return zeros, and then the gradient where it belongs: of so many elements a step."""
    from dataclasses import replace

    result = w.graph.values[_result(op)]
    zeros = w.call(w.kernel("fill"), Ref(result.id), 0.0, math.prod(result.shape))
    like = replace(result, shape=shape, stride=steps)
    return [zeros, w.strided_copy(op, w.at(result.id), like, start, w.at(g), w.value(g).stride)]


def _select_backward(w: CallWriter, op: GraphOp) -> list[str]:
    g, sizes, dim, index = op.args
    result, dim = w.graph.values[_result(op)], dim % len(sizes)
    steps = tuple(step for at, step in enumerate(result.stride) if at != dim)
    return _into_zeros(w, op, g, w.shape(g), steps, index % sizes[dim] * result.stride[dim])


def _slice_backward(w: CallWriter, op: GraphOp) -> list[str]:
    g, sizes, dim, start, _, step = op.args
    result, dim = w.graph.values[_result(op)], dim % len(sizes)
    start = min(start + sizes[dim] if start < 0 else start, sizes[dim])
    steps = tuple(own * (step if at == dim else 1) for at, own in enumerate(result.stride))
    return _into_zeros(w, op, g, w.shape(g), steps, start * result.stride[dim])


def _pad(w: CallWriter, op: GraphOp) -> list[str]:
    x, pads, value = op.args if len(op.args) == 3 else (*op.args, 0.0)
    result, source = w.graph.values[_result(op)], w.value(x)
    before = [0] * len(result.shape)
    for at in range(len(pads) // 2):
        before[-1 - at] = pads[2 * at]
    first = [max(one, 0) for one in before]
    begin = [max(-one, 0) for one in before]
    shape = tuple(min(r - f, s - b) for r, f, s, b in zip(result.shape, first, source.shape, begin, strict=True))
    start = sum(one * step for one, step in zip(first, result.stride, strict=True))
    skip = sum(one * step for one, step in zip(begin, source.stride, strict=True))
    filled = w.call(w.kernel("fill"), Ref(result.id), float(value), math.prod(result.shape))
    source_at = f"{w.at(x)} + {skip}" if skip else w.at(x)
    return [filled, w.strided_copy(op, w.at(result.id), _part(result, shape), start, source_at, source.stride)]


def _insert(w: CallWriter, op: GraphOp) -> list[str]:
    before, part, low = op.args
    made, given = w.graph.values[_result(op)], w.value(part)
    plane = math.prod(made.shape[2:])
    sizes = (math.prod(made.shape), low * plane, math.prod(given.shape))
    return [w.call(w.kernel("insert"), Ref(made.id), before, part, *sizes)]


def _embedding(w: CallWriter, op: GraphOp) -> list[str]:
    table, rows = op.args[:2]
    (count, size), scales = w.shape(table), w.scales_of(table)
    sizes = (math.prod(w.shape(rows)), size, count)
    if scales is None:
        return [w.call(w.kernel("embedding"), Ref(_result(op)), table, rows, *sizes)]
    return [w.call(w.kernel("embedding_int8"), Ref(_result(op)), table, scales, rows, *sizes)]


def _embedding_gradient(w: CallWriter, op: GraphOp) -> list[str]:
    g, rows, count, ignored, by_frequency = op.args
    if by_frequency:
        raise refusal(op, " with scale_grad_by_freq", near="an embedding without")
    sizes = (math.prod(w.shape(rows)), w.shape(g)[-1], count, ignored)
    return [w.call(w.kernel("embedding_gradient"), Ref(_result(op)), g, rows, *sizes)]


# -- random masks


def _mask(w: CallWriter, op: GraphOp) -> list[str]:
    x, p = op.args
    count = math.prod(w.shape(x))
    return [w.call(w.kernel("dropout_mask"), Ref(_result(op)), "&s->random", f"{threshold(p)}u", count)]


def threshold(p: float) -> int:
    """Return the number below which a draw of 32 bits drops an element with probability p."""
    return min(round(p * 2**32), 2**32 - 1)


def _dropout(w: CallWriter, op: GraphOp) -> list[str]:
    x, mask, scale = op.args
    made = Ref(_result(op))
    return [w.call(w.kernel("dropout"), made, x, mask, float(scale), math.prod(w.shape(made)))]


def _fill(w: CallWriter, op: GraphOp) -> list[str]:
    made = _result(op)
    return [w.call(w.kernel("fill"), Ref(made), float(op.args[0]), math.prod(w.graph.values[made].shape))]


CALLS: Mapping[str, Emit] = {
    **PRODUCTS,
    conv.GATHER: _gather,
    conv.SCATTER: _scatter,
    conv.WEIGHT_GRADIENT: _weight_gradient,
    conv.CHANNEL_SUM: _channel_sum,
    norm.BATCH_STATISTICS: _by_channel("batch_norm_statistics", results=2),
    norm.BATCH_APPLY: _by_channel("batch_norm_apply"),
    norm.BATCH_FIXED: _by_channel("batch_norm_fixed"),
    norm.BATCH_SUMS: _sums,
    norm.BATCH_INPUT: _by_channel("batch_norm_input_gradient"),
    norm.BATCH_FIXED_INPUT: _by_channel("batch_norm_fixed_input_gradient"),
    norm.ROW_STATISTICS: _plain("row_norm_statistics", results=2),
    norm.ROW_APPLY: _plain("row_norm_apply"),
    norm.ROW_SUMS: _plain("row_norm_sums", results=2),
    norm.ROW_INPUT: _plain("row_norm_input_gradient"),
    "aten.max_pool2d_with_indices.default": _max_pool,
    "aten.max_pool2d_with_indices_backward.default": _max_pool_gradient,
    "aten.avg_pool2d.default": _average_pool,
    "aten.avg_pool2d_backward.default": _average_pool,
    "aten._adaptive_avg_pool2d.default": _adaptive,
    "aten._adaptive_avg_pool2d_backward.default": _adaptive,
    "aten.reflection_pad1d.default": _mirror,
    "aten.reflection_pad1d_backward.default": _mirror,
    "aten.reflection_pad2d.default": _mirror,
    "aten.reflection_pad2d_backward.default": _mirror,
    "aten.replication_pad1d.default": _mirror,
    "aten.replication_pad1d_backward.default": _mirror,
    "aten.replication_pad2d.default": _mirror,
    "aten.replication_pad2d_backward.default": _mirror,
    "aten._log_softmax.default": _softmax("log_softmax"),
    "aten._softmax.default": _softmax("softmax", 0),
    "aten._safe_softmax.default": _softmax("softmax", 1),
    "aten._log_softmax_backward_data.default": _softmax_gradient("log_softmax_gradient"),
    "aten._softmax_backward_data.default": _softmax_gradient("softmax_gradient"),
    "aten.nll_loss_forward.default": _likelihood,
    "aten.nll_loss2d_forward.default": _likelihood,
    "aten.nll_loss_backward.default": _likelihood_gradient,
    "aten.nll_loss2d_backward.default": _likelihood_gradient,
    CROSS_ENTROPY: _likelihood_gradient,
    "aten.mse_loss.default": _mean_squares,
    "aten.mse_loss_backward.default": _mean_squares,
    "aten.sum.default": _sum,
    "aten.sum.dim_IntList": _sum,
    "aten.mean.default": _sum,
    "aten.mean.dim": _sum,
    "aten.cat.default": _cat,
    "aten.select_backward.default": _select_backward,
    "aten.slice_backward.default": _slice_backward,
    "aten.constant_pad_nd.default": _pad,
    "aten.embedding.default": _embedding,
    "aten.embedding_dense_backward.default": _embedding_gradient,
    MASK: _mask,
    DROPOUT: _dropout,
    FILL: _fill,
    INSERT: _insert,
}
"""What writes the call of each op."""
