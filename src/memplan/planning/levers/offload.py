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

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from memplan.devices import Device
from memplan.planning.graph import roofline
from memplan.planning.graph.joint_graph import JointGraph, Offload
from memplan.planning.graph.op_schema import is_dense, itemsize

if TYPE_CHECKING:
    pass

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
