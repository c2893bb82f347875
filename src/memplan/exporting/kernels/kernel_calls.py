"""The C call of each op that is not elementwise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from memplan.exporting.kernels.call_writer import C_BYTES, CallWriter, merged_loops
from memplan.exporting.kernels.elementwise import ELEMENTWISE
from memplan.exporting.kernels.int8_calls import INT8
from memplan.exporting.kernels.product_calls import (
    FEWEST_TILED_ROWS,
    PRODUCTS,
    WriteCalls,
    gradient_kernel,
    tile_kernel,
)
from memplan.exporting.kernels.recurrent_calls import RECURRENT
from memplan.exporting.lowering import convolution_splitting as conv
from memplan.exporting.lowering import norm_splitting as norm
from memplan.exporting.lowering.byte_inputs import NORMALIZE
from memplan.exporting.lowering.device_graph import (
    ARENA_INPUT,
    FILL,
    INSERT,
    TO_FLOAT,
    WORD,
    WRITE,
    first_output,
    refusal,
)
from memplan.planning.graph.joint_graph import GraphOp, Ref, Value
from memplan.planning.graph.op_schema import CROSS_ENTROPY, arguments_of, is_contiguous, short
from memplan.planning.passes.split_dropout import DRAW_MASK

DROPOUT = "memplan.masked_scale.default"


def calls_of(writer: CallWriter, op: GraphOp) -> list[str]:
    """Return the C statements that run an op.

    Raises:
        RecordingError: no kernel computes it with these arguments.
    """
    if op.target in ELEMENTWISE:
        return [writer.elementwise(op)]
    return CALLS[op.target](writer, op)


def _output_refs(values: Sequence[int | None]) -> list[Ref | None]:
    """Return outputs as arguments of a C call: None, a result that nothing reads, becomes a null pointer."""
    return [None if value is None else Ref(value) for value in values]


def _direct(kernel: str, outputs: int = 1, *, by_channel: bool = False) -> WriteCalls:
    """Return the function that writes the call of a kernel with the op's first `outputs` outputs and its arguments.

    With `by_channel`, the sizes (N, C, H*W) of the first argument follow.
    """

    def emit(w: CallWriter, op: GraphOp) -> list[str]:
        sizes = _channels(w, op.args[0]) if by_channel else ()
        return [w.call(w.kernel(kernel), *_output_refs(op.outputs[:outputs]), *op.args, *sizes)]

    return emit


def _channels(w: CallWriter, x: Ref) -> tuple[int, int, int]:
    """Return the sizes (N, C, H*W) of a tensor of shape (N, C, ...)."""
    shape = w.shape(x)
    return shape[0], shape[1], math.prod(shape[2:])


# -- convolutions


def _convolution_table(w: CallWriter, of_dim_0: Ref, of_dim_1: Ref, weight: Value, geometry: Sequence[Any]) -> str:
    """Return C for the sizes of a convolution between two tensors: `of_dim_0` has the channels of the weight's
    dimension 0, `of_dim_1` those of its dimension 1.

    `geometry` has stride, padding and dilation as pairs, and the number of groups. A 1x1 convolution without stride or
    padding is described as one long row, which has the longer inner loop.
    """
    (stride_h, stride_w), (pad_h, pad_w), (step_h, step_w), groups = geometry
    batch, channels_1 = w.shape(of_dim_1)[:2]
    channels_0 = w.shape(of_dim_0)[1]
    height, width = _plane(w.shape(of_dim_1))
    rows, columns = _plane(w.shape(of_dim_0))
    kernel_h, kernel_w = _kernel(weight)
    if (kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w) == (1, 1, 1, 1, 0, 0):
        height, width, rows, columns = 1, height * width, 1, rows * columns
    return w.table("convolution", batch, groups, channels_1 // groups, height, width, channels_0 // groups, rows,
                   columns, kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, step_h, step_w,
                   weight.stride[0])  # fmt: skip


def _plane(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return height and width of (N, C, H, W), or of (N, C, L), whose height is 1."""
    return (1, shape[2]) if len(shape) == 3 else (shape[2], shape[3])


def _tiled_table(
    w: CallWriter, result: Ref, source: Ref, weight: Value, geometry: Sequence[Any], *, transposed: bool
) -> str:
    """Return C for the sizes of a convolution in tiles, which computes `result` from `source`.

    `geometry` is as for `_convolution_table`. Row r of the result reads by row k of the kernel the row
    ``(r * stride + start + k * step) / phases`` of the source, if that is whole. A convolution has phases 1; a
    transposed one has a stride of 1, its own stride as phases, and walks the kernel backwards.
    """
    strides, pads, dilations, groups = geometry
    batch, result_channels = w.shape(result)[:2]
    inner, outer = w.shape(source)[1] // groups, result_channels // groups  # channels of a group
    taps = math.prod(weight.shape[2:])
    if transposed:
        stride, phases = (1, 1), strides
        start, step = pads, [-dilation for dilation in dilations]
    else:
        stride, phases = strides, (1, 1)
        start, step = [-pad for pad in pads], dilations
    # distances in the weight, [channels of all groups][channels of one group][taps]
    by_dim_0, by_dim_1 = weight.stride[0], taps
    by_group = (inner if transposed else outer) * by_dim_0
    by_outer, by_inner = (by_dim_1, by_dim_0) if transposed else (by_dim_0, by_dim_1)
    return w.table("tiled_convolution", batch, groups, inner, *_plane(w.shape(source)), outer, *_plane(w.shape(result)),
                   *_kernel(weight), *stride, *start, *step, *phases, by_group, by_outer, by_inner)  # fmt: skip


def _kernel(weight: Value) -> tuple[int, ...]:
    """Return height and width of a convolution's kernel; over one dimension the height is 1."""
    return tuple(weight.shape[2:]) if len(weight.shape) == 4 else (1, weight.shape[2])


def _convolution(w: CallWriter, op: GraphOp) -> list[str]:
    """Call the kernel of a convolution or its transpose, in the variant for int8 where the weight is quantized."""
    x, weight, bias, *geometry = op.args
    output, transposed, groups = Ref(first_output(op)), op.target == conv.SCATTER, geometry[3]
    addend = op.args[conv.ADDEND] if len(op.args) > conv.ADDEND else None
    scales, (suffix, macros, factor_and_addend) = w.scales_of(weight), w.byte_input(op)
    weights, weight_type = ((weight,), "float") if scales is None else ((weight, scales), "signed char")
    suffix += "" if scales is None else "_int8"
    macros |= {"WEIGHT": weight_type, "SCALES": "" if scales is None else ", const float *scale"}
    if w.shape(output)[1] // groups >= FEWEST_TILED_ROWS:
        template = "convolution_tiles"
        table = _tiled_table(w, output, x, w.value(weight), geometry[:4], transposed=transposed)
        macros |= _tile_macros(w, weight_type, macros["FLOATS"] == "1", transposed=transposed)
        suffix += "_transposed" if scales and transposed else ""
    else:
        template = "convolution_scatter" if transposed else "convolution_gather"
        of_dim_0, of_dim_1 = (x, output) if transposed else (output, x)
        table = _convolution_table(w, of_dim_0, of_dim_1, w.value(weight), geometry[:4])
        macros["SCALED(row, weight)"] = "(weight)" if scales is None else "scale[row] * (float)(weight)"
    name = w.instance(template, f"{template}{suffix}", macros)
    return [w.call(name, output, x, *factor_and_addend, *weights, bias, addend, table)]


def _tile_macros(w: CallWriter, weight_type: str, reads_floats: bool, *, transposed: bool) -> dict[str, str]:
    """Add the kernel that adds a panel's products to the result; return the macros with which convolution_tiles.c calls
    it. ``reads_floats``: whether the source is float, and not bytes.

    Rows of a float source are read where they lie, unless they are scaled first.
    Scales of int8 weights are those of the weight's dimension 0. That is the result's channels, whose sums are scaled,
    or of a transposed convolution the source's channels, which are scaled as they are read.
    """
    scales_sums = weight_type != "float" and not transposed
    scales_source = weight_type != "float" and transposed
    add = "convolution_add_scaled" if scales_sums else "convolution_add_int8" if scales_source else "convolution_add"
    w.instance("convolution_add", add, {
        "WEIGHT": weight_type, "TILE": tile_kernel(w, weight_type),
        "SCALES": ", const float *scale" if scales_sums else "", "DIRECT": "0" if scales_sums else "WIDE == 4",
        "SCALED(row, v)": "scale[row] * (v)" if scales_sums else "(v)",
    })  # fmt: skip
    scale_argument = "scale + group * c->outer, " if scales_sums else ""
    value = "VALUE(v, group * c->inner + (channel))"
    return {
        "IN_PLACE": "1" if reads_floats and not scales_source else "0",
        "ADD(to, w, p, count, c)": f"{add}(to, w, {scale_argument}p, count, c)",
        "INNER(channel, v)": f"(scale[group * c->inner + (channel)] * {value})" if scales_source else value,
    }


def _weight_gradient(w: CallWriter, op: GraphOp) -> list[str]:
    """Call the kernel of a convolution's weight gradient, in the variant that updates the weight if that is fused."""
    of_dim_0, of_dim_1, *geometry = op.args  # see `_convolution_table`
    groups = geometry[3]
    weight = w.graph.values[first_output(op)]
    if w.shape(of_dim_0)[1] // groups >= FEWEST_TILED_ROWS:
        table = _tiled_table(w, of_dim_0, of_dim_1, weight, geometry, transposed=False)
        tile_kernel(w)
        name, target, factor_and_addend = gradient_kernel(w, op, "convolution_weight_gradient_tiles")
    else:
        table = _convolution_table(w, of_dim_0, of_dim_1, weight, geometry)
        name, target, factor_and_addend = gradient_kernel(w, op, "convolution_weight_gradient")
    return [w.call(name, target, of_dim_0, of_dim_1, *factor_and_addend, table)]


# -- norms


def _batch_norm_sums(w: CallWriter, op: GraphOp) -> list[str]:
    """Call the kernel of the sums over batch and plane that the gradients of a batch norm need."""
    g, x, mean, deviation, eps = op.args
    sums = [Ref(value) for value in op.outputs if value is not None]
    eps = -1.0 if eps is None else eps  # negative: `deviation` is one already, not a variance
    return [w.call(w.kernel("batch_norm_sums"), *sums, g, x, mean, deviation, eps, *_channels(w, x))]


# -- pools and pads


def _pair(sizes: Any, default: int) -> tuple[int, int]:
    """Return sizes of height and width from PyTorch's list of two, one (for both) or none (the default for both)."""
    if sizes is None or len(sizes) == 0:
        return default, default
    return sizes[0], sizes[-1]


def _pool_table(
    w: CallWriter, large: Ref, small: Ref, kernel: Any = None, stride: Any = None, padding: Any = None,
    dilation: Any = None,
) -> str:  # fmt: skip
    """Return C for the sizes of a pool from the plane of `large` to that of `small`."""
    window = _pair(kernel, 1)
    strides = window if stride is None or len(stride) == 0 else _pair(stride, 1)
    sizes = (*window, *strides, *_pair(padding, 0), *_pair(dilation, 1))
    planes = math.prod(w.shape(large)[:-2])
    return w.table("pool", planes, *w.shape(large)[-2:], *w.shape(small)[-2:], *sizes)


def _max_pool(w: CallWriter, op: GraphOp) -> list[str]:
    """Call the kernel of a max pool, which also writes indices if the backward pass reads them."""
    x, *window = op.args
    output, indices = Ref(first_output(op)), op.outputs[1]
    table = _pool_table(w, x, output, *window[:4])
    return [w.call(w.kernel("max_pool"), output, None if indices is None else Ref(indices), x, table)]


def _max_pool_gradient(w: CallWriter, op: GraphOp) -> list[str]:
    """Call the kernel that adds each gradient at the position of the window's largest element."""
    g, _, kernel, stride, padding, dilation, _, indices = op.args
    output = Ref(first_output(op))
    table = _pool_table(w, output, g, kernel, stride, padding, dilation)
    return [w.call(w.kernel("max_pool_gradient"), output, g, indices, table)]


def _average_pool(w: CallWriter, op: GraphOp) -> list[str]:
    """Call the kernel of an average pool or of its gradient; both take the same table of sizes."""
    arguments: dict[str, Any] = {"stride": [], "padding": [0], "count_include_pad": True, "divisor_override": None}
    arguments |= arguments_of(op.target, op.args, op.kwargs)
    output, backward = Ref(first_output(op)), "grad_output" in arguments
    source = arguments["grad_output"] if backward else arguments["self"]
    large, small = (output, source) if backward else (source, output)
    table = _pool_table(w, large, small, arguments["kernel_size"], arguments["stride"], arguments["padding"])
    kernel = w.kernel("average_pool_gradient" if backward else "average_pool_forward")
    c_function = kernel.removesuffix("_forward")
    divisor = arguments["divisor_override"] or 0  # 0: the size of the window
    return [w.call(c_function, output, source, table, arguments["count_include_pad"], divisor)]


def _adaptive_average_pool(w: CallWriter, op: GraphOp) -> list[str]:
    """Call the kernel of an adaptive average pool, forward or backward: only the direction of the copy differs."""
    output, backward = Ref(first_output(op)), "backward" in op.target
    small, large = (op.args[0], output) if backward else (output, op.args[0])
    table = _pool_table(w, large, small)
    pointers = [f"(float *){w.pointer(ref)}" for ref in (small, large)]
    return [w.call(w.kernel("adaptive_average_pool"), *pointers, table, backward)]


def _mirror_pad(w: CallWriter, op: GraphOp) -> list[str]:
    """Call the kernel of reflection and replication padding, forward or backward."""
    output, backward = Ref(first_output(op)), "backward" in op.target
    pads = op.args[-1]  # left, right, and in two dimensions top, bottom
    small, large = (output, op.args[0]) if backward else (op.args[0], output)
    inner, outer = w.shape(small), w.shape(large)
    left, top = pads[0], pads[2] if len(pads) == 4 else 0
    if len(pads) == 2:  # over one dimension: planes of height 1
        inner, outer = ((*shape[:-1], 1, shape[-1]) for shape in (inner, outer))
    window_and_stride, dilation = (1, 1, 1, 1), (1, 1)
    planes = math.prod(inner[:-2])
    table = w.table("pool", planes, *inner[-2:], *outer[-2:], *window_and_stride, top, left, *dilation)
    pointers = [f"(float *){w.pointer(ref)}" for ref in (large, small)]
    return [w.call(w.kernel("pad_mirror"), *pointers, table, "reflection" in op.target, backward)]


# -- softmax and losses


def _sizes_around(shape: tuple[int, ...], dim: int) -> tuple[int, int, int]:
    """Return (product of the sizes before a dimension, its size, product of the sizes after it)."""
    dim %= max(len(shape), 1)  # a scalar has a dimension 0, too
    size = shape[dim] if shape else 1
    return math.prod(shape[:dim]), size, math.prod(shape[dim + 1 :])


def _softmax(kernel: str, *, safe: bool | None = None) -> WriteCalls:
    """Return the function that writes the call of a softmax kernel over one dimension.

    `safe`: whether a row of minus infinities becomes zeros, not NaN; None for a kernel without this argument.
    """

    def emit(w: CallWriter, op: GraphOp) -> list[str]:
        x, dim = op.args[:2]
        flags = () if safe is None else (safe,)
        return [w.call(w.kernel(kernel), Ref(first_output(op)), x, *_sizes_around(w.shape(x), dim), *flags)]

    return emit


def _softmax_gradient(kernel: str) -> WriteCalls:
    """Return the function that writes the call of a softmax's gradient, which reads the result of the softmax."""

    def emit(w: CallWriter, op: GraphOp) -> list[str]:
        g, result, dim = op.args[:3]
        return [w.call(w.kernel(kernel), Ref(first_output(op)), g, result, *_sizes_around(w.shape(result), dim))]

    return emit


def _is_mean(op: GraphOp, reduction: int) -> bool:
    """Return whether a loss is a mean, torch's reduction 1, or else a sum, 2. Raises RecordingError for none, 0."""
    if reduction == 0:
        raise refusal(op, " without a reduction", near="reduction='mean'")
    return reduction == 1


def _negative_log_likelihood(w: CallWriter, op: GraphOp) -> list[str]:
    """Call the kernel of the loss, which also writes the sum of the weights of its targets."""
    x, target, weight, reduction, ignored = op.args
    sizes = _sizes_around(w.shape(x), 1 if len(w.shape(x)) > 1 else 0)
    args = (*_output_refs(op.outputs), x, target, weight, ignored, reduction, *sizes)
    return [w.call(_by_index(w, "negative_log_likelihood", target), *args)]


def _negative_log_likelihood_gradient(w: CallWriter, op: GraphOp) -> list[str]:
    """Call the kernel of the loss's gradient or, where the log-softmax before it is merged in, of the cross
    entropy's."""
    g, x, target, weight, reduction, ignored, weight_sum = op.args
    sizes = _sizes_around(w.shape(x), 1 if len(w.shape(x)) > 1 else 0)
    args = (target, weight, weight_sum, ignored, reduction, *sizes)
    if op.target == CROSS_ENTROPY:
        return [w.call(_by_index(w, "cross_entropy_gradient", target), Ref(first_output(op)), g, x, *args)]
    return [w.call(_by_index(w, "negative_log_likelihood_gradient", target), Ref(first_output(op)), g, *args)]


def _mean_squares(w: CallWriter, op: GraphOp) -> list[str]:
    """Call the kernel of a mean or sum of squared differences, or of its gradient."""
    arguments: dict[str, Any] = {"reduction": 1} | arguments_of(op.target, op.args, op.kwargs)
    x, y, output = arguments["self"], arguments["target"], Ref(first_output(op))
    count = math.prod(w.shape(x))
    divisor = float(count) if _is_mean(op, arguments["reduction"]) else 1.0
    if "grad_output" in arguments:
        g = arguments["grad_output"]
        return [w.call(w.kernel("mean_squares_gradient"), output, g, x, y, divisor, count)]
    return [w.call(w.kernel("mean_squares"), output, x, y, divisor, count)]


# -- sums, copies, tables


def _reduction_table(w: CallWriter, op: GraphOp) -> str:
    """Return C for the sizes of a reduction: two loops over the dimensions that stay, three over the reduced ones.

    Raises RecordingError if the kernel would need more loops.
    """
    x, dims = op.args[0], op.args[1] if len(op.args) > 1 else None
    shape, strides = w.shape(x), w.value(x).stride
    reduced = _reduced_dims(shape, dims)
    others = [dim for dim in range(len(shape)) if dim not in reduced]
    sizes, steps = list[int](), list[int]()  # of the five loops
    for loop_dims, loops in ((others, 2), (reduced, 3)):
        loop_strides = [strides[dim] for dim in loop_dims]
        merged_sizes, (merged_strides,) = merged_loops([shape[dim] for dim in loop_dims], [loop_strides])
        missing = loops - len(merged_sizes)
        if missing < 0:
            raise refusal(
                op, f" over {len(merged_sizes)} dimensions that do not follow one another",
                do="Reduce one dimension after another, such as x.sum(6).sum(4)",
            )  # fmt: skip
        sizes += [1] * missing + merged_sizes
        steps += [0] * missing + merged_strides
    return w.table("reduction", sizes, steps)


def _reduced_dims(shape: Sequence[int], dims: Sequence[int] | None) -> list[int]:
    """Return the non-negative dimensions that a reduction over `dims` reduces: all of them for None or []."""
    return list({dim % max(len(shape), 1) for dim in dims} if dims else range(len(shape)))


def _sum(w: CallWriter, op: GraphOp) -> list[str]:
    """Call the kernel of a sum or mean."""
    x, dims = op.args[0], op.args[1] if len(op.args) > 1 else None
    shape = w.shape(x)
    scale = 1.0 / math.prod(shape[dim] for dim in _reduced_dims(shape, dims)) if ".mean." in op.target else 1.0
    return [w.call(w.kernel("reduce_sum"), Ref(first_output(op)), x, scale, _reduction_table(w, op))]


def _extreme(w: CallWriter, op: GraphOp) -> list[str]:
    """Call the kernel of the largest or smallest elements."""
    smallest = short(op.target) == "amin"
    return [w.call(w.kernel("reduce_extreme"), Ref(first_output(op)), op.args[0], smallest, _reduction_table(w, op))]


def _row_extreme(w: CallWriter, op: GraphOp) -> list[str]:
    """Call the kernel of the largest or smallest elements along a dimension, and of their indices if these are read."""
    x, dim = op.args[:2]
    values, indices = [*_output_refs(op.outputs), None][:2]
    smallest = short(op.target) == "min"
    return [w.call(w.kernel("row_extreme"), values, indices, x, smallest, *_sizes_around(w.shape(x), dim))]


def _gather(w: CallWriter, op: GraphOp) -> list[str]:
    """Call the kernel that reads elements by their indices along a dimension."""
    x, dim, index = op.args[:3]
    return [
        w.call(_by_index(w, "gather", index), Ref(first_output(op)), x, index, *_sizes_by_index(w, op, x, dim, index))
    ]


def _scatter(w: CallWriter, op: GraphOp) -> list[str]:
    """Call the kernel that writes, or adds, elements by their indices along a dimension."""
    x, dim, index, source = op.args[:4]
    source, value = (source, 0.0) if isinstance(source, Ref) else (None, float(source))
    adds = short(op.target) == "scatter_add"
    sizes = _sizes_by_index(w, op, x, dim, index)
    return [w.call(_by_index(w, "scatter", index), Ref(first_output(op)), x, index, source, value, adds, *sizes)]


def _by_index(w: CallWriter, kernel: str, index: Ref) -> str:
    """Return the C name of a kernel's variant for the indices' dtype: indices that the step computes are floats."""
    if w.value(index).dtype == "float32":
        return w.instance(kernel, f"{kernel}_by_float", {"INDEX": "float"})
    return w.instance(source=kernel, name=kernel, defines={"INDEX": "int32_t"})


def _sizes_by_index(w: CallWriter, op: GraphOp, x: Ref, dim: int, index: Ref) -> tuple[int, ...]:
    """Return (product of the sizes before a dimension, its size in x, its size in the index, product of those after).

    Raises RecordingError if the index is smaller than x in another dimension: one offset serves both in the kernels.
    """
    outer, size, inner = _sizes_around(w.shape(x), dim)
    index_outer, index_size, index_inner = _sizes_around(w.shape(index), dim)
    if (index_outer, index_inner) != (outer, inner):
        raise refusal(
            op, " by an index of fewer rows", near="an index as large in the other dimensions",
            do="Narrow the tensor first: x[: len(index)]",
        )  # fmt: skip
    return outer, size, index_size, inner


def _resize(w: CallWriter, op: GraphOp) -> list[str]:
    """Call the kernel of nearest or linear upsampling of one or two dimensions, forward or backward."""
    arguments = arguments_of(op.target, op.args, op.kwargs)
    output, backward = Ref(first_output(op)), "grad_output" in arguments
    source = arguments["grad_output"] if backward else arguments["self"]
    small, large = (output, source) if backward else (source, output)
    align_corners, dims = bool(arguments.get("align_corners", False)), len(w.shape(small)) - 2
    factors = [arguments.get("scales_h"), arguments.get("scales_w", arguments.get("scales"))][-dims:]
    small_sizes, large_sizes = w.shape(small)[2:], w.shape(large)[2:]
    steps = [
        _input_step(*sizes_and_factor, align_corners)
        for sizes_and_factor in zip(small_sizes, large_sizes, factors, strict=True)
    ]
    if dims == 1:  # planes of height 1
        small_sizes, large_sizes, steps = (1, *small_sizes), (1, *large_sizes), [0.0, *steps]
    windows = (1, 1, 1, 1, 0, 0, 1, 1)  # kernel, stride, padding and step of a pool; resizing has none
    table = w.table("pool", math.prod(w.shape(small)[:2]), *small_sizes, *large_sizes, *windows)
    pointers = [f"(float *)({w.pointer(ref)})" for ref in (large, small)]
    linear = "nearest" not in op.target
    return [w.call(w.kernel("resize"), *pointers, table, *steps, linear, align_corners, backward)]


def _input_step(small: int, large: int, scale_factor: float | None, align_corners: bool) -> float:
    """Return the step in the input for each element of the output, as torch's `area_pixel_compute_scale` does.

    `scale_factor`: as the user passed it, or None.
    """
    if align_corners:
        return (small - 1) / (large - 1) if large > 1 else 0.0
    return 1 / scale_factor if scale_factor else small / large


def _cat(w: CallWriter, op: GraphOp) -> list[str]:
    """Copy each tensor into its range of the output."""
    tensors, dim = op.args[0], op.args[1] if len(op.args) > 1 else 0
    output = w.graph.values[first_output(op)]
    dim %= len(output.shape)
    calls, index = list[str](), 0
    for ref in tensors:
        tensor = w.value(ref)
        if math.prod(tensor.shape):  # torch also takes empty tensors of other shapes
            output_part = replace(output, shape=tensor.shape)
            start = index * output.stride[dim]
            calls.append(w.strided_copy(w.pointer(output.id), output_part, start, w.pointer(ref), tensor.stride))
            index += tensor.shape[dim]
    return calls


def _into_zeros(
    w: CallWriter, op: GraphOp, g: Ref, shape: tuple[int, ...], stride: tuple[int, ...], start: int
) -> list[str]:
    """Fill the output with zeros and copy `g` into the part of this shape and stride, from element `start` on."""
    output = w.graph.values[first_output(op)]
    zeros = w.call(w.kernel("fill"), Ref(output.id), 0.0, math.prod(output.shape))
    output_part = replace(output, shape=shape, stride=stride)
    return [zeros, w.strided_copy(w.pointer(output.id), output_part, start, w.pointer(g), w.value(g).stride)]


def _select_backward(w: CallWriter, op: GraphOp) -> list[str]:
    """Call the kernels of an index's gradient: zeros, and the gradient at the index."""
    g, sizes, dim, index = op.args
    output, dim = w.graph.values[first_output(op)], dim % len(sizes)
    strides_without_dim = output.stride[:dim] + output.stride[dim + 1 :]
    return _into_zeros(w, op, g, w.shape(g), strides_without_dim, index % sizes[dim] * output.stride[dim])


def _slice_backward(w: CallWriter, op: GraphOp) -> list[str]:
    """Call the kernels of a slice's gradient: zeros, and the gradient at the positions of the slice."""
    g, sizes, dim, start, _, step = op.args
    output, dim = w.graph.values[first_output(op)], dim % len(sizes)
    start = min(start + sizes[dim] if start < 0 else start, sizes[dim])
    strides = tuple(stride * (step if d == dim else 1) for d, stride in enumerate(output.stride))
    return _into_zeros(w, op, g, w.shape(g), strides, start * output.stride[dim])


def _constant_pad(w: CallWriter, op: GraphOp) -> list[str]:
    """Fill the output with a number and copy the input into it; negative padding cuts the input."""
    x, pads, value = op.args if len(op.args) == 3 else (*op.args, 0.0)
    output, source = w.graph.values[first_output(op)], w.value(x)
    pads_before = [0] * len(output.shape)
    for k in range(len(pads) // 2):  # pads begin with the last dimension: (before, after) of each
        pads_before[-1 - k] = pads[2 * k]
    output_begin = [max(pad, 0) for pad in pads_before]  # of the copy, by dimension
    source_begin = [max(-pad, 0) for pad in pads_before]
    dims = zip(output.shape, output_begin, source.shape, source_begin, strict=True)
    copied_shape = tuple(min(out_size - to, in_size - skipped) for out_size, to, in_size, skipped in dims)
    start = sum(index * stride for index, stride in zip(output_begin, output.stride, strict=True))
    source_start = sum(index * stride for index, stride in zip(source_begin, source.stride, strict=True))
    fill = w.call(w.kernel("fill"), Ref(output.id), float(value), math.prod(output.shape))
    source_at = f"{w.pointer(x)} + {source_start}" if source_start else w.pointer(x)
    output_part = replace(output, shape=copied_shape)
    return [fill, w.strided_copy(w.pointer(output.id), output_part, start, source_at, source.stride)]


def _to_float(w: CallWriter, op: GraphOp) -> list[str]:
    """Call the kernel that converts integers."""
    return [w.call(w.kernel("to_float"), Ref(first_output(op)), op.args[0], math.prod(w.shape(op.args[0])))]


def _normalize(w: CallWriter, op: GraphOp) -> list[str]:
    """Call the kernel that makes floats of the bytes of an input."""
    x, *factor_and_addend = op.args
    suffix, macros, _ = w.byte_input(replace(op, kwargs={"bytes": factor_and_addend}))
    shape, channels = w.shape(x), math.prod(w.shape(factor_and_addend[0]))
    planes = math.prod(shape[:2]) if channels > 1 else 1  # one number for all: one long plane
    name = w.instance("normalize", f"normalize{suffix}", macros)
    return [w.call(name, Ref(first_output(op)), x, *factor_and_addend, planes, channels, math.prod(shape) // planes)]


def _write_output(w: CallWriter, op: GraphOp) -> list[str]:
    """Copy a value to the caller's `output`, where that is no null pointer."""
    x, start = w.value(op.args[0]), op.args[1]
    if is_contiguous(x):
        copy = f"output[{f'{start} + ' if start else ''}k] = ({w.pointer(x.id)})[k];"
        return [f"for (int k = 0; output && k < {math.prod(x.shape)}; k++)", f"    {copy}"]
    like = replace(x, stride=conv.contiguous_strides(x.shape))
    return ["if (output)", f"    {w.strided_copy('output', like, start, w.pointer(x.id), x.stride)}"]


def _flip(w: CallWriter, op: GraphOp) -> list[str]:
    """Copy the input from its last element on, backwards in the dimensions that are flipped."""
    x, flipped = w.value(op.args[0]), {dim % len(w.shape(op.args[0])) for dim in op.args[1]}
    strides = [-stride if dim in flipped else stride for dim, stride in enumerate(x.stride)]
    last_element = sum((x.shape[dim] - 1) * x.stride[dim] for dim in flipped)
    source = f"{w.pointer(op.args[0])} + {last_element}"
    output = w.graph.values[first_output(op)]
    return [w.strided_copy(w.pointer(output.id), output, start=0, source=source, strides=strides)]


def _insert(w: CallWriter, op: GraphOp) -> list[str]:
    """Call the kernel that copies a group of channels into a value, from one channel on."""
    before, part, channel = op.args
    output = w.graph.values[first_output(op)]
    start = channel * math.prod(output.shape[2:])
    size, part_size = math.prod(output.shape), math.prod(w.shape(part))
    return [w.call(w.kernel("insert"), Ref(output.id), before, part, size, start, part_size)]


def _embedding(w: CallWriter, op: GraphOp) -> list[str]:
    """Call the kernel that reads rows of a table, in the variant for int8 where the table is quantized."""
    table, rows = op.args[:2]
    (count, size), scales = w.shape(table), w.scales_of(table)
    sizes = (math.prod(w.shape(rows)), size, count)
    if scales is None:
        return [w.call(_by_index(w, "embedding", rows), Ref(first_output(op)), table, rows, *sizes)]
    return [w.call(_by_index(w, "embedding_int8", rows), Ref(first_output(op)), table, scales, rows, *sizes)]


def _embedding_gradient(w: CallWriter, op: GraphOp) -> list[str]:
    """Call the kernel that adds the gradient of each row that was read, or that hands on the sums to the update: of
    other rows only where a gradient of zero changes them."""
    g, rows, count, ignored, by_frequency = op.args
    if by_frequency:
        raise refusal(op, " with scale_grad_by_freq", near="an embedding without", do="Leave it out")
    sizes = (math.prod(w.shape(rows)), w.shape(g)[-1], count, ignored)
    update = w.update_calls.get(first_output(op))
    if update is not None:
        float_indices = w.value(rows).dtype == "float32"
        name = f"embedding_{update.function}{'_by_float' if float_indices else ''}"
        macros = update.macros | {
            "INDEX": "float" if float_indices else "int32_t", "ALL_ROWS": str(int(update.zero_gradients_matter))
        }  # fmt: skip
        return [w.call(w.instance("embedding_update", name, macros), update.arguments, g, rows, *sizes)]
    return [w.call(_by_index(w, "embedding_gradient", rows), Ref(first_output(op)), g, rows, *sizes)]


# -- random masks


def _mask(w: CallWriter, op: GraphOp) -> list[str]:
    """Call the kernel that draws a dropout mask; it drops an element where a random integer is below a threshold."""
    x, p = op.args
    count = math.prod(w.shape(x))
    return [w.call(w.kernel("dropout_mask"), Ref(first_output(op)), "&s->random", f"{dropout_threshold(p)}u", count)]


def dropout_threshold(p: float) -> int:
    """Return the number below which a random 32-bit integer drops an element, which happens with probability p."""
    return min(round(p * 2**32), 2**32 - 1)  # p = 1: the largest of 32 bits


def _dropout(w: CallWriter, op: GraphOp) -> list[str]:
    x, mask, scale = op.args
    output = Ref(first_output(op))
    return [w.call(w.kernel("dropout"), output, x, mask, float(scale), math.prod(w.shape(output)))]


def _fill(w: CallWriter, op: GraphOp) -> list[str]:
    output = Ref(first_output(op))
    return [w.call(w.kernel("fill"), output, float(op.args[0]), math.prod(w.shape(output)))]


def _arena_input(w: CallWriter, op: GraphOp) -> list[str]:
    output = Ref(first_output(op))
    element_bytes = 1 if w.value(output).dtype in C_BYTES else WORD
    return [w.call(w.kernel("arena_input"), output, op.args[0], math.prod(w.shape(output)) * element_bytes)]


CALLS: Mapping[str, WriteCalls] = {
    ARENA_INPUT: _arena_input,
    **PRODUCTS,
    conv.GATHER: _convolution,
    conv.SCATTER: _convolution,
    conv.WEIGHT_GRADIENT: _weight_gradient,
    conv.CHANNEL_SUM: _direct("channel_sum", by_channel=True),
    norm.BATCH_STATISTICS: _direct("batch_norm_statistics", outputs=2, by_channel=True),
    norm.BATCH_APPLY: _direct("batch_norm_apply", by_channel=True),
    norm.BATCH_FIXED: _direct("batch_norm_fixed", by_channel=True),
    norm.BATCH_SUMS: _batch_norm_sums,
    norm.BATCH_INPUT: _direct("batch_norm_input_gradient", by_channel=True),
    norm.BATCH_FIXED_INPUT: _direct("batch_norm_fixed_input_gradient", by_channel=True),
    norm.ROW_STATISTICS: _direct("row_norm_statistics", outputs=2),
    norm.ROW_APPLY: _direct("row_norm_apply"),
    norm.ROW_SUMS: _direct("row_norm_sums", outputs=2),
    norm.ROW_INPUT: _direct("row_norm_input_gradient"),
    "aten.max_pool2d_with_indices.default": _max_pool,
    "aten.max_pool2d_with_indices_backward.default": _max_pool_gradient,
    "aten.avg_pool2d.default": _average_pool,
    "aten.avg_pool2d_backward.default": _average_pool,
    "aten._adaptive_avg_pool2d.default": _adaptive_average_pool,
    "aten._adaptive_avg_pool2d_backward.default": _adaptive_average_pool,
    "aten.reflection_pad1d.default": _mirror_pad,
    "aten.reflection_pad1d_backward.default": _mirror_pad,
    "aten.reflection_pad2d.default": _mirror_pad,
    "aten.reflection_pad2d_backward.default": _mirror_pad,
    "aten.replication_pad1d.default": _mirror_pad,
    "aten.replication_pad1d_backward.default": _mirror_pad,
    "aten.replication_pad2d.default": _mirror_pad,
    "aten.replication_pad2d_backward.default": _mirror_pad,
    "aten._log_softmax.default": _softmax("log_softmax"),
    "aten._softmax.default": _softmax("softmax", safe=False),
    "aten._safe_softmax.default": _softmax("softmax", safe=True),
    "aten._log_softmax_backward_data.default": _softmax_gradient("log_softmax_gradient"),
    "aten._softmax_backward_data.default": _softmax_gradient("softmax_gradient"),
    "aten.nll_loss_forward.default": _negative_log_likelihood,
    "aten.nll_loss2d_forward.default": _negative_log_likelihood,
    "aten.nll_loss_backward.default": _negative_log_likelihood_gradient,
    "aten.nll_loss2d_backward.default": _negative_log_likelihood_gradient,
    CROSS_ENTROPY: _negative_log_likelihood_gradient,
    "aten.mse_loss.default": _mean_squares,
    "aten.mse_loss_backward.default": _mean_squares,
    "aten.sum.default": _sum,
    "aten.sum.dim_IntList": _sum,
    "aten.mean.default": _sum,
    "aten.mean.dim": _sum,
    "aten.amax.default": _extreme,
    "aten.amin.default": _extreme,
    "aten.max.dim": _row_extreme,
    "aten.min.dim": _row_extreme,
    "aten.gather.default": _gather,
    "aten.scatter.src": _scatter,
    "aten.scatter.value": _scatter,
    "aten.scatter_add.default": _scatter,
    **{
        f"aten.upsample_{kind}{backward}.default": _resize
        for kind in ("nearest1d", "nearest2d", "linear1d", "bilinear2d")
        for backward in ("", "_backward")
    },
    "aten.cat.default": _cat,
    "aten.select_backward.default": _select_backward,
    "aten.slice_backward.default": _slice_backward,
    "aten.constant_pad_nd.default": _constant_pad,
    "aten.embedding.default": _embedding,
    "aten.embedding_dense_backward.default": _embedding_gradient,
    DRAW_MASK: _mask,
    DROPOUT: _dropout,
    FILL: _fill,
    TO_FLOAT: _to_float,
    "aten.flip.default": _flip,
    INSERT: _insert,
    WRITE: _write_output,
    **RECURRENT,
    NORMALIZE: _normalize,
    **INT8,
}
"""For each op, the function that writes its call."""
