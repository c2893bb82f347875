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
        position = next(p for p, other in enumerate(order) if other.index == op.index)
        results = set(op.makes)
        following = range(position + 1, len(order))
        reader = next((p for p in following if not results.isdisjoint((*order[p].reads, *order[p].outputs))), None)
        if reader is None or reader == position + 1:
            continue
        if _bytes_kept_longer(graph, order, position, reader) < sum(graph.values[v].bytes for v in op.makes):
            order.insert(reader - 1, order.pop(position))
    rebuild = Rebuild(graph)
    for op in order:
        rebuild.add(op)
    return rebuild.finished()


def _bytes_kept_longer(graph: JointGraph, order: Sequence[GraphOp], position: int, reader: int) -> int:
    """Return the bytes of operands that would live longer if the op at a position moved to just before its reader."""
    read_anyway = {base for other in order[reader:] for base in other.reads}
    operands = [graph.values[base] for base in order[position].reads if base not in read_anyway]
    return sum(value.bytes for value in operands if value.kind not in RESIDENT)
