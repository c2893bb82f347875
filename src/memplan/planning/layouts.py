"""Convolutions of tensors in channels last: the layout that oneDNN computes in, so that it need not change it and back.

What a fused step computes may be rounded otherwise, so it may be laid out otherwise, too. A step is captured anew with
the first operand of every convolution of images or volumes in channels last; what follows takes that over, as eager
mode has it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from memplan.errors import MemplanError
from memplan.planning import forms
from memplan.planning.calls import Call
from memplan.planning.graph import JointGraph, Value
from memplan.planning.precision import Precision
from memplan.planning.roofline import work_of

if TYPE_CHECKING:
    from memplan.planning.capture import Captured

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""By number of dimensions."""
_CONVOLUTIONS = frozenset([torch.conv2d, torch.conv3d, torch.conv_transpose2d, torch.conv_transpose3d])
_CORE = ("aten", "prims", "memplan")
_COPIES = frozenset(["aten.clone.default", "aten._to_copy.default", "aten.copy.default"])
MORE = 1.1
"""How many times the bytes a step may make in the other layout: changed back and forth, it gains nothing."""
SHARE = 0.1
"""Of a step's FLOPs that convolutions have at least: to capture a transformer again for its one of patches gains
nothing."""


class ChannelsLast(TorchFunctionMode):
    """Hands convolutions their first operand in channels last."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _CONVOLUTIONS:
            if args:
                args = (channels_last(args[0]), *args[1:])
            else:
                kwargs = {**kwargs, "input": channels_last(kwargs["input"])}
        return func(*args, **kwargs)


def channels_last(tensor: Tensor) -> Tensor:
    """The tensor in channels last, where it has channels."""
    known = _FORMATS.get(tensor.dim())
    return tensor if known is None else tensor.contiguous(memory_format=known)


def in_order(tensor: Tensor) -> Tensor:
    """A result in the order that callers expect."""
    known = _FORMATS.get(tensor.dim())
    return tensor if known is None or not tensor.is_contiguous(memory_format=known) else tensor.contiguous()


def relaid(model: nn.Module, call: Call, captured: Captured, precision: Precision) -> Captured | None:
    """A call captured anew with its convolutions in channels last; None where that is no use.

    Args:
        model, call, precision: as for `capture`.
        captured: the call as it is.
    """
    from memplan.planning.capture import capture

    if captured.opaque or not _convolves_in_order(captured.graph) or not _convolves_much(captured.graph):
        return None
    try:
        found = capture(model, call, precision, relaid=True)
    except MemplanError:  # code that takes tensors to be in order, as view() does
        return None
    return found if _is_as_good(found.graph, captured.graph) else None


def _convolves_in_order(graph: JointGraph) -> bool:
    """Whether there is a convolution of images or volumes that is not in channels last."""
    first = (graph.values[op.args[0].value] for op in graph.forward_ops if op.target == "aten.convolution.default")
    return any(len(x.shape) in _FORMATS and not _is_channels_last(x) for x in first)


def _convolves_much(graph: JointGraph) -> bool:
    """Whether convolutions are a good part of what it computes."""
    each = [(op.target, work_of(graph, op).flops) for op in graph.forward_ops]
    convolved = sum(flops for target, flops in each if target == "aten.convolution.default")
    return convolved >= SHARE * sum(flops for _, flops in each)


def _is_channels_last(value: Value) -> bool:
    shown = torch.empty_strided(value.shape, value.stride, device="meta")
    return shown.is_contiguous(memory_format=_FORMATS[len(value.shape)])


def _is_as_good(relaid: JointGraph, graph: JointGraph) -> bool:
    """Whether a step computes the same in the other layout, and does not change it back and forth.

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
        and all(forms.is_contiguous(relaid.values[made]) for made in drawn)
        and _made(relaid) <= MORE * _made(graph)
    )


def _computed(graph: JointGraph) -> list[str]:
    """The forward pass without copies. What is a view in one layout is a copy in the other, into which nothing that is
    written comes back: then what follows is not the same."""
    return [op.target for op in graph.forward_ops if op.target not in _COPIES]


def _made(graph: JointGraph) -> int:
    return sum(graph.values[made].bytes for op in graph.ops for made in op.makes)
