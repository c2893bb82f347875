"""Prepare a captured graph for the search: run the exact passes, then add the encodings of all levers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from memplan.planning.graph.joint_graph import GraphOp, JointGraph
from memplan.planning.graph.precision import Precision
from memplan.planning.levers import in_place
from memplan.planning.levers.lever import Situation
from memplan.planning.levers.registry import apply_rewrites, with_encodings
from memplan.planning.passes.copies_and_views import copy_before_mutation, without_copies
from memplan.planning.passes.merge_cross_entropy_backward import fused
from memplan.planning.passes.recompute_batch_norm import with_cheaper_recompute
from memplan.planning.passes.share_autocast_casts import cast_once
from memplan.planning.passes.split_convolution_backward import split
from memplan.planning.passes.split_dropout import DROPOUT, split_dropouts


def prepare(graph: JointGraph, casts: Mapping[int, int], precision: Precision, *, on_cpu: bool) -> JointGraph:
    """Return a captured graph, prepared for the search. ``casts``: by index of a cast that autocast inserted, its
    autocast region."""
    graph = without_copies(copy_before_mutation(cast_once(graph, casts)))
    graph = fused(split_dropouts(split(graph)))
    if on_cpu:
        graph = with_cheaper_recompute(graph)
    graph = apply_rewrites(graph, precision)
    ops = list[GraphOp]()
    for op in graph.ops:
        cheaper = None if op.cheaper_recompute is None else _with_in_place_form(op.cheaper_recompute, graph)
        ops.append(replace(_with_in_place_form(op, graph), cheaper_recompute=cheaper))
    return with_encodings(replace(graph, ops=tuple(ops)), Situation(precision.save))


def _with_in_place_form(op: GraphOp, graph: JointGraph) -> GraphOp:
    """Return the op with the operands that its first result can overwrite, and the workspace that it needs then."""
    first_result_is_allocated = bool(op.makes) and op.outputs[0] == op.makes[0]
    if not first_result_is_allocated:
        return op
    if op.target == DROPOUT and graph.is_on_card:  # the kernel draws and multiplies at once there
        return op
    overwrites = in_place.overwrites(op.target, op.args, op.kwargs, graph.values, op.makes[0])
    if not overwrites:
        return op
    is_piecewise = op.target in in_place.PIECEWISE
    op = replace(op, overwrites=overwrites)
    return replace(op, in_place_scratch=in_place.in_place_workspace(op, graph.values)) if is_piecewise else op
