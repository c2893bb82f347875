"""Gradients that never exist as a whole: the kernel that computes an element updates the weight with it at once.

That takes no memory for the gradient, but the weight must not be read any more: the input's gradient comes first, while
what the weight was multiplied with is still there. For small weights of large activations it is better to have the
gradient, and let the activation go.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from memplan.exporting.lowering.convolution_splitting import WEIGHT_GRADIENT
from memplan.exporting.lowering.device_graph import DeviceGraph
from memplan.planning.graph.editor import Rebuild
from memplan.planning.graph.joint_graph import RESIDENT, GraphOp, JointGraph

ELEMENT_BY_ELEMENT = (WEIGHT_GRADIENT, "aten.mm.default")
"""Ops whose kernels can hand on each element as soon as it is complete."""


def fusible(graph: JointGraph) -> dict[int, GraphOp]:
    """Return, by parameter, the op whose kernel could apply its gradient."""
    bases = [graph.base(gradient) for _, gradient in graph.gradients]
    read = {base for op in graph.ops if not op.is_view for base in op.reads}
    outputs = {graph.base(value) for value in graph.outputs}
    found = {}
    for of, gradient in graph.gradients:
        base, maker = graph.base(gradient), graph.maker.get(graph.base(gradient))
        alone = bases.count(base) == 1 and base not in read | outputs
        whole = graph.values[gradient].stride == graph.values[of].stride
        if maker is not None and maker.target in ELEMENT_BY_ELEMENT and alone and whole:
            found[of] = maker
    return found


def worthwhile(graph: JointGraph) -> frozenset[int]:
    """Return the parameters whose gradient takes more than keeping its op's operand a little longer."""
    return frozenset(
        of for of, op in fusible(graph).items() if graph.values[op.makes[0]].bytes > _longer(graph, of, op)
    )


def _longer(graph: JointGraph, of: int, maker: GraphOp) -> int:
    """Return the bytes that are there at once only if the gradient is applied at once: the smaller of what was
    multiplied with the weight, and its gradient; 0 where either takes nothing."""
    given = [graph.values[base] for base in maker.reads]
    kept = [0 if one.kind in RESIDENT else one.bytes for one in given if one.op is None or _is_forward(graph, one.op)]
    made = [graph.values[value].bytes for op in graph.backward_ops if of in op.reads for value in op.makes]
    return min(max(kept, default=0), max(made, default=0))


def _is_forward(graph: JointGraph, op: int) -> bool:
    return graph.ops[op].phase == "forward"


def with_fused(device: DeviceGraph, parameters: Collection[int]) -> DeviceGraph:
    """Let the gradients of these parameters be applied element by element, after the last op that reads the weight."""
    graph = device.graph
    makers = {of: op for of, op in fusible(graph).items() if of in parameters}
    if not makers:
        return device
    groups = {of: _group(graph, op) for of, op in makers.items()}
    later: dict[int, list[GraphOp]] = {}
    for of, group in groups.items():
        last = max((op.index for op in graph.backward_ops if of in op.reads), default=-1)
        later.setdefault(max(last, group[0].index), []).extend(group)
    moved = {op.index for group in groups.values() for op in group}
    rebuild = Rebuild(graph)
    bases = frozenset(op.makes[0] for op in makers.values())
    rebuild.values = [replace(v, bytes=0) if v.id in bases else v for v in rebuild.values]
    for op in graph.ops:
        if op.index not in moved:
            rebuild.add(op)
        for one in later.get(op.index, ()):
            rebuild.add(one)
    return replace(device, graph=_with_forms(rebuild.finished(), graph), fused=bases)


def _with_forms(made: JointGraph, before: JointGraph) -> JointGraph:
    """Return the graph with the kept forms' readers under their new indices."""
    outputs = {op.outputs: op.index for op in made.ops}
    forms = tuple(
        replace(form, direct=tuple(outputs[before.ops[at].outputs] for at in form.direct)) for form in before.forms
    )
    return replace(made, forms=forms)


def _group(graph: JointGraph, op: GraphOp) -> list[GraphOp]:
    """Return an op and what only looks into its result."""
    return [op, *(other for other in graph.ops if other.is_view and op.makes[0] in other.reads)]
