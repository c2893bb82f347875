"""Lower a captured step to calls of C kernels: fold constants, split ops, and remove dead ones."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from memplan.exporting.int8.int8_ops import CONVOLUTIONS, INT8_OPS
from memplan.exporting.kernels.elementwise import ELEMENTWISE, element_call_of
from memplan.exporting.kernels.kernel_calls import CALLS, DROPOUT
from memplan.exporting.lowering import convolution_splitting as conv
from memplan.exporting.lowering import norm_splitting as norm
from memplan.exporting.lowering.arena_input import with_input_in_arena
from memplan.exporting.lowering.byte_inputs import BYTES, normalization, with_direct_reads
from memplan.exporting.lowering.decomposing import decomposed
from memplan.exporting.lowering.device_graph import (
    ALIASES,
    COPY,
    FILL,
    WORD,
    WRITE,
    ZEROS,
    DeviceGraph,
    Lowering,
    first_output,
    refusal,
    rounded_to_words,
)
from memplan.exporting.lowering.inside_bits import InsideBits
from memplan.exporting.lowering.late_ops import with_delayed_ops, with_early_writes
from memplan.exporting.lowering.recurrent_layers import BACKWARD, FORWARD
from memplan.planning.graph.editor import Rebuild
from memplan.planning.graph.joint_graph import GraphOp, JointGraph, Ref, map_refs, refs
from memplan.planning.graph.op_schema import CROSS_ENTROPY, arguments_of, is_contiguous, short
from memplan.planning.levers.encode import Encode
from memplan.planning.levers.lever import Situation
from memplan.planning.levers.registry import with_encodings_of
from memplan.planning.passes.split_convolution_backward import CONVOLUTION_BACKWARD
from memplan.planning.passes.split_dropout import DRAW_MASK, dropout_scale
from memplan.planning.passes.split_dropout import DROPOUT as WHOLE_DROPOUT

LARGEST_WINDOW = 255
"""Most elements of a max pool's window: an index is one byte."""
_DEVICE_TYPES = {"int64": "int32"}
"""Types of inputs on the device, where they are others than in PyTorch."""

MAX_POOL = "aten.max_pool2d_with_indices.default"
Rule = Callable[[Lowering, GraphOp], None]


def lowered(
    graph: JointGraph, constants: Mapping[int, torch.Tensor], trained: Mapping[int, bool],
    returned_values: Sequence[int] = (), arena_input: str = "",
) -> DeviceGraph:  # fmt: skip
    """Lower a captured step.

    Args:
        graph: as captured.
        constants: tensors that the graph holds itself, by value.
        trained: whether each parameter is updated on the device; others lie in flash.
        returned_values: values of the forward pass that are copied to the caller's memory, one after another, as soon
            as they are computed.
        arena_input: position, as a text, of the input that lies in the arena; empty if none does.

    Raises:
        RecordingError: no kernel computes an op, or a dtype is not float32.
    """
    low = Lowering(
        replace(graph, forms=(), values=tuple(v for v in graph.values if v.kind not in ("encoded", "host"))), constants
    )
    _set_resident_bytes(low, trained)
    for op in graph.ops:
        _lower(low, op)
    _write(low, graph, returned_values)
    mutations = [(value, new) for value, new in low.mutations.items() if low.values[value].dtype == "float32"]
    live = without_dead(replace(with_early_writes(low.finished()), mutations=tuple(mutations)))
    live = without_dead(with_direct_reads(live, low))
    _check_dtypes(live, low)
    ordered = with_input_in_arena(with_delayed_ops(live), arena_input)
    read = {v for op in ordered.ops for v in refs((op.args, op.kwargs))} | set(ordered.outputs)
    constant_arrays = {v: t.detach().numpy() for v, t in low.constants.items() if v in read}
    ops = tuple(replace(op, seconds=estimated_seconds(operations_of(ordered, op))) for op in ordered.ops)
    return DeviceGraph(with_bits(replace(ordered, ops=ops)), constant_arrays, low.storage_offsets)


def _write(low: Lowering, graph: JointGraph, written: Sequence[int]) -> None:
    """Add the ops that copy values to the caller's memory, one behind another."""
    template, start = graph.ops[0], 0
    for value in written:
        index = -1 - len(low.ops)  # one that no op has
        op = replace(template, index=index, phase="forward", layer="", where=None, gradient_of=None, call=None)
        low.call(op, WRITE, (low.as_float(op, Ref(value)), start), (), must_run_once=True)
        start += math.prod(low.values[value].shape)


def operations_of(graph: JointGraph, op: GraphOp) -> int:
    """Estimate the loads, stores and multiplications of an op."""
    if op.is_view:
        return 0
    loads_and_stores = sum(graph.values[value].bytes for value in (*op.reads, *op.makes)) // WORD
    elements = math.prod(graph.values[op.makes[0]].shape) if op.makes else 0
    per_element = 0  # multiplications
    if op.target == CONVOLUTIONS:
        return loads_and_stores + sum(stage[-1].multiplications for stage in op.args[1:])
    if op.target in (conv.GATHER, conv.SCATTER):
        per_element = math.prod(graph.values[op.args[1].value].shape[1:])
    elif op.target == conv.WEIGHT_GRADIENT:
        per_element = math.prod(graph.values[op.args[0].value].shape[2:])
    elif op.target in FORWARD or op.target in BACKWARD:
        weight = op.args[1 if op.target in FORWARD else 3]
        per_element = graph.values[weight.value].shape[1]
    elif op.target in ("aten.mm.default", "aten.addmm.default", "aten.bmm.default"):
        per_element = graph.values[op.args[-1].value].shape[-2]
    return loads_and_stores + elements * per_element


def with_bits(graph: JointGraph) -> JointGraph:
    """Offer to save values as bits: those of every plan, such as the signs that a ReLU's gradient reads (`Encode`), and
    those of activations with two bounds (`InsideBits`), for which only the device has kernels."""
    encoded = with_encodings_of(graph, Situation(), [Encode(), InsideBits()])
    # the device has no kernels that decode a whole value
    bits = [form for form in encoded.forms if not form.can_restore_value]
    # The levers' figures are of torch's kernels: those of the device need no workspace, and other seconds.
    no_workspace = {"store_scratch": 0, "fetch_scratch": 0, "direct_reader_scratch": 0}
    forms = (
        replace(form, store_seconds=estimated_seconds(graph.values[form.value].bytes), **no_workspace) for form in bits
    )
    return replace(encoded, forms=tuple(forms))


def estimated_seconds(work: float) -> float:
    """Return the time of so much work: on microcontrollers a multiplication takes about as long as a load."""
    return work * 1e-8


# -- values


def _set_resident_bytes(low: Lowering, trained: Mapping[int, bool]) -> None:
    """Set the bytes of RAM of parameters, buffers, inputs and results. Weights in flash take none.

    ``trained``: by parameter, whether it is trained, and so in RAM.
    """
    changed = {target for target, _ in low.graph.mutations}
    for value in low.graph.values:
        size = rounded_to_words(math.prod(value.shape) * WORD)
        if value.kind == "parameter":
            low.change(value.id, bytes=size if trained.get(value.id) else 0)
        elif value.kind == "buffer":
            low.change(value.id, bytes=size if value.id in changed and value.dtype == "float32" else 0)
        elif value.kind == "input":
            size = rounded_to_words(math.prod(value.shape)) if value.dtype in BYTES else size
            low.change(value.id, bytes=size, dtype=_DEVICE_TYPES.get(value.dtype, value.dtype))
        elif value.kind == "tangent":  # the gradient of the loss, which backward() sets to 1
            low.make_constant(value.id, torch.ones(value.shape))
            low.change(value.id, kind="tangent")
        elif value.kind == "result" and not value.is_view:
            low.change(value.id, bytes=rounded_to_words(value.contiguous_bytes))


def _check_dtypes(graph: JointGraph, low: Lowering) -> None:
    """Raise RecordingError where an op reads or computes another dtype than float32, indices and masks."""
    for op in graph.ops:
        for number in (*op.outputs, *refs((op.args, op.kwargs))):
            if number is None or number in low.constants:
                continue
            dtype = graph.values[number].dtype
            if dtype not in ("float32", "int32", "bool", *BYTES):
                raise refusal(op, f" in {dtype}", near="the same in float32")
            is_computable = dtype in ("float32", "bool", "uint8") or op.is_view or op.target in INT8_OPS
            if number in op.outputs and not is_computable:
                raise refusal(op, f" that makes {dtype}", near="indices that are inputs")


def without_dead(graph: JointGraph) -> JointGraph:
    """Remove ops whose results nothing reads, and outputs that nothing reads."""
    needed = {*graph.outputs, *(gradient for _, gradient in graph.gradients), *(new for _, new in graph.mutations)}
    live = list[GraphOp]()
    for op in reversed(graph.ops):
        if op.must_run_once or any(value in needed for value in op.outputs if value is not None):
            needed |= set(refs((op.args, op.kwargs)))
            live.append(op)
    rebuild, live_indices = Rebuild(graph), {op.index for op in live}
    for op in reversed(live):
        writes_all = not op.returns_tuple or op.must_run_once or op.target in _ALL_RESULTS
        outputs = tuple(value if writes_all or value in needed else None for value in op.outputs)
        makes = tuple(value for value in op.makes if value in outputs)
        # a forward op that became several can have lost the part that the gradient names
        forward_op = op.gradient_of if op.gradient_of in live_indices else None
        rebuild.add(replace(op, gradient_of=forward_op), outputs=outputs, makes=makes)
    return rebuild.finished()


_ALL_RESULTS = (norm.BATCH_SUMS, norm.BATCH_STATISTICS, norm.ROW_SUMS, norm.ROW_STATISTICS, CONVOLUTIONS, *FORWARD,
                *BACKWARD)  # fmt: skip
"""Ops whose kernels write all of their results, whether they are read or not."""


# -- ops


def _lower(low: Lowering, op: GraphOp) -> None:
    """Add what computes an op on the device: constants, a view, the calls of its rule, or the call of its own
    kernel."""
    if op.target in ZEROS:
        value = 1.0 if "ones" in op.target else float(op.args[-1]) if "full" in op.target else 0.0
        low.call(op, FILL, (value,), (first_output(op),))
    elif low.folded(op) or normalization(low, op):  # which have added what is needed
        pass
    elif op.is_view or op.target in ALIASES:
        low.view(op)
    elif _counts_batches(low, op):
        del low.mutations[next(buffer for buffer, new in low.mutations.items() if new == op.outputs[0])]
    elif op.target in _REDUCED and arguments_of(op.target, op.args, op.kwargs).get("reduction") == 0:
        if not decomposed(low, op, _lower, _has_kernel):
            raise refusal(op, " without a reduction", near="reduction='mean'")
    elif op.target in RULES:
        RULES[op.target](low, op)
    elif op.target in ELEMENTWISE:
        _elementwise(low, op)
    elif op.target in CALLS:
        _same_op(low, op)
    elif not decomposed(low, op, _lower, _has_kernel):
        known = [*map(short, ELEMENTWISE), *map(short, CALLS), *map(short, RULES)]
        near = difflib.get_close_matches(short(op.target), known, 3)
        raise refusal(op, "", ", ".join(dict.fromkeys(near)))


_REDUCED = ("aten.mse_loss.default", "aten.mse_loss_backward.default")
"""Losses whose kernels compute a mean or a sum; without a reduction they are elementwise ops."""


def _has_kernel(target: str) -> bool:
    return target in RULES or target in ELEMENTWISE or target in CALLS or target in ZEROS


def _counts_batches(low: Lowering, op: GraphOp) -> bool:
    """Return whether an op updates a batch norm's `num_batches_tracked`, which nothing on the device reads."""
    output = op.outputs[0] if op.outputs else None
    return (
        op.target == "aten.add.Tensor"
        and output is not None
        and output in low.mutations.values()
        and low.graph.values[output].dtype == "int64"
    )


def _same_op(low: Lowering, op: GraphOp) -> None:
    """Add an op that has a kernel, after copies of arguments that the kernel needs contiguous."""
    args = tuple(
        low.as_contiguous(op, arg) if isinstance(arg, Ref) and op.target not in _STRIDED else arg for arg in op.args
    )
    if op.target in _COUNTING:
        args = (low.as_float(op, args[0]), *args[1:])
        for output in op.outputs:
            if output is not None:
                low.set_float32(output)
    overwrites: tuple[int, ...] = ()
    if op.outputs and op.outputs[0] is not None:
        output = op.outputs[0]
        overwrites = low.overwritable_storages(
            output, *(args[position] for position in _OVERWRITABLE.get(op.target, ()))
        )
        low.change(output, stride=conv.contiguous_strides(low.values[output].shape))
    low.call(
        op,
        op.target,
        args,
        op.outputs,
        kwargs=op.kwargs,
        overwrites=overwrites,
        random=op.random,
        must_run_once=op.must_run_once,
    )


_STRIDED = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.sum.dim_IntList", "aten.mean.dim",
            "aten.sum.default", "aten.mean.default", "aten.amax.default", "aten.amin.default", "aten.flip.default",
            "aten.select_backward.default", "aten.slice_backward.default",
            "aten.constant_pad_nd.default")  # fmt: skip
"""Ops whose kernels take any strides."""
_COUNTING = ("aten.sum.dim_IntList", "aten.sum.default", "aten.constant_pad_nd.default")
"""Ops whose kernels take flags and integers, too, which are floats on the device."""
_OVERWRITABLE = {
    "aten._log_softmax.default": (0,),
    "aten._softmax.default": (0,),
    "aten._safe_softmax.default": (0,),
    "aten._log_softmax_backward_data.default": (0,),
    "aten._softmax_backward_data.default": (0,),
    "aten.mse_loss_backward.default": (1,),
    "aten.scatter.src": (0,),
    "aten.scatter.value": (0,),
    "aten.scatter_add.default": (0,),
    CROSS_ENTROPY: (1,),
}
"""By op: positions of the arguments that the kernel can overwrite with its result."""


def _elementwise(low: Lowering, op: GraphOp) -> None:
    """Add an elementwise op, whose result may overwrite an operand of the same layout."""
    function, output = element_call_of(op.target, op.args, op.kwargs), first_output(op)
    if function is None:
        raise refusal(op, " with these arguments")
    if any(low.values[v].dtype != "float32" for v in refs((op.args, op.kwargs))):
        converted = {v: low.as_float(op, Ref(v)) for v in set(refs((op.args, op.kwargs)))}
        op = replace(op, args=map_refs(op.args, converted.__getitem__))
        function = element_call_of(op.target, op.args, op.kwargs)
        assert function is not None, "its operands alone have changed"
    low.set_float32(output)
    if op.target == COPY and op.kwargs.get("memory_format") in (None, torch.contiguous_format):
        low.change(output, stride=conv.contiguous_strides(low.values[output].shape))
    _, operands, _ = function
    overwrites = low.overwritable_storages(output, *operands)
    low.call(op, op.target, op.args, (output,), kwargs=op.kwargs, overwrites=overwrites, must_run_once=op.must_run_once)


def _mul(low: Lowering, op: GraphOp) -> None:
    """Lower a product elementwise, or to the masked kernel where it applies the mask of a dropout, which is bits."""
    x, mask = op.args
    if not isinstance(mask, Ref) or low.values[mask.value].dtype != "bool":
        _elementwise(low, op)
        return
    _masked(low, op, (x, mask, 1.0))


def _masked(low: Lowering, op: GraphOp, args: tuple[Ref, Ref, float]) -> None:
    """Add the kernel that applies the mask of a dropout."""
    output, x = low.set_contiguous(first_output(op)), low.as_contiguous(op, args[0])
    low.call(op, DROPOUT, (x, *args[1:]), (output,), overwrites=low.overwritable_storages(output, x))


def _mask(low: Lowering, op: GraphOp) -> None:
    """Add the kernel that draws the mask of a dropout: a bit for each element."""
    mask = first_output(op)
    low.change(mask, bytes=_mask_bytes(low.values[mask].shape))
    low.call(op, DRAW_MASK, op.args, (mask,), random=True)


def _mask_bytes(shape: Sequence[int]) -> int:
    """Return the bytes of a bit for each element, in whole words."""
    return rounded_to_words(-(-math.prod(shape) // 8))


def _dropout(low: Lowering, op: GraphOp) -> None:
    """Split a dropout whose mask no gradient reads, because all below it is frozen, into mask and product."""
    x, p, training = op.args
    output = first_output(op)
    value = low.values[output]
    if training is False:
        low.alias(op, output, x)
        return
    mask = low.buffer(f"{value.name}_mask", value, value.shape, "bool", _mask_bytes(value.shape))
    low.call(op, DRAW_MASK, (x, p), (mask,), random=True)
    _masked(low, op, (x, Ref(mask), dropout_scale(p, value)))


def _max_pool(low: Lowering, op: GraphOp) -> None:
    """Add a max pool, with indices of one byte."""
    x, kernel = op.args[0], op.args[1]
    height_and_width = kernel if len(kernel) > 1 else kernel * 2
    if math.prod(height_and_width) > LARGEST_WINDOW:
        raise refusal(
            op,
            f" over a window of {'x'.join(map(str, kernel))}",
            near=f"windows of at most {LARGEST_WINDOW} places",
            do="Use smaller max pools, one behind another",
        )
    indices = op.outputs[1]
    if indices is not None:
        low.change(indices, dtype="uint8", bytes=rounded_to_words(math.prod(low.values[indices].shape)))
    low.set_contiguous(first_output(op))
    low.call(op, op.target, (low.as_contiguous(op, x), *op.args[1:]), op.outputs)


def _adaptive_max_pool(low: Lowering, op: GraphOp) -> None:
    """Lower an adaptive max pool whose windows are all of one size to a max pool."""
    x, kernel = op.args[0], _equal_windows(low, op, low.shape(op.args[0]), op.args[1])
    _max_pool(low, replace(op, target=MAX_POOL, args=(x, kernel, kernel)))


def _adaptive_max_pool_gradient(low: Lowering, op: GraphOp) -> None:
    """Lower the gradient of an adaptive max pool to that of a max pool."""
    g, x, indices = op.args
    kernel = _equal_windows(low, op, low.shape(x), low.shape(g)[-2:])
    args = (g, x, kernel, kernel, [0, 0], [1, 1], False, indices)
    _max_pool_gradient(low, replace(op, target="aten.max_pool2d_with_indices_backward.default", args=args))


def _equal_windows(low: Lowering, op: GraphOp, large: Sequence[int], small: Sequence[int]) -> list[int]:
    """Return height and width of the windows. Raises RecordingError if they are of several sizes.

    `large` is the shape of the pool's operand, `small` height and width of its result.
    """
    sizes = list(zip(large[-2:], small, strict=True))
    if any(plane % count for plane, count in sizes):
        raise refusal(
            op,
            f" from {large[-2]}x{large[-1]} to {small[0]}x{small[1]}",
            near="sizes that divide the plane",
            do="Choose such a size",
        )
    return [plane // count for plane, count in sizes]


def _max_pool_gradient(low: Lowering, op: GraphOp) -> None:
    """Add the gradient of a max pool without the pool's input: the kernel reads the indices alone."""
    g, _pool_input, *others = op.args
    args = (low.as_contiguous(op, g), None, *others)
    low.set_contiguous(first_output(op))
    low.call(op, op.target, args, op.outputs)


def _mean(low: Lowering, op: GraphOp) -> None:
    """Lower a mean over whole planes to a pool, which can be computed for a few channels at a time."""
    x, output = op.args[0], first_output(op)
    shape = low.shape(x)
    dims = sorted(dim % len(shape) for dim in op.args[1]) if len(op.args) > 1 and op.args[1] else []
    if len(shape) != 4 or dims != [2, 3] or not is_contiguous(low.values[x.value]):
        _same_op(low, op)
        return
    pool = replace(op, target="aten._adaptive_avg_pool2d.default", args=(x, [1, 1]), kwargs={})
    if len(low.values[output].shape) == 4:
        _same_op(low, pool)
        return
    pooled = low.buffer(low.values[output].name, low.values[output], (*shape[:2], 1, 1))
    _same_op(low, replace(pool, outputs=(pooled,), makes=(pooled,)))
    low.view(replace(op, target="aten.view.default", args=(Ref(pooled), list(shape[:2])), kwargs={}, makes=()))


def _div(low: Lowering, op: GraphOp) -> None:
    """Lower a quotient elementwise; where it is the gradient of a mean over whole planes, to that of a pool."""
    x, divisor = op.args[:2]
    dividend: int = x.value
    maker = next((other for other in reversed(low.ops) if dividend in other.outputs), None)
    if maker is None or maker.target != "aten.expand.default":
        _elementwise(low, op)
        return
    source = maker.args[0]
    assert isinstance(source, Ref), "the tensor that is expanded"
    # torch's gradient of a mean: the result's gradient, expanded, over the number of elements
    mean_gradient, shape = low.values[source.value], low.values[dividend].shape
    of_planes = len(shape) == 4 and mean_gradient.shape == (*shape[:2], 1, 1) and divisor == shape[2] * shape[3]
    if not of_planes or not is_contiguous(mean_gradient):
        _elementwise(low, op)
        return
    pool = "aten._adaptive_avg_pool2d_backward.default"
    _shape_only(low, replace(op, target=pool, args=(Ref(mean_gradient.id), x), kwargs={}))


def _shape_only(low: Lowering, op: GraphOp) -> None:
    """Drop the operand of a backward op of which it reads the shape alone, which is that of the result."""
    g, _operand, *others = op.args
    args, output = (low.as_contiguous(op, g), None, *others), first_output(op)
    low.change(output, stride=conv.contiguous_strides(low.values[output].shape))
    low.call(op, op.target, args, (output,), kwargs=op.kwargs)


def _hardtanh_backward(low: Lowering, op: GraphOp) -> None:
    """Read the forward's result instead of its operand: both lie within the limits at once, and the result is saved."""
    g, x, *bounds = op.args
    for other in low.ops:
        if other.target == "aten.hardtanh.default" and other.args == (x, *bounds):
            op = replace(op, args=(g, Ref(first_output(other)), *bounds))
            break
    _elementwise(low, op)


def _cast(low: Lowering, op: GraphOp) -> None:
    """Lower a cast to a copy, to flags or to whole numbers, all of them floats on the device. Raises RecordingError for
    other dtypes."""
    output = first_output(op)
    from_dtype, to_dtype = low.torch_dtypes[op.args[0].value], low.torch_dtypes[output]
    if from_dtype != to_dtype and not {from_dtype, to_dtype} <= {"float32", "bool", "int64", "int32"}:
        raise refusal(op, f" from {from_dtype} to {to_dtype}", near="float32 throughout")
    target = COPY
    if from_dtype != to_dtype and to_dtype == "bool":
        target = "memplan.is_not_zero.default"
    elif from_dtype == "float32" and to_dtype.startswith("int"):
        target = "aten.trunc.default"
    x = low.as_float(op, op.args[0])
    low.set_float32(output)
    low.call(op, target, (x,), (output,), overwrites=low.overwritable_storages(output, x))


def _bitwise(low: Lowering, op: GraphOp) -> None:
    """Lower a bitwise op of flags to the logical one. Raises RecordingError for integers."""
    if any(low.torch_dtypes[value] != "bool" for value in refs(op.args)):
        raise refusal(op, " of integers", near="the same of flags", do="Compare first: (x > 0) & (y > 0)")
    name = short(op.target).removeprefix("bitwise_").strip("_")
    _elementwise(low, replace(op, target=f"aten.logical_{name}.default"))


def _recurrent(low: Lowering, op: GraphOp) -> None:
    """Add a recurrent layer, or its gradient, whose first result can overwrite the gates. Its kernel writes all
    results."""
    args = tuple(low.as_contiguous(op, arg) if isinstance(arg, Ref) else arg for arg in op.args)
    gates = low.values[args[0].value]
    if op.target in FORWARD:  # gates, states with the first, and an LSTM's cells likewise or a GRU's part of a gate
        steps, state = gates.shape[0], low.shape(args[4])
        third_rows = steps + 1 if FORWARD[op.target] == "lstm" else steps
        shapes = [gates.shape, (steps + 1, *state), (third_rows, *state)]
    else:  # gradients of gates, first state, and first cells or the part of a gate
        steps, *state = low.shape(args[4])
        shapes = [gates.shape, tuple(state), tuple(state) if BACKWARD[op.target] == "lstm" else (steps, *state)]
    outputs = [
        low.buffer(gates.name, gates, shape) if output is None else output
        for output, shape in zip(op.outputs, shapes, strict=False)  # an RNN has two results
    ]
    low.call(op, op.target, args, outputs, overwrites=low.overwritable_storages(outputs[0], args[0]))


def _row_extreme(low: Lowering, op: GraphOp) -> None:
    """Add the largest elements along a dimension; their indices are floats, as all computed integers are."""
    for number in op.outputs:
        if number is not None:
            low.set_float32(low.set_contiguous(number))
    low.call(op, op.target, (low.as_contiguous(op, op.args[0]), *op.args[1:]), op.outputs)


def _integer_op(low: Lowering, op: GraphOp) -> None:
    """Add an op of the frozen part in eight bits as it is."""
    low.call(op, op.target, op.args, op.outputs, overwrites=op.overwrites)


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(INT8_OPS, _integer_op),
    "aten.bitwise_and.Tensor": _bitwise,
    "aten.bitwise_or.Tensor": _bitwise,
    "aten.bitwise_not.default": _bitwise,
    **dict.fromkeys((*FORWARD, *BACKWARD), _recurrent),
    "aten.max.dim": _row_extreme,
    "aten.min.dim": _row_extreme,
    "aten.convolution.default": conv.convolution,
    CONVOLUTION_BACKWARD: conv.convolution_backward,
    "aten._native_batch_norm_legit_functional.default": norm.batch_norm,
    "aten._native_batch_norm_legit.no_stats": norm.batch_norm,
    "aten._native_batch_norm_legit_no_training.default": norm.fixed_batch_norm,
    "aten.native_batch_norm.default": norm.batch_norm,
    "aten.native_batch_norm_backward.default": norm.batch_norm_backward,
    "aten.native_layer_norm.default": norm.layer_norm,
    "aten.native_layer_norm_backward.default": norm.layer_norm_backward,
    "aten.native_group_norm.default": norm.group_norm,
    "aten.native_group_norm_backward.default": norm.group_norm_backward,
    "aten.mul.Tensor": _mul,
    "aten.mean.dim": _mean,
    "aten.div.Scalar": _div,
    "aten.native_dropout_backward.default": lambda low, op: _masked(low, op, op.args),
    DRAW_MASK: _mask,
    WHOLE_DROPOUT: _dropout,
    MAX_POOL: _max_pool,
    "aten.adaptive_max_pool2d.default": _adaptive_max_pool,
    "aten.adaptive_max_pool2d_backward.default": _adaptive_max_pool_gradient,
    "aten.max_pool2d_with_indices_backward.default": _max_pool_gradient,
    "aten.hardtanh_backward.default": _hardtanh_backward,
    "aten.avg_pool2d_backward.default": _shape_only,
    "aten._adaptive_avg_pool2d_backward.default": _shape_only,
    "aten.reflection_pad1d_backward.default": _shape_only,
    "aten.reflection_pad2d_backward.default": _shape_only,
    "aten.replication_pad1d_backward.default": _shape_only,
    "aten.replication_pad2d_backward.default": _shape_only,
    "aten._to_copy.default": _cast,
}
"""By op: the rule that replaces it by calls of other kernels, or with other arguments."""
