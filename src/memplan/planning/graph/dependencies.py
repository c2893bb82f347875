"""Which backward ops have to run before which."""

from __future__ import annotations

from memplan.planning.graph.joint_graph import JointGraph, refs


def must_precede(graph: JointGraph) -> dict[int, set[int]]:
    """Return the indices of the backward ops that have to run before a backward op, by its index: those whose results
    it reads. Ops that draw random numbers or have a side effect keep their order, too."""
    maker = {value: op.index for op in graph.backward_ops for value in op.makes}
    before, last_in_fixed_order = dict[int, set[int]](), set[int]()
    for op in sorted(graph.backward_ops, key=lambda op: op.index):
        reads = {graph.base(value) for value in (*refs((op.args, op.kwargs)), *op.reads, *op.held_values)}
        before[op.index] = {maker[value] for value in reads if value in maker} - {op.index}
        if op.random or op.must_run_once:
            before[op.index] |= last_in_fixed_order
            last_in_fixed_order = {op.index}
    return before


def is_allowed(graph: JointGraph, order: tuple[int, ...]) -> bool:
    """Return whether the backward ops of a graph can run in an order: all their indices, each once, so that no op runs
    before an op that it depends on. The empty order stands for the order as captured."""
    if not order:
        return True
    before = must_precede(graph)
    position = {op: position for position, op in enumerate(order)}
    has_duplicates = len(position) < len(order)
    if has_duplicates or position.keys() != before.keys():
        return False
    return all(position[other] < position[op] for op, others in before.items() for other in others)
