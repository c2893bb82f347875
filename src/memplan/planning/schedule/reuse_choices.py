"""Translate choices between calls of a step: to smaller inputs, or to the model without its loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from memplan.planning.graph.joint_graph import RESIDENT, GraphOp, JointGraph
from memplan.planning.schedule.actions import Choices


def translate_choices(choices: Choices, of: JointGraph, graph: JointGraph) -> Choices | None:
    """Translate choices for graph ``of`` into choices for ``graph``, the same step with nowhere larger sizes.

    Values are matched by the ops that make them, in order, without views. Returns None if the forward passes differ or
    any value is larger. The backward passes may differ (torch treats small tensors differently), so the result has to
    be validated against the budget."""
    same = _same_values(of, graph)
    if same is None or any(graph.values[new].bytes > of.values[old].bytes for old, new in same.items()):
        return None
    pieces = choices.pieces
    if pieces:  # None, which stands for all ops, if the ops differ
        old, new = ((*each.forward_ops, *each.backward_ops) for each in (of, graph))
        alike = [op.target for op in old] == [op.target for op in new]
        pieces = frozenset(b.index for a, b in zip(old, new, strict=True) if a.index in pieces) if alike else None
    return replace(
        choices,
        recompute=frozenset(same[value] for value in choices.recompute if value in same),
        kept_as=frozenset((lever, same[value]) for lever, value in choices.kept_as if value in same),
        pieces=pieces,
    )


def without_loss(choices: Choices, of: JointGraph, graph: JointGraph) -> Choices | None:
    """Translate choices for ``of``, a model with its loss, into choices for ``graph``, the model alone.

    Choices about the loss's own values are left out. Returns None unless the forward ops of ``graph`` are the first
    forward ops of ``of``. The result has to be validated against the budget.
    """
    same = dict[int, int]()
    if len(graph.forward_ops) > len(of.forward_ops):
        return None
    for a, b in zip(of.forward_ops, graph.forward_ops, strict=False):
        if not _same_op(a, b) or len(a.reads) != len(b.reads):
            return None
        pairs = (*zip(a.reads, b.reads, strict=True), *zip(a.makes, b.makes, strict=True))
        if any(same.setdefault(value, other) != other for value, other in pairs):
            return None
    return replace(
        choices,
        recompute=frozenset(same[value] for value in choices.recompute if value in same),
        kept_as=frozenset((lever, same[value]) for lever, value in choices.kept_as if value in same),
        pieces=None,
    )


def _same_values(of: JointGraph, graph: JointGraph) -> Mapping[int, int] | None:
    """Map the values of one forward pass to those of the other, bases only; None if the passes differ."""
    same: dict[int, int] = {}
    if len(_inputs(of)) != len(_inputs(graph)) or len(of.forward_ops) != len(graph.forward_ops):
        return None
    for a, b in zip(_inputs(of), _inputs(graph), strict=True):
        same[a] = b
        if (of.values[a].kind, of.values[a].path) != (graph.values[b].kind, graph.values[b].path):
            return None
    for a, b in zip(of.forward_ops, graph.forward_ops, strict=True):
        if not _same_op(a, b):
            return None
        if tuple(same[value] for value in a.reads) != b.reads:
            return None
        same.update(zip(a.makes, b.makes, strict=True))
    outputs = [same.get(of.base(value)) for value in of.outputs]
    return same if outputs == [graph.base(value) for value in graph.outputs] else None


def _same_op(a: GraphOp, b: GraphOp) -> bool:
    return (a.target, len(a.makes), a.random, a.once) == (b.target, len(b.makes), b.random, b.once)


def _inputs(graph: JointGraph) -> list[int]:
    return [value.id for value in graph.values if value.kind in (*RESIDENT, "tangent")]
