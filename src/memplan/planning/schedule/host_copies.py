"""When copies to host memory and back start and end, and which ops wait for them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from itertools import accumulate
from math import inf
from typing import TYPE_CHECKING

from memplan.planning.graph.joint_graph import JointGraph, Offload

if TYPE_CHECKING:
    from memplan.planning.schedule.actions import Action


def forward_ends(graph: JointGraph) -> list[float]:
    """Seconds at the end of each forward op."""
    return list(accumulate(op.seconds for op in graph.forward_ops))


def backward_begins(graph: JointGraph) -> list[float]:
    """Seconds at which each backward op begins, and at which the last one ends."""
    return list(accumulate((op.seconds for op in graph.backward_ops), initial=0.0))


def in_order(graph: JointGraph, offloads: Iterable[Offload]) -> list[Offload]:
    """Those in the order in which they are copied out."""
    return sorted(offloads, key=lambda one: (graph.maker[one.value].index, one.value))


def stored_after(graph: JointGraph, offloads: Iterable[Offload]) -> dict[int, int]:
    """By value, the position in ``graph.forward_ops`` of the op after which it is freed."""
    ends = forward_ends(graph)
    position = {op.index: at for at, op in enumerate(graph.forward_ops)}
    last = {value: at for at, op in enumerate(graph.forward_ops) for value in (*op.reads, *op.makes)}
    found, done = dict[int, int](), 0.0
    for one in in_order(graph, offloads):
        done = max(done, ends[position[graph.maker[one.value].index]]) + one.copy_seconds
        found[one.value] = max(last[one.value], min(bisect_left(ends, done), len(ends) - 1))
    return found


def fetched_before(graph: JointGraph, needed: Mapping[int, int]) -> dict[int, int]:
    """By value, the position in ``graph.backward_ops`` of the op before which its copy back begins.

    Args:
        graph: the graph.
        needed: by value, the position of the op before which it has to be there. The order in which they are copied is
            the order in which they are needed.
    """
    begins, copies = backward_begins(graph), {one.value: one.copy_seconds for one in graph.offloads}
    found, latest = dict[int, int](), inf
    for value, before in sorted(needed.items(), key=lambda item: (-item[1], -item[0])):
        latest = min(begins[before], latest) - copies[value]
        found[value] = min(before, max(0, bisect_right(begins, latest) - 1))
    return found


def waits(graph: JointGraph, actions: Iterable[Action]) -> dict[int, float]:
    """By value, the seconds that a step waits for its copies: these actions, one after the other, beside two queues."""
    copies = {one.value: one.copy_seconds for one in graph.offloads}
    encodings = {one.value: one for one in graph.encodings}
    free = {"store": 0.0, "fetch": 0.0}
    """When the queue of each direction is."""
    now, done, found = 0.0, dict[int, float](), dict[int, float]()
    for action in actions:
        value = -1 if action.value is None else action.value
        if action.kind == "run" and action.op is not None:
            now += action.called(graph).seconds
        elif action.kind == "encode":
            now += encodings[value].encode_seconds
        elif action.kind == "decode":
            now += encodings[value].decode_seconds
        elif action.kind in free:
            done[value] = free[action.kind] = max(free[action.kind], now) + copies[value]
        elif action.kind in ("stored", "fetched"):
            wait = max(0.0, done[value] - now)
            found[value] = found.get(value, 0.0) + wait
            now += wait
    return found
