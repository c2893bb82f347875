"""Choices made for one call, taken over for another: a smaller one, or that of the model without its loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from memplan.planning.graph.joint_graph import RESIDENT, GraphOp, JointGraph
from memplan.planning.schedule.actions import Choices


def taken_over(choices: Choices, of: JointGraph, graph: JointGraph) -> Choices | None:
    """Translate choices of one graph into choices of another of the same step, whose sizes are nowhere larger.

    Values are told by the ops that make them, in order; views do not count. None where the forward passes are not
    the same, or something is larger. What the backward pass does with what it is given may differ (small tensors are
    treated otherwise): whether the choices keep a budget is for the validator to say.
    """
    same = _same_values(of, graph)
    if same is None or any(graph.values[new].bytes > of.values[old].bytes for old, new in same.items()):
        return None
    return replace(
        choices,
        recompute=frozenset(same[value] for value in choices.recompute if value in same),
        kept_as=frozenset((lever, same[value]) for lever, value in choices.kept_as if value in same),
        pieces=_same_ops(choices.pieces, of, graph),
    )


def without_loss(choices: Choices, of: JointGraph, graph: JointGraph) -> Choices | None:
    """Translate choices of a model with its loss into choices of the model alone.

    The ops of ``graph``'s forward pass have to be the first of ``of``'s, else None; what becomes of the loss's own
    values is left out. Whether the choices keep a budget is for the validator to say.
    """
    same = dict[int, int]()
    if len(graph.forward_ops) > len(of.forward_ops):
        return None
    for a, b in zip(of.forward_ops, graph.forward_ops, strict=False):
        if not _alike(a, b) or len(a.reads) != len(b.reads):
            return None
        pairs = (*zip(a.reads, b.reads, strict=True), *zip(a.makes, b.makes, strict=True))
        if any(same.setdefault(one, other) != other for one, other in pairs):
            return None
    return replace(
        choices,
        recompute=frozenset(same[value] for value in choices.recompute if value in same),
        kept_as=frozenset((lever, same[value]) for lever, value in choices.kept_as if value in same),
        pieces=None,
    )


def _same_values(one: JointGraph, other: JointGraph) -> Mapping[int, int] | None:
    """By the values that own memory in a forward pass: the same of another graph."""
    same: dict[int, int] = {}
    for a, b in zip(_handed(one), _handed(other), strict=False):
        same[a] = b
        if (one.values[a].kind, one.values[a].path) != (other.values[b].kind, other.values[b].path):
            return None
    if len(_handed(one)) != len(_handed(other)) or len(one.forward_ops) != len(other.forward_ops):
        return None
    for a, b in zip(one.forward_ops, other.forward_ops, strict=True):
        if not _alike(a, b):
            return None
        if tuple(same[value] for value in a.reads) != b.reads:
            return None
        same.update(zip(a.makes, b.makes, strict=True))
    returned = [[graph.base(value) for value in graph.outputs] for graph in (one, other)]
    return same if [same.get(value) for value in returned[0]] == returned[1] else None


def _alike(a: GraphOp, b: GraphOp) -> bool:
    return (a.target, len(a.makes), a.random, a.once) == (b.target, len(b.makes), b.random, b.once)


def _handed(graph: JointGraph) -> list[int]:
    return [value.id for value in graph.values if value.kind in (*RESIDENT, "tangent")]


def _same_ops(ops: frozenset[int] | None, one: JointGraph, other: JointGraph) -> frozenset[int] | None:
    """The same ops of another graph; None, which stands for all, where its ops are others."""
    if not ops:
        return ops
    pairs = list(zip(_proper(one), _proper(other), strict=False))
    if len(_proper(one)) != len(_proper(other)) or any(a.target != b.target for a, b in pairs):
        return None
    return frozenset(b.index for a, b in pairs if a.index in ops)


def _proper(graph: JointGraph) -> list[GraphOp]:
    return [*graph.forward_ops, *graph.backward_ops]
