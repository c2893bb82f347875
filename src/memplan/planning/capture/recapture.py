"""Capture a call again with its convolutions in channels last, where that is as good.

ResNet-18 fused in 65 % of eager's bytes took 0.76 s a step so, and 0.85 s as written (medians of eight by turns); a 3D
U-Net took the same in both.
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


MORE = 1.1
"""Factor by which a step may make more bytes in the other layout: more means that it reorders back and forth."""


SHARE = 0.1
"""Smallest share of a step's FLOPs in convolutions: a transformer gains nothing by its one convolution of patches."""


def relaid(model: nn.Module, call: Call, captured: Captured, precision: Precision) -> Captured | None:
    """Capture a call again with its convolutions in channels last; None where the step would not profit.

    Args:
        model, call, precision: as for `capture`.
        captured: the call in the layout that it is written in.
    """
    if captured.opaque or not _convolves_in_order(captured.graph) or not _convolves_much(captured.graph):
        return None
    try:
        recaptured = capture(model, call, precision, relaid=True)
    except MemplanError:  # code that needs contiguous tensors, as view() does
        return None
    return recaptured if _is_as_good(recaptured.graph, captured.graph) else None


def _convolves_in_order(graph: JointGraph) -> bool:
    """Return whether there is a convolution of images or volumes that is not in channels last."""
    first = (graph.values[op.args[0].value] for op in graph.forward_ops if op.target == "aten.convolution.default")
    return any(len(x.shape) in _FORMATS and not _is_channels_last(x) for x in first)


def _convolves_much(graph: JointGraph) -> bool:
    """Return whether convolutions do at least `SHARE` of the forward pass's FLOPs."""
    each = [(op.target, work_of(graph, op).flops) for op in graph.forward_ops]
    convolved = sum(flops for target, flops in each if target == "aten.convolution.default")
    return convolved >= SHARE * sum(flops for _, flops in each)


def _is_channels_last(value: Value) -> bool:
    tensor = torch.empty_strided(value.shape, value.stride, device="meta")
    return tensor.is_contiguous(memory_format=_FORMATS[len(value.shape)])


def _is_as_good(relaid: JointGraph, graph: JointGraph) -> bool:
    """Return whether a step in channels last computes the same, without converting back and forth.

    Three things depend on the layout: random numbers, which are drawn in the order of memory, as_strided, and ops of
    other libraries.
    """
    names = {op.target for op in graph.ops if op.phase == "forward"}  # in backward torch itself looks at gradients so
    if any(name.split(".")[0] not in _CORE or "as_strided" in name for name in names):
        return False
    drawn = (value for op in relaid.ops if op.random for value in op.makes)
    return (
        _computed(relaid) == _computed(graph)
        and [relaid.values[v].stride for v in relaid.outputs] == [graph.values[v].stride for v in graph.outputs]
        and all(op_schema.is_contiguous(relaid.values[value]) for value in drawn)
        and _allocated(relaid) <= MORE * _allocated(graph)
    )


def _computed(graph: JointGraph) -> list[str]:
    """Return the targets of the forward ops without copies.

    A view in one layout can be a copy in the other. If something writes through that view, later ops differ, too.
    """
    return [op.target for op in graph.forward_ops if op.target not in _COPIES]


def _allocated(graph: JointGraph) -> int:
    return sum(graph.values[value].bytes for op in graph.ops for value in op.makes)
