"""Compute the derivative of cross-entropy by one op, which need not hold the gradient of the loss by itself.

In torch it is two: that of the loss by the log-probabilities, zero but for one class a row and as large as they are,
and that of the log-softmax by what it was taken of. Both treat each sample by itself, so the two can go through the
samples together, in the memory of the log-probabilities where nobody needs those any more. The bits are the same.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from memplan.planning.graph.joint_graph import GraphOp, JointGraph, Value
from memplan.planning.graph.op_schema import CROSS_ENTROPY, arguments_of, is_contiguous
from memplan.planning.levers.in_place import WORTHWHILE
from memplan.planning.passes.copies_and_views import looking_into

_LOSSES = ("aten.nll_loss_backward.default", "aten.nll_loss2d_backward.default")
_SOFTMAX = "aten._log_softmax_backward_data.default"
_SAME_ORDER = (
    "aten.view.default",
    "aten._unsafe_view.default",
    "aten.detach.default",
    "aten.alias.default",
    "aten.squeeze.dim",
    "aten.unsqueeze.default",
)
"""Views that hold all elements of what they look into, in the same order, where that is contiguous."""


def fused(graph: JointGraph) -> JointGraph:
    """Replace the derivatives of a loss and of its log-softmax by one op.

    That op makes what the log-softmax's derivative did, in place of the loss's gradient; what was the log-softmax's
    derivative only looks into it. Left as they are: small ones, whose memory is not taken over, and where anything
    else reads the loss's gradient.
    """
    outside = {graph.base(value) for value in graph.outputs}
    outside |= {graph.base(value) for _, value in (*graph.gradients, *graph.mutations)}
    ops, same = list(graph.ops), dict[int, int]()
    for loss in graph.backward_ops:
        if loss.target not in _LOSSES or loss.makes != loss.outputs or loss.makes[0] in outside:
            continue
        softmax = _only_reader(graph, loss.makes[0])
        if softmax is None or not _fits(graph, loss, softmax):
            continue
        log_probs = graph.values[loss.args[1].value]
        if log_probs.shape[0] < 2 or graph.values[log_probs.base].bytes < WORTHWHILE:
            continue
        same[softmax.makes[0]] = loss.makes[0]
        ops[loss.index] = replace(
            loss, target=CROSS_ENTROPY, scratch=max(loss.scratch, softmax.scratch),
            layer=softmax.layer, where=softmax.where, gradient_of=softmax.gradient_of,
        )  # fmt: skip
        ops[softmax.index] = replace(
            softmax, target="aten.alias.default", args=softmax.args[:1], kwargs={}, makes=(), scratch=0
        )
    return looking_into(graph, ops, same) if same else graph


def _only_reader(graph: JointGraph, base: int) -> GraphOp | None:
    """Return the one op that reads a value, if it is a log-softmax's derivative."""
    readers = [op for op in graph.ops if base in op.reads and not op.is_view]
    return readers[0] if len(readers) == 1 and readers[0].target == _SOFTMAX else None


def _fits(graph: JointGraph, loss: GraphOp, softmax: GraphOp) -> bool:
    """Return whether the softmax's derivative takes the loss's gradient and the log-probabilities that the loss took,
    over the same classes, and everything lies in memory in the same order."""
    given = arguments_of(softmax.target, softmax.args, softmax.kwargs)
    of_loss, gradient = graph.values[loss.args[1].value], graph.values[loss.makes[0]]
    of_softmax, handed_on = graph.values[given["output"].value], graph.values[given["grad_output"].value]
    result, weight = graph.values[softmax.makes[0]], loss.args[3]
    every = (of_loss, of_softmax, gradient, handed_on, result)
    return (
        of_softmax.base == of_loss.base
        and handed_on.base == gradient.id
        and all(one.dtype == of_loss.dtype and _is_whole(graph, one) for one in every)
        and (weight is None or is_contiguous(graph.values[weight.value]))
        and len(of_loss.shape) in (2, 4)
        and _around(of_loss.shape, 1) == _around(of_softmax.shape, given["dim"])
    )


def _is_whole(graph: JointGraph, value: Value) -> bool:
    """Return whether a value is all of its base, contiguous."""
    while value.is_view:
        assert value.op is not None, "a view is made by an op"
        op = graph.ops[value.op]
        if op.target not in _SAME_ORDER:
            return False
        value = graph.values[op.args[0].value]
    return is_contiguous(value)


def _around(shape: tuple[int, ...], dim: int) -> tuple[int, int, int]:
    """Elements before, along and after a dimension."""
    dim %= len(shape)
    return prod(shape[:dim]), shape[dim], prod(shape[dim + 1 :])
