"""Passes that prepare a captured graph for the search."""

from __future__ import annotations

from dataclasses import replace

from memplan.planning.graph.joint_graph import GraphOp, JointGraph
from memplan.planning.levers import in_place
from memplan.planning.passes.split_dropout import DROPOUT


def _with_overwrites(graph: JointGraph) -> JointGraph:
    def formed(op: GraphOp) -> GraphOp:
        again = None if op.again is None else _with_forms(op.again, graph)
        return replace(_with_forms(op, graph), again=again)

    return replace(graph, ops=tuple(map(formed, graph.ops)))


def _with_forms(op: GraphOp, graph: JointGraph) -> GraphOp:
    """Return the op with its in-place forms, where its first result is the first that it makes."""
    if not op.makes or op.outputs[0] != op.makes[0]:
        return op
    if op.target == DROPOUT and graph.is_on_card:  # what is drawn there is drawn by the kernel itself
        return op
    over = in_place.overwrites(op.target, op.args, op.kwargs, graph.values, op.makes[0])
    if not over:
        return op
    pieces = op.target in in_place.PIECEWISE
    op = replace(op, overwrites=over)
    return replace(op, scratch_into=in_place.scratch_into(op, graph.values)) if pieces else op
