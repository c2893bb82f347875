"""In which order ops run whose values come in groups of channels: all that there is of one group first."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from memplan.planning.graph.joint_graph import GraphOp, JointGraph, refs


@dataclass(frozen=True)
class Run:
    """Ops that run one after another; of a component: all of them for each group of channels."""

    component: int | None
    ops: tuple[GraphOp, ...]


def ordered(graph: JointGraph, of: Mapping[int, int], split: Mapping[int, int]) -> tuple[Run, ...] | None:
    """Return the ops as runs; None where two components would each have to wait for the other.

    Args:
        graph: as it is, every value whole.
        of: component of each op that makes or reads groups of channels, by the op's index.
        split: component of each value that comes in groups.
    """
    stages = _stages(graph, of, split)
    key = {op.index: (op.phase, of[op.index], stages[op.index]) if op.index in of else op.index for op in graph.ops}
    members = defaultdict[object, list[GraphOp]](list)
    for op in graph.ops:
        members[key[op.index]].append(op)
    first = {name: ops[0].index for name, ops in members.items()}
    waits: dict[object, set[object]] = {name: set() for name in members}
    for before, after in _edges(graph):
        if key[before] != key[after]:
            waits[key[after]].add(key[before])
    runs = [Run(of.get(members[name][0].index), tuple(members[name])) for name in _by_first(waits, first)]
    return tuple(runs) if len(runs) == len(members) else None


def _by_first(waits: Mapping[object, set[object]], first: Mapping[object, int]) -> list[object]:
    """Return names so that each comes after what it waits for, by their first op where there is a choice."""
    after, left = defaultdict[object, list[object]](list), {name: len(others) for name, others in waits.items()}
    for name, others in waits.items():
        for other in others:
            after[other].append(name)
    names = {at: name for name, at in first.items()}
    ready = [first[name] for name, count in left.items() if not count]
    heapq.heapify(ready)
    found = list[object]()
    while ready:
        name = names[heapq.heappop(ready)]
        found.append(name)
        for other in after[name]:
            left[other] -= 1
            if not left[other]:
                heapq.heappush(ready, first[other])
    return found


def _edges(graph: JointGraph) -> list[tuple[int, int]]:
    """Return pairs of ops of which the second one must come after the first: for what it reads, or what both draw."""
    maker = {one: op.index for op in graph.ops for one in op.outputs if one is not None}
    found = [(maker[one], op.index) for op in graph.ops for one in refs((op.args, op.kwargs)) if one in maker]
    random = [op.index for op in graph.ops if op.random]
    return [*found, *itertools.pairwise(random)]


def _stages(graph: JointGraph, of: Mapping[int, int], split: Mapping[int, int]) -> dict[int, int]:
    """Return how often what an op of a component reads has left the component before: it waits for all groups then."""
    maker = {one: op for op in graph.ops for one in op.outputs if one is not None}
    left: dict[int, dict[int, int]] = {}
    """By op and component: the first stage that can read what the op makes as a whole."""
    found: dict[int, int] = {}
    for op in graph.ops:
        mine, here = of.get(op.index), defaultdict[int, int](int)
        stage = 0
        for one in refs((op.args, op.kwargs)):
            if one not in maker:
                continue
            source = maker[one].index
            for component, at in left[source].items():
                inside = component == mine == of.get(source) and split.get(one) == mine
                here[component] = max(here[component], at - inside)
        if mine is not None:
            stage = here[mine]
            here[mine] = stage + 1
            found[op.index] = stage
        left[op.index] = dict(here)
    return found
