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
    """Return a call captured again with its convolutions in channels last; None where that does not pay.

    Args:
        model, call, precision: as for `capture`.
        captured: the call as it is.
    """
    if captured.opaque or not _convolves_in_order(captured.graph) or not _convolves_much(captured.graph):
        return None
    try:
        found = capture(model, call, precision, relaid=True)
    except MemplanError:  # code that takes tensors to be in order, as view() does
        return None
    return found if _is_as_good(found.graph, captured.graph) else None


def _convolves_in_order(graph: JointGraph) -> bool:
    """Return whether there is a convolution of images or volumes that is not in channels last."""
    first = (graph.values[op.args[0].value] for op in graph.forward_ops if op.target == "aten.convolution.default")
    return any(len(x.shape) in _FORMATS and not _is_channels_last(x) for x in first)


def _convolves_much(graph: JointGraph) -> bool:
    """Return whether convolutions are a good part of what it computes."""
    each = [(op.target, work_of(graph, op).flops) for op in graph.forward_ops]
    convolved = sum(flops for target, flops in each if target == "aten.convolution.default")
    return convolved >= SHARE * sum(flops for _, flops in each)


def _is_channels_last(value: Value) -> bool:
    shown = torch.empty_strided(value.shape, value.stride, device="meta")
    return shown.is_contiguous(memory_format=_FORMATS[len(value.shape)])


def _is_as_good(relaid: JointGraph, graph: JointGraph) -> bool:
    """Return whether a step computes the same in the other layout, and does not change it back and forth.

    Random numbers are drawn in the order of memory, and what the user's code looks at as memory, or hands to ops that
    are not torch's, sees the layout.
    """
    names = {op.target for op in graph.ops if op.phase == "forward"}  # in backward torch itself looks at gradients so
    if any(name.split(".")[0] not in _CORE or "as_strided" in name for name in names):
        return False
    drawn = (made for op in relaid.ops if op.random for made in op.makes)
    return (
        _computed(relaid) == _computed(graph)
        and [relaid.values[one].stride for one in relaid.outputs] == [graph.values[one].stride for one in graph.outputs]
        and all(op_schema.is_contiguous(relaid.values[made]) for made in drawn)
        and _made(relaid) <= MORE * _made(graph)
    )


def _computed(graph: JointGraph) -> list[str]:
    """Return the forward pass without copies. What is a view in one layout is a copy in the other, into which nothing
    that is written comes back: then what follows is not the same."""
    return [op.target for op in graph.forward_ops if op.target not in _COPIES]


def _made(graph: JointGraph) -> int:
    return sum(graph.values[made].bytes for op in graph.ops for made in op.makes)
