"""Values that wait for the backward pass in host memory: which may, when each is copied, and what the step waits.

A copy runs beside the ops, on a stream of its own; of each direction there is one queue, first come, first served.

* Out: the copy begins when the value is made. Its memory is freed after the first op, from the last one of the forward
  pass that reads the value on, by whose end the copy is done: by the seconds of the graph's ops, with what is in the
  queue before it. At the end of the forward pass the step waits for what is not done.
* Back: the value's memory is taken, and the copy begins, as late as it can to be done when the value is first needed,
  with what has to be copied after it. At the beginning of the backward pass that may be too late: then the step waits
  where the value is needed.

What is made again meanwhile, encoded or decoded is not in these seconds. It takes time, too, so that a copy is done
earlier than planned, seen from the ops, and never later. What the step really waits is counted with it (`waits`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import accumulate
from math import inf, prod
from typing import TYPE_CHECKING

from memplan.devices import Device
from memplan.planning import roofline
from memplan.planning.forms import is_dense, itemsize
from memplan.planning.graph import JointGraph, Offload

if TYPE_CHECKING:
    from memplan.planning.schedule import Action

WORTHWHILE = 1 << 20
"""Bytes that a value must at least have: calls and events of a smaller one take as long as its copy."""


def with_offloads(graph: JointGraph, device: Device, *, least: int = WORTHWHILE) -> JointGraph:
    """The graph with the values that may be offloaded from a card; as it is, where its link is not known.

    Args:
        graph: one without them.
        device: the card.
        least: bytes that a value must have.
    """
    if device.link is None:
        return graph
    rates, link = roofline.rates_of(device), device.link * roofline.LINK_SHARE
    needed = {value for op in graph.backward_ops for value in op.reads}
    needed |= {value for op in graph.forward_ops for value in op.reads}  # so that another one can be made again
    fixed = {graph.base(value) for value in graph.outputs} | {graph.base(source) for _, source in graph.mutations}
    values, found = list(graph.values), list[Offload]()
    for op in graph.forward_ops:
        for at in op.makes:
            value = graph.values[at]
            whole = is_dense(value) and value.bytes == prod(value.shape) * itemsize(value.dtype)
            if not whole or value.bytes < least or at in fixed | graph.irreplaceable or at not in needed:
                continue
            name, id = f"{value.name}_host", len(values)
            host = replace(value, id=id, name=name, kind="host", base=id, bytes=0, op=None)
            values.append(host)
            copied = roofline.Work(0, value.bytes, value.dtype)  # on the card, once out of its memory and once into it
            found.append(Offload(at, host.id, value.bytes / link, 2 * rates.seconds(copied)))
    return replace(graph, values=tuple(values), offloads=tuple(found))


# -- when


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
