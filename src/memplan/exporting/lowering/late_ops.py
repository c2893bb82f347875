"""Move ops to where less memory is live: large gradients before their readers, outputs to where they are computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memplan.exporting.lowering.device_graph import ALIASES, WRITE, first_output
from memplan.planning.graph.editor import Rebuild
from memplan.planning.graph.joint_graph import RESIDENT, GraphOp, JointGraph, Ref


def with_delayed_ops(graph: JointGraph) -> JointGraph:
    """Move each op of the backward pass to just before its results are read, if its operands take fewer bytes.

    The gradient of a residual connection, for example, is not read before that of the other branch is computed.
    """
    gradients = {graph.base(gradient) for _, gradient in graph.gradients}  # whose ops stay: updates follow them
    order = list(graph.ops)
    for op in reversed(graph.backward_ops):
        if op.random or op.must_run_once or gradients.intersection(op.makes):
            continue
        position = next(p for p, other in enumerate(order) if other.index == op.index)
        results = set(op.makes)
        later = range(position + 1, len(order))
        # in `outputs`: a view of a result
        readers = (p for p in later if not results.isdisjoint((*order[p].reads, *order[p].outputs)))
        first_reader = next(readers, None)
        if first_reader is None or first_reader == position + 1:
            continue
        result_bytes = sum(graph.values[value].bytes for value in op.makes)
        if _bytes_kept_longer(graph, order, position, first_reader) < result_bytes:
            order.insert(first_reader - 1, order.pop(position))  # -1: the op before it has left the list
    rebuild = Rebuild(graph)
    for op in order:
        rebuild.add(op)
    return rebuild.finished()


def with_early_writes(graph: JointGraph) -> JointGraph:
    """Move each op that copies a value to the caller's memory to right after the op that computes the value, before any
    op overwrites it."""
    operand_of: dict[int, int] = {first_output(op): op.args[0].value for op in graph.ops if op.target in ALIASES}
    order = [op for op in graph.ops if op.target != WRITE]
    for op in graph.ops:
        if op.target == WRITE:
            value: int = op.args[0].value
            while value in operand_of:  # an alias, which may be made much later than the value itself
                value = operand_of[value]
            makers = [position for position, other in enumerate(order) if value in other.outputs]  # empty for an input
            order.insert(makers[-1] + 1 if makers else 0, replace(op, args=(Ref(value), *op.args[1:])))
    rebuild = Rebuild(graph)
    for op in order:
        rebuild.add(op)
    return rebuild.finished()


def _bytes_kept_longer(graph: JointGraph, order: Sequence[GraphOp], position: int, reader: int) -> int:
    """Return the bytes of operands that would live longer if the op at index `position` of `order` moved to just before
    the op at index `reader`."""
    read_later = {base for later in order[reader:] for base in later.reads}
    operands = [graph.values[base] for base in order[position].reads if base not in read_later]
    return sum(value.bytes for value in operands if value.kind not in RESIDENT)
