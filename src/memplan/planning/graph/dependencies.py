"""Which backward ops have to run before which."""

from __future__ import annotations

from memplan.planning.graph.joint_graph import JointGraph, refs


def must_precede(graph: JointGraph) -> dict[int, set[int]]:
    """Return, by backward op, the backward ops that have to run before it: those that make what it reads; and the last
    op before it in the captured order that draws random numbers or has a side effect, if it does, too."""
    maker = {value: op.index for op in graph.backward_ops for value in op.makes}
    before, last_fixed = dict[int, set[int]](), None
    for op in sorted(graph.backward_ops, key=lambda op: op.index):
        reads = {graph.base(value) for value in (*refs((op.args, op.kwargs)), *op.reads, *op.holds)}
        before[op.index] = {maker[value] for value in reads if value in maker} - {op.index}
        if op.random or op.once:
            before[op.index] |= set[int]() if last_fixed is None else {last_fixed}
            last_fixed = op.index
    return before


def is_allowed(graph: JointGraph, order: tuple[int, ...]) -> bool:
    """Return whether the backward ops of a graph can run in an order (see ``JointGraph.order``)."""
    before = must_precede(graph)
    position = {op: at for at, op in enumerate(order)}
    if len(position) < len(order) or position.keys() != before.keys():
        return not order
    return all(position[other] < position[op] for op, others in before.items() for other in others)
