"""Split the largest values of a step into ever smaller groups of channels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from memplan.exporting.fused_updates import parameters_worth_fusing, with_fused_updates
from memplan.exporting.lower import estimated_seconds, operations_of, with_bits
from memplan.exporting.lowering.device_graph import ALIASES, DeviceGraph
from memplan.exporting.tiling.channel_components import components
from memplan.exporting.tiling.channel_groups import in_groups
from memplan.planning.graph.editor import Rebuild
from memplan.planning.graph.joint_graph import JointGraph, Ref, map_refs
from memplan.planning.levers.lever import GradientUse

STEP = 4
"""Factor by which the size limit of groups shrinks from one tiling to the next."""
SMALL = 16384
"""Bytes below which a largest value is not split: calls of kernels take memory, too."""
USUAL_OP_LIMIT = 1500
"""Ops of a step, at most, where a step of fewer fits the budget: each op more takes the planner's time and flash."""
MOST = 2600
"""Ops of a step, at most."""


def tilings(device: DeviceGraph, use: GradientUse) -> Iterator[DeviceGraph]:
    """Yield the step unsplit, then with its largest values in ever smaller groups of channels.

    In each, the use of gradients is fused into the kernels that compute them where that saves memory.
    """
    yield _fused(device, use)
    device = replace(device, graph=_without_aliases(device.graph))
    splittable = components(device.graph)
    if not splittable or splittable[0].largest_bytes < SMALL:
        return
    limit, ops_before = splittable[0].largest_bytes // STEP, len(device.graph.ops)
    while True:
        tiled = in_groups(device, limit)
        if tiled is None or not ops_before < len(tiled.graph.ops) <= MOST:
            return
        ops = tuple(replace(op, seconds=estimated_seconds(operations_of(tiled.graph, op))) for op in tiled.graph.ops)
        yield _fused(replace(tiled, graph=with_bits(replace(tiled.graph, ops=ops))), use)
        limit, ops_before = limit // STEP, len(tiled.graph.ops)


def _without_aliases(graph: JointGraph) -> JointGraph:
    """Replace aliases by the values that they view, and remove encodings, which are offered anew after tiling."""
    aliased: dict[int, int] = {}
    """By alias: the value that it views."""
    values = tuple(value for value in graph.values if value.kind not in ("encoded", "host"))
    rebuild = Rebuild(replace(graph, values=values, forms=()))

    def resolved(value: int) -> int:
        return aliased.get(value, value)

    for op in graph.ops:
        if op.target in ALIASES:
            aliased.update((output, resolved(op.args[0].value)) for output in op.outputs if output is not None)
        else:
            without_forward_op = replace(op, gradient_of=None)  # that can be an alias that is removed
            args, kwargs = (map_refs(part, lambda value: Ref(resolved(value))) for part in (op.args, op.kwargs))
            rebuild.add(without_forward_op, args=args, kwargs=kwargs)
    outputs = tuple(map(resolved, graph.outputs))
    gradients = tuple((parameter, resolved(gradient)) for parameter, gradient in graph.gradients)
    mutations = tuple((resident, resolved(new_value)) for resident, new_value in graph.mutations)
    return replace(rebuild.finished(), outputs=outputs, gradients=gradients, mutations=mutations)


def _fused(device: DeviceGraph, use: GradientUse) -> DeviceGraph:
    return with_fused_updates(device, parameters_worth_fusing(device.graph, use) | device.strided_parameter_parts, use)
