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
    match = _match_values(source, graph)
    if match is None or any(graph.values[new].bytes > source.values[old].bytes for old, new in match.items()):
        return None
    pieces, order = choices.pieces, choices.order
    if pieces or order:
        old = (*source.forward_ops, *source.backward_ops)
        new = (*graph.forward_ops, *graph.backward_ops)
        if [op.target for op in old] == [op.target for op in new]:
            match_op = {a.index: b.index for a, b in zip(old, new, strict=True)}
            pieces = None if pieces is None else frozenset(match_op[op] for op in pieces)
            order = tuple(match_op[op] for op in order)
        else:  # all ops in pieces, in the captured order
            pieces, order = None, ()
    return replace(
        choices,
        recompute=frozenset(match[value] for value in choices.recompute if value in match),
        saved_forms=frozenset((lever, match[value]) for lever, value in choices.saved_forms if value in match),
        pieces=pieces,
        order=order,
    )


def without_loss(choices: Choices, source: JointGraph, graph: JointGraph) -> Choices | None:
    """Translate choices for ``source``, a model with its loss, into choices for ``graph``, the model alone.

    Choices about the loss's own values are left out. Returns None unless the forward ops of ``graph`` are the first
    forward ops of ``source``. The result has to be validated against the budget.
    """
    match = dict[int, int]()
    if len(graph.forward_ops) > len(source.forward_ops):
        return None
    for a, b in zip(source.forward_ops, graph.forward_ops, strict=False):  # the loss's ops follow in ``source``
        if not _is_same_op(a, b) or len(a.reads) != len(b.reads):
            return None
        for value, other in zip((*a.reads, *a.makes), (*b.reads, *b.makes), strict=True):
            if match.setdefault(value, other) != other:  # it corresponds to another value already
                return None
    return replace(
        choices,
        recompute=frozenset(match[value] for value in choices.recompute if value in match),
        saved_forms=frozenset((lever, match[value]) for lever, value in choices.saved_forms if value in match),
        pieces=None,
        order=_order_without_loss(choices.order, source, graph),
    )


def _order_without_loss(order: tuple[int, ...], source: JointGraph, graph: JointGraph) -> tuple[int, ...]:
    """Translate an order of the backward ops of ``source`` into one of the backward ops of ``graph``.

    These are the last of ``source``, after the derivative of the loss; if they are not, the captured order is returned.
    """
    ops = graph.backward_ops
    last = source.backward_ops[len(source.backward_ops) - len(ops) :]
    if not all(map(_is_same_op, last, ops)) or len(last) < len(ops):
        return ()
    match = {a.index: b.index for a, b in zip(last, ops, strict=True)}
    translated = tuple(match[op] for op in order if op in match)
    return translated if is_allowed(graph, translated) else ()


def _match_values(source: JointGraph, graph: JointGraph) -> Mapping[int, int] | None:
    """Return the ids of one graph's forward values by those of the other; None if the forward passes differ.

    Views have no entry.
    """
    match: dict[int, int] = {}
    if len(_input_values(source)) != len(_input_values(graph)) or len(source.forward_ops) != len(graph.forward_ops):
        return None
    for a, b in zip(_input_values(source), _input_values(graph), strict=True):
        match[a] = b
        if (source.values[a].kind, source.values[a].path) != (graph.values[b].kind, graph.values[b].path):
            return None
    for a, b in zip(source.forward_ops, graph.forward_ops, strict=True):
        if not _is_same_op(a, b):
            return None
        if tuple(match[value] for value in a.reads) != b.reads:
            return None
        match.update(zip(a.makes, b.makes, strict=True))
    outputs = [match.get(source.base(value)) for value in source.outputs]
    return match if outputs == [graph.base(value) for value in graph.outputs] else None


def _is_same_op(a: GraphOp, b: GraphOp) -> bool:
    """Return whether ops of two graphs may correspond: the same target and number of results, both recomputable."""
    return (a.target, len(a.makes), a.random, a.once) == (b.target, len(b.makes), b.random, b.once)


def _input_values(graph: JointGraph) -> list[int]:
    """Return the ids of the values that no op makes: weights, inputs and the gradients of the outputs."""
    return [value.id for value in graph.values if value.kind in (*RESIDENT, "tangent")]
