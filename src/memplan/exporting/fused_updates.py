"""Fuse the optimizer's update of a weight into the kernel that computes its gradient, element by element.

The gradient then takes no memory, but the update must come after the last read of the weight. So the input's gradient
is computed first, while the activation for the weight's gradient is still live. For small weights and large activations
it is better to store the gradient and free the activation. Where gradients are added up instead, the weight does not
change, so the order stays, and fusing always saves memory.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from memplan.exporting.lowering.convolution_splitting import WEIGHT_GRADIENT
from memplan.exporting.lowering.device_graph import DeviceGraph
from memplan.planning.graph.editor import Rebuild
from memplan.planning.graph.joint_graph import RESIDENT, GraphOp, JointGraph
from memplan.planning.levers.lever import GradientUse

ELEMENT_BY_ELEMENT = (WEIGHT_GRADIENT, "aten.mm.default", "aten.embedding_dense_backward.default")
"""Ops whose kernels can pass each element to an update as soon as it is complete."""


def fusible_updates(graph: JointGraph) -> dict[int, GraphOp]:
    """Return the parameters whose updates can be fused, each with the op that computes its gradient.

    Only the update may read the gradient, and the gradient has the parameter's strides.
    """
    gradient_bases = [graph.base(gradient) for _, gradient in graph.gradients]
    used = {base for op in graph.ops if not op.is_view for base in op.reads} | set(map(graph.base, graph.outputs))
    makers = dict[int, GraphOp]()
    for parameter, gradient in graph.gradients:
        base, maker = graph.base(gradient), graph.maker.get(graph.base(gradient))
        only_updates = gradient_bases.count(base) == 1 and base not in used
        same_layout = graph.values[gradient].stride == graph.values[parameter].stride
        if maker is not None and maker.target in ELEMENT_BY_ELEMENT and only_updates and same_layout:
            makers[parameter] = maker
    return makers


def parameters_worth_fusing(graph: JointGraph, use: GradientUse) -> frozenset[int]:
    """Return the parameters for which a fused update saves more bytes than it costs in longer lifetimes."""
    return frozenset(
        parameter
        for parameter, op in fusible_updates(graph).items()
        if use.accumulates or graph.values[op.makes[0]].bytes > _cost_of_later_update(graph, parameter, op)
    )


def _cost_of_later_update(graph: JointGraph, parameter: int, maker: GraphOp) -> int:
    """Return the bytes that are live longer if a parameter's update is fused.

    A fused update comes after the last read of the weight. So the activation that the weight's gradient reads is live
    together with the input's gradient. Without fusion these could share memory: the smaller of both is the cost.
    """
    operands = [graph.values[base] for base in maker.reads]
    activations = [v for v in operands if v.op is None or graph.ops[v.op].phase == "forward"]
    activation_bytes = [0 if v.kind in RESIDENT else v.bytes for v in activations]
    readers = [op for op in graph.backward_ops if parameter in op.reads]
    input_gradient_bytes = [graph.values[value].bytes for op in readers for value in op.makes]
    return min(max(activation_bytes, default=0), max(input_gradient_bytes, default=0))


def with_fused_updates(device: DeviceGraph, parameters: Collection[int], use: GradientUse) -> DeviceGraph:
    """Fuse the updates of these parameters, where possible, into the ops that compute their gradients.

    These ops move to after the last op that reads the weight. Where gradients are only added up (``use.adds``), the
    weight does not change, and they stay.
    """
    graph = device.graph
    makers = {parameter: op for parameter, op in fusible_updates(graph).items() if parameter in parameters}
    if not makers:
        return device
    moved_after: dict[int, list[GraphOp]] = {}
    """By op: the ops that follow it now."""
    moved_indices = set[int]()
    for parameter, maker in makers.items():
        # the op that computes the gradient, and the views of the gradient, which move with it
        group = [maker, *(op for op in graph.ops if op.is_view and maker.makes[0] in op.reads)]
        readers = () if use.accumulates else graph.backward_ops
        last_reader = max((op.index for op in readers if parameter in op.reads), default=-1)
        moved_after.setdefault(max(last_reader, maker.index), []).extend(group)
        moved_indices |= {op.index for op in group}
    rebuild = Rebuild(graph)
    fused = frozenset(maker.makes[0] for maker in makers.values())
    rebuild.values = [replace(v, bytes=0) if v.id in fused else v for v in rebuild.values]  # they are never stored
    for op in graph.ops:
        if op.index not in moved_indices:
            rebuild.add(op)
        for moved_op in moved_after.get(op.index, ()):
            rebuild.add(moved_op)
    return replace(device, graph=_with_forms(rebuild.finished(), graph), fused_gradients=fused)


def _with_forms(reordered: JointGraph, original: JointGraph) -> JointGraph:
    """Return the reordered graph with the saved forms of `original`, whose readers have new indices."""
    new_index = {op.outputs: op.index for op in reordered.ops}  # results do not change
    forms = tuple(
        replace(form, direct_readers=tuple(new_index[original.ops[reader].outputs] for reader in form.direct_readers))
        for form in original.forms
    )
    return replace(reordered, forms=forms)
