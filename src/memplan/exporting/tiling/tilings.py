"""How far large values are computed a few channels at a time: as little as brings a step within its budget."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from memplan.exporting.fused_updates import with_fused, worthwhile
from memplan.exporting.lower import seconds, with_bits, work
from memplan.exporting.lowering.device_graph import DeviceGraph
from memplan.exporting.tiling.channel_components import components
from memplan.exporting.tiling.channel_groups import in_groups
from memplan.planning.graph.editor import Rebuild
from memplan.planning.graph.joint_graph import JointGraph, Ref, map_refs

STEP = 4
"""So many times smaller are the parts of the largest value each time."""
SMALL = 16384
"""Bytes of a value that is not worth it: calls of kernels take memory, too."""
MOST = 1500
"""Ops of a step, at most."""


def tilings(device: DeviceGraph) -> Iterator[DeviceGraph]:
    """Yield the same step with its largest values in ever smaller groups of channels, and gradients applied as they
    are made; the step as it is first."""
    yield _fused(device)
    device = replace(device, graph=_without_aliases(device.graph))
    found = components(device.graph)
    if not found or found[0].largest < SMALL:
        return
    limit, before = found[0].largest // STEP, len(device.graph.ops)
    while True:
        made = in_groups(device, limit)
        if made is None or not before < len(made.graph.ops) <= MOST:
            return
        ops = tuple(replace(op, seconds=seconds(work(made.graph, op))) for op in made.graph.ops)
        yield _fused(replace(made, graph=with_bits(replace(made.graph, ops=ops))))
        limit, before = limit // STEP, len(made.graph.ops)


def _without_aliases(graph: JointGraph) -> JointGraph:
    """Let ops read values themselves, not views of all of them. The forms of values in fewer bits are left out."""
    source: dict[int, int] = {}
    values = tuple(value for value in graph.values if value.kind not in ("encoded", "host"))
    rebuild = Rebuild(replace(graph, values=values, forms=()))

    def itself(value: int) -> Ref:
        return Ref(source.get(value, value))

    for op in graph.ops:
        if op.target in _ALIASES:
            source.update((made, itself(op.args[0].value).value) for made in op.outputs if made is not None)
        else:
            own = replace(op, gradient_of=None)  # that can be a view that is left out
            rebuild.add(own, args=map_refs(op.args, itself), kwargs=map_refs(op.kwargs, itself))
    outputs = tuple(source.get(one, one) for one in graph.outputs)
    gradients = tuple((of, source.get(one, one)) for of, one in graph.gradients)
    mutations = tuple((target, source.get(one, one)) for target, one in graph.mutations)
    return replace(rebuild.finished(), outputs=outputs, gradients=gradients, mutations=mutations)


_ALIASES = ("aten.alias.default", "aten.detach.default")


def _fused(device: DeviceGraph) -> DeviceGraph:
    return with_fused(device, worthwhile(device.graph) | device.strided)
