"""Delay ops of the backward pass whose results take more memory than their operands until the results are read."""

from __future__ import annotations

from collections.abc import Sequence

from memplan.planning.graph.editor import Rebuild
from memplan.planning.graph.joint_graph import RESIDENT, GraphOp, JointGraph


def with_delayed_ops(graph: JointGraph) -> JointGraph:
    """Move each op of the backward pass to just before its results are read, if its operands take fewer bytes.

    The gradient of a residual connection, for example, is not read before that of the other branch is computed.
    """
    gradients = {graph.base(gradient) for _, gradient in graph.gradients}
    order = list(graph.ops)
    for op in reversed(graph.backward_ops):
        if op.random or op.once or gradients.intersection(op.makes):
            continue
        at = next(position for position, other in enumerate(order) if other.index == op.index)
        results = set(op.makes)
        later = range(at + 1, len(order))
        until = next((p for p in later if not results.isdisjoint((*order[p].reads, *order[p].outputs))), at + 1)
        if until > at + 1 and _kept_alive(graph, order, at, until) < sum(graph.values[v].bytes for v in op.makes):
            order.insert(until - 1, order.pop(at))
    rebuild = Rebuild(graph)
    for op in order:
        rebuild.add(op)
    return rebuild.finished()


def _kept_alive(graph: JointGraph, order: Sequence[GraphOp], at: int, until: int) -> int:
    """Return the bytes of operands that would live longer if op `at` moved to just before op `until`."""
    later = {base for other in order[until:] for base in other.reads}
    waiting = [graph.values[base] for base in order[at].reads if base not in later]
    return sum(value.bytes for value in waiting if value.kind not in RESIDENT)
