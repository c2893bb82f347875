"""Effect of lower precision on a captured step: by block of layers, and in copies of weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from memplan.planning.graph.joint_graph import GraphOp, JointGraph
from memplan.planning.graph.precision import Precision
from memplan.planning.levers.registry import LOWER_PRECISION
from memplan.planning.passes.share_autocast_casts import CAST
from memplan.planning.plan.decision import Decision, Scope
from memplan.planning.schedule.scheduler import Schedule

BLOCKS = 12
"""Largest number of blocks in a report."""


def lower_precision_decisions(graph: JointGraph, precision: Precision) -> tuple[Decision, ...]:
    """Return a decision for each block of layers that computes in lower precision, in the order in which they run.

    Its bytes are those that the block's results would take more in full precision. Its seconds are 0: the step's own
    time already is that of the lower precision.
    """
    if not precision.compute:
        return ()
    copies = _weight_copies(graph)
    decisions = list[Decision]()
    for block, ops in blocks(graph).items():
        results = [v for op in ops if op.phase == "forward" for v in op.makes if v not in copies]
        cast_weights = [v for op in ops for v in op.makes if v in copies]
        reason, lower_values = LOWER_PRECISION.of_block(graph, ops, precision.compute, results, cast_weights)
        if not lower_values:  # the block computes as it is written
            continue
        names = tuple(dict.fromkeys(graph.values[v].name for v in (lower_values[0], lower_values[-1])))
        scope, where = Scope("segment", names), next((op.where for op in ops if op.where), None)
        decisions.append(Decision(
            LOWER_PRECISION.name, scope, reason.grade, reason.bytes, seconds=0.0,
            layer=block, where=where, reason=reason.text, details=reason.details,
        ))  # fmt: skip
    return tuple(decisions)


def blocks(graph: JointGraph) -> Mapping[str, Sequence[GraphOp]]:
    """Return the ops of both passes by block of layers, such as ``layer1``; "" for ops outside of any layer.

    A block is a module at the deepest level that has at most `BLOCKS` names.
    """
    layers = [(op, graph.layer_of(op).split(".")) for op in (*graph.forward_ops, *graph.backward_ops)]
    deepest = max((len(names) for _, names in layers), default=0)
    depth = 1
    for deeper in range(2, deepest + 1):
        if len({tuple(names[:deeper]) for _, names in layers}) > BLOCKS:
            break
        depth = deeper
    groups: dict[str, list[GraphOp]] = defaultdict(list)
    for op, names in layers:
        groups[".".join(names[:depth])].append(op)
    return groups


def slower_blocks(exact: JointGraph, lower: JointGraph, compute: str) -> tuple[str, ...]:
    """Return the blocks that compute in lower precision and take longer there than in the exact step. ``lower`` is the
    step that computes in ``compute``; both graphs have seconds."""
    exact_seconds = {block: sum(op.seconds for op in ops) for block, ops in blocks(exact).items()}
    slower = list[str]()
    for block, ops in blocks(lower).items():
        computes_low = any(lower.values[v].dtype == compute for op in ops for v in op.makes)
        takes_longer = block in exact_seconds and sum(op.seconds for op in ops) > exact_seconds[block]
        if block and computes_low and takes_longer:
            slower.append(block)
    return tuple(slower)


def cast_copy_peak(schedule: Schedule) -> int:
    """Return the peak bytes of copies of parameters in lower precision."""
    copies, values = _weight_copies(schedule.graph), schedule.graph.values
    level = peak = 0
    for action in (*schedule.forward, *schedule.backward):
        level += sum(values[value].bytes for value in action.makes if value in copies)
        peak = max(peak, level)
        level -= sum(values[value].bytes for value in action.frees if value in copies)
    return peak


def _weight_copies(graph: JointGraph) -> frozenset[int]:
    """Return the values that are parameters cast to fewer bits."""
    values = graph.values
    casts = (op for op in graph.forward_ops if op.target == CAST and len(op.reads) == 1 and len(op.makes) == 1)
    return frozenset(
        op.makes[0]
        for op in casts
        if values[op.reads[0]].kind == "parameter"
        and values[op.makes[0]].contiguous_bytes < values[op.reads[0]].contiguous_bytes
    )
