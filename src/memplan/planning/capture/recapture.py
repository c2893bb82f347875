"""Capture a call again with its convolutions in channels last, if the result is equivalent.

ResNet-18, fused, in 65 % of eager's bytes: 0.76 s a step in channels last, 0.85 s as written (medians of eight,
alternating). A 3D U-Net took the same in both.
"""

from __future__ import annotations

import torch
from torch import nn

from memplan.errors import MemplanError
from memplan.planning.capture.capture import Captured, capture
from memplan.planning.capture.channels_last import _FORMATS
from memplan.planning.capture.flat_call import Call
from memplan.planning.graph import op_schema
from memplan.planning.graph.joint_graph import JointGraph, Value
from memplan.planning.graph.precision import Precision
from memplan.planning.graph.roofline import work_of

_CORE = ("aten", "prims", "memplan")
_COPIES = frozenset(["aten.clone.default", "aten._to_copy.default", "aten.copy.default"])
MAX_ALLOCATION_RATIO = 1.1
"""Largest factor in allocated bytes between the layouts: beyond it the step converts back and forth."""
MIN_CONVOLUTION_SHARE = 0.1
"""Smallest share of convolutions in the FLOPs of a step, which excludes the patch embedding of a transformer."""


def recapture_in_channels_last(
    model: nn.Module, call: Call, captured: Captured, precision: Precision
) -> Captured | None:
    """Capture a call again with its convolutions in channels last; None if the step would not profit."""
    graph = captured.graph
    convolutions = [op for op in graph.forward_ops if op.target == "aten.convolution.default"]
    images = (graph.values[op.args[0].value] for op in convolutions)
    if captured.opaque_calls or not any(len(x.shape) in _FORMATS and not _is_channels_last(x) for x in images):
        return None
    flops = {op.index: work_of(graph, op).flops for op in graph.forward_ops}
    if sum(flops[op.index] for op in convolutions) < MIN_CONVOLUTION_SHARE * sum(flops.values()):
        return None
    try:
        recaptured = capture(model, call, precision, channels_last=True)
    except MemplanError:  # some code needs contiguous tensors, for view()
        return None
    return recaptured if _is_equivalent(recaptured.graph, captured.graph) else None


def _is_channels_last(value: Value) -> bool:
    """Return whether a tensor of four or five dimensions is in channels last, by its shape and strides."""
    tensor = torch.empty_strided(value.shape, value.stride, device="meta")
    return tensor.is_contiguous(memory_format=_FORMATS[len(value.shape)])


def _is_equivalent(channels_last: JointGraph, graph: JointGraph) -> bool:
    """Return whether a step in channels last computes the same as ``graph``, without converting back and forth. Random
    numbers (drawn in the order of memory), as_strided, and ops of other libraries depend on the layout."""
    targets = {op.target for op in graph.ops if op.phase == "forward"}  # torch itself uses as_strided in backward
    if any(target.split(".")[0] not in _CORE or "as_strided" in target for target in targets):
        return False
    random_values = (value for op in channels_last.ops if op.random for value in op.makes)
    return (
        _ops_without_copies(channels_last) == _ops_without_copies(graph)
        and [channels_last.values[v].stride for v in channels_last.outputs]
        == [graph.values[v].stride for v in graph.outputs]
        and all(op_schema.is_contiguous(channels_last.values[value]) for value in random_values)
        and _allocated_bytes(channels_last) <= MAX_ALLOCATION_RATIO * _allocated_bytes(graph)
    )


def _ops_without_copies(graph: JointGraph) -> list[str]:
    """Return the targets of the forward ops without copies, in order, for comparing two layouts.

    A view in one layout can be a copy in the other. If something writes through that view, later ops differ, too.
    """
    return [op.target for op in graph.forward_ops if op.target not in _COPIES]


def _allocated_bytes(graph: JointGraph) -> int:
    """Return the total bytes of all results, whenever they are freed."""
    return sum(graph.values[value].bytes for op in graph.ops for value in op.makes)
