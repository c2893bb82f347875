"""Translate choices between calls of a step: to smaller inputs, or to the model without its loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from memplan.planning.graph.dependencies import is_allowed
from memplan.planning.graph.joint_graph import RESIDENT, GraphOp, JointGraph
from memplan.planning.schedule.actions import Choices


def translate_choices(choices: Choices, source: JointGraph, graph: JointGraph) -> Choices | None:
    """Translate choices for graph ``source`` into choices for ``graph``, the same step with sizes that are nowhere
    larger.

    Values are matched by the ops that make them, in order, without views. Returns None if the forward passes differ or
    any value is larger. The backward passes may differ (torch treats small tensors differently), so the result has to
    be validated against the budget.
    """
    counterpart_of = _counterparts(source, graph)
    if counterpart_of is None:
        return None
    if any(graph.values[new].bytes > source.values[old].bytes for old, new in counterpart_of.items()):
        return None
    pieces, order = choices.pieces, choices.order
    if pieces or order:
        source_ops = (*source.forward_ops, *source.backward_ops)
        ops = (*graph.forward_ops, *graph.backward_ops)
        if [op.target for op in source_ops] == [op.target for op in ops]:
            index_in_graph = {source_op.index: op.index for source_op, op in zip(source_ops, ops, strict=True)}
            pieces = None if pieces is None else frozenset(index_in_graph[index] for index in pieces)
            order = tuple(index_in_graph[index] for index in order)
        else:  # as if nothing had been chosen: all ops that can in pieces, in the captured order
            pieces, order = None, ()
    return _with_counterparts(replace(choices, pieces=pieces, order=order), counterpart_of)


def without_loss(choices: Choices, source: JointGraph, graph: JointGraph) -> Choices | None:
    """Translate choices for ``source``, a model with its loss, into choices for ``graph``, the model alone.

    Choices about the loss's own values are left out. Returns None unless the forward ops of ``graph`` are the first
    forward ops of ``source``. The result has to be validated against the budget.
    """
    counterpart_of = dict[int, int]()
    if len(graph.forward_ops) > len(source.forward_ops):
        return None
    same_ops = zip(source.forward_ops, graph.forward_ops, strict=False)  # the loss's ops follow in ``source``
    for source_op, op in same_ops:
        if not _is_same_op(source_op, op) or len(source_op.reads) != len(op.reads):
            return None
        for value, other in zip((*source_op.reads, *source_op.makes), (*op.reads, *op.makes), strict=True):
            if counterpart_of.setdefault(value, other) != other:  # it corresponds to another value already
                return None
    order = _order_without_loss(choices.order, source, graph)
    return _with_counterparts(replace(choices, pieces=None, order=order), counterpart_of)


def _with_counterparts(choices: Choices, counterpart_of: Mapping[int, int]) -> Choices:
    """Return choices about the counterparts of values in another graph; those about values without one are left out."""
    return replace(
        choices,
        recompute=frozenset(counterpart_of[value] for value in choices.recompute if value in counterpart_of),
        saved_forms=frozenset(
            (lever, counterpart_of[value]) for lever, value in choices.saved_forms if value in counterpart_of
        ),
    )


def _order_without_loss(order: tuple[int, ...], source: JointGraph, graph: JointGraph) -> tuple[int, ...]:
    """Translate an order of the backward ops of ``source`` into one of the backward ops of ``graph``.

    These are the last of ``source``, after the derivative of the loss; if they are not, the captured order is returned.
    """
    ops = graph.backward_ops
    last = source.backward_ops[len(source.backward_ops) - len(ops) :]
    if not all(map(_is_same_op, last, ops)) or len(last) < len(ops):
        return ()
    index_in_graph = {source_op.index: op.index for source_op, op in zip(last, ops, strict=True)}
    translated = tuple(index_in_graph[index] for index in order if index in index_in_graph)
    return translated if is_allowed(graph, translated) else ()


def _counterparts(source: JointGraph, graph: JointGraph) -> Mapping[int, int] | None:
    """Return, by id of a value of ``source`` that the step receives or a forward op makes, the id of its counterpart in
    ``graph``; None if the forward passes differ. Views have no entry."""
    counterpart_of: dict[int, int] = {}
    source_inputs, inputs = _input_values(source), _input_values(graph)
    if len(source_inputs) != len(inputs) or len(source.forward_ops) != len(graph.forward_ops):
        return None
    for old, new in zip(source_inputs, inputs, strict=True):
        counterpart_of[old] = new
        if (source.values[old].kind, source.values[old].path) != (graph.values[new].kind, graph.values[new].path):
            return None
    for source_op, op in zip(source.forward_ops, graph.forward_ops, strict=True):
        if not _is_same_op(source_op, op):
            return None
        if tuple(counterpart_of[value] for value in source_op.reads) != op.reads:
            return None
        counterpart_of.update(zip(source_op.makes, op.makes, strict=True))
    outputs = [counterpart_of.get(source.base(value)) for value in source.outputs]
    return counterpart_of if outputs == [graph.base(value) for value in graph.outputs] else None


def _is_same_op(source_op: GraphOp, op: GraphOp) -> bool:
    """Return whether ops of two graphs may correspond: the same target and number of results, both recomputable or
    both not."""
    first, second = ((each.target, len(each.makes), each.random, each.must_run_once) for each in (source_op, op))
    return first == second


def _input_values(graph: JointGraph) -> list[int]:
    """Return the ids of the values that no op makes: weights, inputs and the gradients of the outputs."""
    return [value.id for value in graph.values if value.kind in (*RESIDENT, "tangent")]
