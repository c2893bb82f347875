"""JointGraph -> DeviceGraph: what is known is computed, what is split is split, what nobody reads is left out."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from memplan.exporting.kernels.elementwise import ELEMENTWISE, form_of
from memplan.exporting.kernels.kernel_calls import CALLS, DROPOUT
from memplan.exporting.lowering import convolution_splitting as conv
from memplan.exporting.lowering import norm_splitting as norm
from memplan.exporting.lowering.device_graph import COPY, FILL, ZEROS, DeviceGraph, Lowering, refusal, words
from memplan.exporting.lowering.late_ops import made_late
from memplan.planning.graph.editor import Rebuild
from memplan.planning.graph.joint_graph import GraphOp, JointGraph, Ref, refs
from memplan.planning.graph.op_schema import CROSS_ENTROPY, arguments_of, short
from memplan.planning.levers.encode import Encode
from memplan.planning.levers.lever import Situation
from memplan.planning.levers.registry import offered
from memplan.planning.passes.split_convolution_backward import CONVOLUTION_BACKWARD
from memplan.planning.passes.split_dropout import DROPOUT as WHOLE_DROPOUT
from memplan.planning.passes.split_dropout import MASK, scale_of

WINDOW = 255
"""Largest number of places in a pool's window: an index is one byte."""
_NARROW = {"int64": "int32", "int32": "int32", "float32": "float32"}

Rule = Callable[[Lowering, GraphOp], None]


def lowered(graph: JointGraph, constants: Mapping[int, torch.Tensor], trained: Mapping[int, bool]) -> DeviceGraph:
    """Lower a captured step.

    Args:
        graph: as captured.
        constants: tensors that it holds itself, by value.
        trained: whether each parameter changes on the device: others lie in flash.

    Raises:
        RecordingError: it has an op that no kernel computes, or a dtype other than float32.
    """
    low = Lowering(
        replace(graph, forms=(), values=tuple(v for v in graph.values if v.kind not in ("encoded", "host"))), constants
    )
    _resident(low, trained)
    for op in graph.ops:
        _lower(low, op)
    outputs = tuple(_dense_output(low, graph, value) for value in graph.outputs)
    changed = {target: source for target, source in low.mutations.items() if low.values[target].dtype == "float32"}
    made = replace(low.finished(), outputs=outputs, mutations=tuple(changed.items()))
    made = made_late(_with_dtypes(without_dead(made), low))
    constants_read = {v for op in made.ops for v in refs((op.args, op.kwargs))} | set(made.outputs)
    known = {v: t.detach().numpy() for v, t in low.known.items() if v in constants_read}
    made = replace(made, ops=tuple(replace(op, seconds=seconds(work(made, op))) for op in made.ops))
    return DeviceGraph(with_bits(made), known, low.offsets)


def _dense_output(low: Lowering, graph: JointGraph, value: int) -> int:
    """Return an output; a copy of it where its elements do not follow one another."""
    last = next((op for op in reversed(graph.ops) if op.phase == "forward"), graph.ops[-1])
    return low.dense(replace(last, index=-1, layer="", where=None), Ref(value)).value


def work(graph: JointGraph, op: GraphOp) -> int:
    """Return the loads, stores and products of an op, roughly."""
    if op.is_view:
        return 0
    moved = sum(graph.values[value].bytes for value in (*op.reads, *op.makes)) // 4
    made = math.prod(graph.values[op.makes[0]].shape) if op.makes else 0
    if op.target in (conv.GATHER, conv.SCATTER):
        return moved + made * math.prod(graph.values[op.args[1].value].shape[1:])
    if op.target == conv.WEIGHT_GRADIENT:
        return moved + made * math.prod(graph.values[op.args[0].value].shape[2:])
    if op.target in ("aten.mm.default", "aten.addmm.default", "aten.bmm.default"):
        return moved + made * graph.values[op.args[-1].value].shape[-2]
    return moved


def with_bits(graph: JointGraph) -> JointGraph:
    """Offer the forms of values in fewer bits; their kernels hold nothing beside."""
    made = offered(graph, Situation(), [Encode()])
    forms = (replace(f, store_scratch=0, fetch_scratch=0, direct_scratch=0) for f in made.forms if not f.whole)
    return replace(made, forms=tuple(replace(f, store_seconds=seconds(graph.values[f.value].bytes)) for f in forms))


def seconds(work: float) -> float:
    """Return a measure of time: microcontrollers take about as long for a product as for a load."""
    return work * 1e-8


# -- values


def _resident(low: Lowering, trained: Mapping[int, bool]) -> None:
    """Set what each value that is handed in takes of the device's memory."""
    changed = {target for target, _ in low.graph.mutations}
    for value in low.graph.values:
        size = words(math.prod(value.shape) * 4)
        if value.kind == "parameter":
            low.change(value.id, bytes=size if trained.get(value.id) else 0)
        elif value.kind == "buffer":
            low.change(value.id, bytes=size if value.id in changed and value.dtype == "float32" else 0)
        elif value.kind == "input":
            low.change(value.id, bytes=size, dtype=_NARROW.get(value.dtype, value.dtype))
        elif value.kind == "tangent":
            low.know(value.id, torch.ones(value.shape))
            low.change(value.id, kind="tangent")
        elif value.kind == "result" and not value.is_view:
            low.change(value.id, bytes=words(value.own_bytes))


def _with_dtypes(graph: JointGraph, low: Lowering) -> JointGraph:
    """Refuse what is computed in another dtype than float32."""
    for op in graph.ops:
        for number in (*op.outputs, *refs((op.args, op.kwargs))):
            if number is None or number in low.known:
                continue
            found = graph.values[number].dtype
            if found not in ("float32", "int32", "bool", "uint8"):
                raise refusal(op, f" in {found}", near="the same in float32")
            if number in op.outputs and found not in ("float32", "bool", "uint8") and not op.is_view:
                raise refusal(op, f" that makes {found}", near="indices that are inputs")
    return graph


def without_dead(graph: JointGraph) -> JointGraph:
    """Leave out ops whose results nobody reads."""
    needed = {*graph.outputs, *(gradient for _, gradient in graph.gradients), *(s for _, s in graph.mutations)}
    kept = list[GraphOp]()
    for op in reversed(graph.ops):
        if op.once or any(one in needed for one in op.outputs if one is not None):
            needed |= set(refs((op.args, op.kwargs)))
            kept.append(op)
    rebuild = Rebuild(graph)
    for op in reversed(kept):
        outputs = tuple(one if one in needed or op.multiple is False or op.once else None for one in op.outputs)
        outputs = op.outputs if op.target in _ALL_RESULTS else outputs
        makes = tuple(one for one in op.makes if one in outputs)
        rebuild.add(op, outputs=outputs, makes=makes)
    return rebuild.finished()


_ALL_RESULTS = (norm.BATCH_SUMS, norm.BATCH_STATISTICS, norm.ROW_SUMS, norm.ROW_STATISTICS)
"""Ops whose kernels write all of their results, whoever reads them."""


# -- ops


def _lower(low: Lowering, op: GraphOp) -> None:
    if op.target in ZEROS:
        _filled(low, op)
    elif low.folded(op):
        pass
    elif op.is_view:
        low.view(op)
    elif _counts_batches(low, op):
        del low.mutations[next(target for target, source in low.mutations.items() if source == op.outputs[0])]
    elif op.target in RULES:
        RULES[op.target](low, op)
    elif op.target in ELEMENTWISE:
        _elementwise(low, op)
    elif op.target in CALLS:
        _as_it_is(low, op)
    else:
        known = [*map(short, ELEMENTWISE), *map(short, CALLS), *map(short, RULES)]
        near = difflib.get_close_matches(short(op.target), known, 3)
        raise refusal(op, "", ", ".join(dict.fromkeys(near)))


def _counts_batches(low: Lowering, op: GraphOp) -> bool:
    """Return whether an op counts a batch norm's batches: nothing on the device reads that."""
    made = op.outputs[0] if op.outputs else None
    return (
        op.target == "aten.add.Tensor"
        and made in low.mutations.values()
        and low.graph.values[made or 0].dtype == "int64"
    )


def _filled(low: Lowering, op: GraphOp) -> None:
    made = op.outputs[0]
    assert made is not None, "somebody reads it"
    found = low.values[made]
    value = 1.0 if "ones" in op.target else float(op.args[-1]) if "full" in op.target else 0.0
    low.call(op, FILL, (value,), (made,))
    low.change(made, dtype=found.dtype)


def _as_it_is(low: Lowering, op: GraphOp) -> None:
    """Add an op whose kernel takes its arguments as they are, but contiguous."""
    args = tuple(low.dense(op, one) if isinstance(one, Ref) and op.target not in _STRIDED else one for one in op.args)
    first = next((one for one in op.outputs if one is not None), None)
    over: tuple[int, ...] = ()
    if first is not None and first == op.outputs[0]:
        taken = {name: args[at] for at, name in _OVER.get(op.target, {}).items()}
        over = low.over(first, *taken.values())
        low.change(first, stride=conv.contiguous(low.values[first].shape))
    low.call(op, op.target, args, op.outputs, kwargs=op.kwargs, overwrites=over, random=op.random)


_STRIDED = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.sum.dim_IntList", "aten.mean.dim",
            "aten.sum.default", "aten.mean.default", "aten.select_backward.default", "aten.slice_backward.default",
            "aten.constant_pad_nd.default")  # fmt: skip
"""Ops whose kernels take any strides."""
_OVER = {
    "aten._log_softmax.default": {0: "self"},
    "aten._softmax.default": {0: "self"},
    "aten._safe_softmax.default": {0: "self"},
    "aten._log_softmax_backward_data.default": {0: "grad_output"},
    "aten._softmax_backward_data.default": {0: "grad_output"},
    "aten.mse_loss_backward.default": {1: "self"},
    CROSS_ENTROPY: {1: "log_probs"},
}
"""By op and place of an argument: operands that the kernel can write over."""


def _elementwise(low: Lowering, op: GraphOp) -> None:
    found = form_of(op.target, op.args, op.kwargs)
    made = op.outputs[0]
    assert made is not None, "somebody reads it"
    if found is None:
        raise refusal(op, " with these arguments")
    if op.target == COPY and op.kwargs.get("memory_format") in (None, torch.contiguous_format):
        low.change(made, stride=conv.contiguous(low.values[made].shape))
    low.call(op, op.target, op.args, (made,), kwargs=op.kwargs, overwrites=low.over(made, *found[1]), once=op.once)


def _mul(low: Lowering, op: GraphOp) -> None:
    """Multiply; by a dropout's mask, which is bits."""
    x, mask = op.args
    if not isinstance(mask, Ref) or low.values[mask.value].dtype != "bool":
        _elementwise(low, op)
        return
    _masked(low, op, (x, mask, 1.0))


def _masked(low: Lowering, op: GraphOp, args: tuple[Ref, Ref, float]) -> None:
    made, x = op.outputs[0], low.dense(op, args[0])
    assert made is not None, "somebody reads it"
    low.call(op, DROPOUT, (x, *args[1:]), (made,), overwrites=low.over(made, x))


def _mask(low: Lowering, op: GraphOp) -> None:
    (mask,) = op.outputs
    assert mask is not None, "somebody reads it"
    low.change(mask, bytes=words(-(-math.prod(low.values[mask].shape) // 8)))
    low.call(op, MASK, op.args, (mask,), random=True)


def _dropout(low: Lowering, op: GraphOp) -> None:
    """Split a dropout whose mask no derivative reads: what is below it is frozen."""
    (x, p), made = op.args[:2], op.outputs[0]
    assert made is not None, "somebody reads it"
    value = low.values[made]
    if op.args[2] is False:
        low.alias(op, made, x)
        return
    mask = low.buffer(f"{value.name}_mask", value, value.shape, "bool", words(-(-math.prod(value.shape) // 8)))
    low.call(op, MASK, (x, p), (mask,), random=True)
    _masked(low, op, (x, Ref(mask), scale_of(p, value)))


def _max_pool(low: Lowering, op: GraphOp) -> None:
    x, kernel = op.args[0], op.args[1]
    if math.prod(kernel if len(kernel) > 1 else kernel * 2) > WINDOW:
        raise refusal(op, f" over a window of {'x'.join(map(str, kernel))}", near=f"windows of at most {WINDOW} places")
    places = op.outputs[1]
    if places is not None:
        size = words(math.prod(low.values[places].shape))
        low.change(places, dtype="uint8", bytes=size)
    low.call(op, op.target, (low.dense(op, x), *op.args[1:]), op.outputs)


def _max_pool_gradient(low: Lowering, op: GraphOp) -> None:
    args = (low.dense(op, op.args[0]), None, *op.args[2:])
    low.call(op, op.target, args, op.outputs)


def _shape_only(low: Lowering, op: GraphOp) -> None:
    """Add a derivative that reads of one operand nothing but its shape, which is that of the result."""
    args = (low.dense(op, op.args[0]), None, *op.args[2:])
    made = op.outputs[0]
    assert made is not None, "somebody reads it"
    low.change(made, stride=conv.contiguous(low.values[made].shape))
    low.call(op, op.target, args, (made,), kwargs=op.kwargs)


def _hardtanh_backward(low: Lowering, op: GraphOp) -> None:
    """Compare the result instead of the operand: it is within the limits where the operand is, and kept anyway."""
    x = op.args[1]
    limits = arguments_of(op.target, op.args, op.kwargs)
    for other in low.ops:
        if (
            other.target == "aten.hardtanh.default"
            and other.args[0] == x
            and tuple(other.args[1:]) == tuple(op.args[2:])
        ):
            assert other.outputs[0] is not None, "somebody reads it"
            op = replace(op, args=(op.args[0], Ref(other.outputs[0]), *op.args[2:]))
            break
    assert limits, "the limits are arguments"
    _elementwise(low, op)


def _copied(low: Lowering, op: GraphOp) -> None:
    """Lower a cast that casts to what its operand is."""
    x, made = op.args[0], op.outputs[0]
    assert made is not None, "somebody reads it"
    if low.values[x.value].dtype != low.values[made].dtype:
        raise refusal(op, f" from {low.values[x.value].dtype} to {low.values[made].dtype}", near="float32 throughout")
    low.call(op, COPY, (x,), (made,), overwrites=low.over(made, x))


RULES: Mapping[str, Rule] = {
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
    "aten.native_dropout_backward.default": lambda low, op: _masked(low, op, op.args),
    MASK: _mask,
    WHOLE_DROPOUT: _dropout,
    "aten.max_pool2d_with_indices.default": _max_pool,
    "aten.max_pool2d_with_indices_backward.default": _max_pool_gradient,
    "aten.hardtanh_backward.default": _hardtanh_backward,
    "aten.avg_pool2d_backward.default": _shape_only,
    "aten._adaptive_avg_pool2d_backward.default": _shape_only,
    "aten.reflection_pad1d_backward.default": _shape_only,
    "aten.reflection_pad2d_backward.default": _shape_only,
    "aten.replication_pad1d_backward.default": _shape_only,
    "aten.replication_pad2d_backward.default": _shape_only,
    "aten._to_copy.default": _copied,
}
"""What becomes of ops that are no call of a kernel as they are."""
