"""Ops of the backward pass as late as they are worth: where a result waits longer than what it is made of would."""

from __future__ import annotations

from collections.abc import Sequence

from memplan.planning.graph.editor import Rebuild
from memplan.planning.graph.joint_graph import RESIDENT, GraphOp, JointGraph


def made_late(graph: JointGraph) -> JointGraph:
    """Move each op of the backward pass to just before its results are read, where its operands take fewer bytes.

    A shortcut's gradient, for example, is not needed before that of the long way is there.
    """
    given = {graph.base(gradient) for _, gradient in graph.gradients}
    order = list(graph.ops)
    for op in reversed(graph.backward_ops):
        if op.random or op.once or given.intersection(op.makes):
            continue
        at = next(position for position, other in enumerate(order) if other.index == op.index)
        until = next((p for p in range(at + 1, len(order)) if _needs(order[p], op)), at + 1)
        if until > at + 1 and _longer(graph, order, at, until) < sum(graph.values[one].bytes for one in op.makes):
            order.insert(until - 1, order.pop(at))
    rebuild = Rebuild(graph)
    for op in order:
        rebuild.add(op)
    return rebuild.finished()


def _needs(other: GraphOp, op: GraphOp) -> bool:
    return any(made in other.reads for made in op.makes) or any(one in other.outputs for one in op.makes)


def _longer(graph: JointGraph, order: Sequence[GraphOp], at: int, until: int) -> int:
    """Return the bytes of what would wait for an op, if it came as late as that."""
    later = {base for other in order[until:] for base in other.reads}
    waiting = [graph.values[base] for base in order[at].reads if base not in later]
    return sum(one.bytes for one in waiting if one.kind not in RESIDENT)
