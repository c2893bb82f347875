"""Order ops so that all of a component runs for one group of channels before the next group begins."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from memplan.planning.graph.joint_graph import GraphOp, JointGraph, refs


@dataclass(frozen=True)
class Run:
    """Successive ops; those of a component run for each group of channels in turn."""

    component: int | None
    """None: ops on whole values."""
    ops: tuple[GraphOp, ...]


def runs_by_component(
    graph: JointGraph, op_components: Mapping[int, int], value_components: Mapping[int, int]
) -> tuple[Run, ...] | None:
    """Return the ops in an order in which each component runs as a whole, so that it can run group by group.

    None if that is impossible: two components would have to wait for each other.

    Args:
        graph: before values are split.
        op_components: component of each op that writes or reads groups of channels, by the op's index.
        value_components: component of each value that is split.
    """
    stages = _stages(graph, op_components, value_components)
    # ops with the same key form a run; an op outside of components is a run of its own
    key = {
        op.index: (op.phase, op_components[op.index], stages[op.index]) if op.index in op_components else op.index
        for op in graph.ops
    }
    members = defaultdict[object, list[GraphOp]](list)
    for op in graph.ops:
        members[key[op.index]].append(op)
    first_op = {run_key: ops[0].index for run_key, ops in members.items()}
    dependencies: dict[object, set[object]] = {run_key: set() for run_key in members}
    for earlier, later in _edges(graph):
        if key[earlier] != key[later]:
            dependencies[key[later]].add(key[earlier])
    runs = [
        Run(op_components.get(first_op[run_key]), tuple(members[run_key]))
        for run_key in _topological(dependencies, first_op)
    ]
    return tuple(runs) if len(runs) == len(members) else None


def _topological(dependencies: Mapping[object, set[object]], priority: Mapping[object, int]) -> list[object]:
    """Return nodes in topological order: Kahn's algorithm. Nodes on a cycle are missing.

    `dependencies` has for each node those that come before it. Of several that are ready, that with the lowest
    `priority`, a distinct number of each, is next.
    """
    dependents = defaultdict[object, list[object]](list)
    for node, others in dependencies.items():
        for other in others:
            dependents[other].append(node)
    waiting_for = {node: len(others) for node, others in dependencies.items()}
    node_of = {number: node for node, number in priority.items()}
    ready = [priority[node] for node, count in waiting_for.items() if not count]
    heapq.heapify(ready)
    order = list[object]()
    while ready:
        node = node_of[heapq.heappop(ready)]
        order.append(node)
        for dependent in dependents[node]:
            waiting_for[dependent] -= 1
            if not waiting_for[dependent]:
                heapq.heappush(ready, priority[dependent])
    return order


def _edges(graph: JointGraph) -> list[tuple[int, int]]:
    """Return pairs of indices of ops that must stay in order: a reader follows the writer, random ops each other."""
    writer = {v: op.index for op in graph.ops for v in op.outputs if v is not None}
    reads = [(writer[v], op.index) for op in graph.ops for v in refs((op.args, op.kwargs)) if v in writer]
    random = [op.index for op in graph.ops if op.random]
    return [*reads, *itertools.pairwise(random)]


def _stages(graph: JointGraph, op_components: Mapping[int, int], value_components: Mapping[int, int]) -> dict[int, int]:
    """Return the stage of each op of a component.

    Along any path to the op, the stage counts how often values left the component and came back: each time, all groups
    have to be complete before the next stage begins. Components are as for `runs_by_component`.
    """
    writer = {v: op for op in graph.ops for v in op.outputs if v is not None}
    next_stage: dict[int, dict[int, int]] = {}
    """By op and component: the first stage that can read the op's whole results."""
    stages: dict[int, int] = {}
    for op in graph.ops:
        component_of_op, stage_here = op_components.get(op.index), defaultdict[int, int](int)
        for value in refs((op.args, op.kwargs)):
            if value not in writer:
                continue
            source = writer[value].index
            for component, stage in next_stage[source].items():
                # a split value is read group by group, in the stage of its writer, which is the one before
                within_component = component == component_of_op == op_components.get(source)
                by_group = within_component and value_components.get(value) == component
                stage_here[component] = max(stage_here[component], stage - 1 if by_group else stage)
        if component_of_op is not None:
            stages[op.index] = stage_here[component_of_op]
            stage_here[component_of_op] += 1
        next_stage[op.index] = dict(stage_here)
    return stages
