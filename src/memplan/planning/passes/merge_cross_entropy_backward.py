"""Fuse the derivative of cross-entropy into a single op, without a buffer for the gradient of the log-probabilities.

torch computes it by two ops: the derivative of nll_loss, as large as the log-probabilities and zero except at the
target class, and the derivative of log_softmax. Samples are independent, so the fused op computes both for some
samples at a time, and can overwrite the log-probabilities if no later op reads them. The bits are the same.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from memplan.planning.graph.joint_graph import GraphOp, JointGraph, Value
from memplan.planning.graph.op_schema import CROSS_ENTROPY, arguments_of, is_contiguous
from memplan.planning.levers.in_place import SMALLEST_PIECEWISE_BYTES
from memplan.planning.passes.copies_and_views import with_views

_LOSSES = ("aten.nll_loss_backward.default", "aten.nll_loss2d_backward.default")
_SOFTMAX = "aten._log_softmax_backward_data.default"
_SAME_ORDER = (
    "aten.view.default", "aten._unsafe_view.default", "aten.detach.default", "aten.alias.default", "aten.squeeze.dim",
    "aten.unsqueeze.default",
)  # fmt: skip
"""Views with all elements of their source in the same order, if it is contiguous."""


def fused(graph: JointGraph) -> JointGraph:
    """Replace the derivatives of nll_loss and log_softmax by a single op.

    It replaces nll_loss's derivative; log_softmax's derivative becomes a view of its result. Small losses, which do not
    run in place, and losses whose gradient another op reads are unchanged.
    """
    read_by_caller = {graph.base(value) for value in graph.outputs}
    read_by_caller |= {graph.base(value) for _, value in (*graph.gradients, *graph.mutations)}
    ops, owner_of = list(graph.ops), dict[int, int]()
    for loss in graph.backward_ops:
        if loss.target not in _LOSSES or loss.makes != loss.outputs or loss.makes[0] in read_by_caller:
            continue
        readers = [op for op in graph.ops if loss.makes[0] in op.reads and not op.is_view]
        softmax = readers[0] if len(readers) == 1 and readers[0].target == _SOFTMAX else None
        if softmax is None or not _can_merge(graph, loss, softmax):
            continue
        log_probs = graph.values[loss.args[1].value]
        if log_probs.shape[0] < 2 or graph.values[log_probs.base].bytes < SMALLEST_PIECEWISE_BYTES:
            continue
        owner_of[softmax.makes[0]] = loss.makes[0]
        ops[loss.index] = replace(
            loss, target=CROSS_ENTROPY, scratch=max(loss.scratch, softmax.scratch),
            layer=softmax.layer, where=softmax.where, gradient_of=softmax.gradient_of,
        )  # fmt: skip
        ops[softmax.index] = replace(
            softmax, target="aten.alias.default", args=softmax.args[:1], kwargs={}, makes=(), scratch=0
        )
    return with_views(graph, ops, owner_of) if owner_of else graph


def _can_merge(graph: JointGraph, loss: GraphOp, softmax: GraphOp) -> bool:
    """Return whether the derivatives of nll_loss and of log_softmax belong to the same cross-entropy.

    The latter must read the result of the former and the same log-probabilities, over the same classes, all in the same
    memory order.
    """
    arguments = arguments_of(softmax.target, softmax.args, softmax.kwargs)
    loss_log_probs, loss_gradient = graph.values[loss.args[1].value], graph.values[loss.makes[0]]
    softmax_log_probs = graph.values[arguments["output"].value]
    grad_output = graph.values[arguments["grad_output"].value]
    result, class_weights = graph.values[softmax.makes[0]], loss.args[3]
    tensors = (loss_log_probs, softmax_log_probs, loss_gradient, grad_output, result)
    return (
        softmax_log_probs.base == loss_log_probs.base
        and grad_output.base == loss_gradient.id
        and all(tensor.dtype == loss_log_probs.dtype and _is_whole(graph, tensor) for tensor in tensors)
        and (class_weights is None or is_contiguous(graph.values[class_weights.value]))
        and len(loss_log_probs.shape) in (2, 4)
        and _sizes_around(loss_log_probs.shape, dim=1) == _sizes_around(softmax_log_probs.shape, arguments["dim"])
    )


def _is_whole(graph: JointGraph, value: Value) -> bool:
    """Return whether a value has all elements of its base, in the same order, and the base is contiguous."""
    while value.is_view:
        assert value.op is not None, "a view is made by an op"
        op = graph.ops[value.op]
        if op.target not in _SAME_ORDER:
            return False
        value = graph.values[op.args[0].value]
    return is_contiguous(value)


def _sizes_around(shape: tuple[int, ...], dim: int) -> tuple[int, int, int]:
    """Return the numbers of elements before, along and after a dimension."""
    dim %= len(shape)
    return prod(shape[:dim]), shape[dim], prod(shape[dim + 1 :])
