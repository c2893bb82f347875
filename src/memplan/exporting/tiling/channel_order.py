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
    first = {name: ops[0].index for name, ops in members.items()}
    dependencies: dict[object, set[object]] = {name: set() for name in members}
    for before, after in _edges(graph):
        if key[before] != key[after]:
            dependencies[key[after]].add(key[before])
    runs = [
        Run(op_components.get(members[name][0].index), tuple(members[name]))
        for name in _topological(dependencies, first)
    ]
    return tuple(runs) if len(runs) == len(members) else None


def _topological(dependencies: Mapping[object, set[object]], first: Mapping[object, int]) -> list[object]:
    """Return names in topological order: Kahn's algorithm. Names on a cycle are missing.

    `dependencies` has for each name those that come before it. Ties are broken by `first`, a distinct number of each.
    """
    after, left = defaultdict[object, list[object]](list), {name: len(others) for name, others in dependencies.items()}
    for name, others in dependencies.items():
        for other in others:
            after[other].append(name)
    names = {at: name for name, at in first.items()}
    ready = [first[name] for name, count in left.items() if not count]
    heapq.heapify(ready)
    order = list[object]()
    while ready:
        name = names[heapq.heappop(ready)]
        order.append(name)
        for other in after[name]:
            left[other] -= 1
            if not left[other]:
                heapq.heappush(ready, first[other])
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
        component_of_op, reached = op_components.get(op.index), defaultdict[int, int](int)
        for value in refs((op.args, op.kwargs)):
            if value not in writer:
                continue
            source = writer[value].index
            for component, stage in next_stage[source].items():
                # a split value is read group by group, in the stage of its writer, which is the one before
                within_component = component == component_of_op == op_components.get(source)
                by_group = within_component and value_components.get(value) == component
                reached[component] = max(reached[component], stage - by_group)
        if component_of_op is not None:
            stages[op.index] = reached[component_of_op]
            reached[component_of_op] += 1
        next_stage[op.index] = dict(reached)
    return stages
