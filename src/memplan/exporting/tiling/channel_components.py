"""Find the values of a graph that can be computed one group of channels at a time, and those that have to be together.

Activations, pools, depthwise convolutions and batch norms compute each channel from the same channel of their operands.
Values that such ops connect form a component: either all of them are split into groups, or none. A convolution over all
channels ends a component on both sides: it can compute some channels of its result alone, and it can add the
contribution of some channels of its operand to the sum over the channels before them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memplan.exporting.int8.int8_ops import DEQUANTIZE
from memplan.exporting.kernels.elementwise import ELEMENTWISE
from memplan.exporting.lowering import convolution_splitting as conv
from memplan.exporting.lowering import norm_splitting as norm
from memplan.exporting.lowering.device_graph import first_output
from memplan.planning.graph.joint_graph import GraphOp, JointGraph, Ref, refs
from memplan.planning.graph.op_schema import is_contiguous

_CONVOLUTIONS = (conv.GATHER, conv.SCATTER, conv.WEIGHT_GRADIENT)
_PER_CHANNEL = (norm.BATCH_STATISTICS, norm.BATCH_APPLY, norm.BATCH_FIXED, norm.BATCH_SUMS, norm.BATCH_INPUT,
                norm.BATCH_FIXED_INPUT, conv.CHANNEL_SUM)  # fmt: skip
_POOLS = (
    "aten.max_pool2d_with_indices.default", "aten.max_pool2d_with_indices_backward.default", "aten.avg_pool2d.default",
    "aten.avg_pool2d_backward.default", "aten._adaptive_avg_pool2d.default",
    "aten._adaptive_avg_pool2d_backward.default",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sides:
    """The values of a convolution over all channels, by the channels that they have."""

    of_dim_0: int
    """Activation with the channels of the weight's dimension 0."""
    of_dim_1: int
    """Activation with the channels of the weight's dimension 1."""
    weight: int
    """The weight, or its gradient."""
    bias: int | None
    """It has the channels of the result."""


@dataclass(frozen=True)
class Component:
    """Values whose channels can only be split together."""

    channels: int
    values: Mapping[int, int]
    """By value: its dimension of channels, 1 of activations and 0 of weights."""
    whole: frozenset[int]
    """Those that other ops read or compute as a whole: they stay in memory unsplit, and groups copy their parts."""
    largest_bytes: int
    """Bytes of the largest activation."""


def sides_of(op: GraphOp) -> Sides | None:
    """Return the sides of a convolution without groups; None for another op."""
    if op.target not in _CONVOLUTIONS or op.args[groups_position(op)] != 1:
        return None
    output, first, second = first_output(op), op.args[0].value, op.args[1].value
    if op.target == conv.WEIGHT_GRADIENT:
        return Sides(of_dim_0=first, of_dim_1=second, weight=output, bias=None)
    bias = op.args[2].value if isinstance(op.args[2], Ref) else None
    of_dim_0, of_dim_1 = (output, first) if op.target == conv.GATHER else (first, output)
    return Sides(of_dim_0, of_dim_1, weight=second, bias=bias)


def is_depthwise(graph: JointGraph, op: GraphOp) -> bool:
    """Return whether an op is a convolution whose groups have one channel each."""
    weight = weight_of(op)
    if weight is None:
        return False
    groups, channels = op.args[groups_position(op)], graph.values[op.args[0].value].shape[1]
    out_channels, group_channels, *_ = graph.values[weight].shape
    return groups == channels == out_channels > 1 and group_channels == 1


def groups_position(op: GraphOp) -> int:
    """Return the position of the number of groups among a convolution's arguments."""
    return 5 if op.target == conv.WEIGHT_GRADIENT else 6


def weight_of(op: GraphOp) -> int | None:
    """Return the weight that a convolution reads, or whose gradient the op computes as that gradient; else None."""
    if op.target not in _CONVOLUTIONS:
        return None
    return op.outputs[0] if op.target == conv.WEIGHT_GRADIENT else op.args[1].value


def connected_values(graph: JointGraph, op: GraphOp) -> tuple[int, ...] | None:
    """Return all operands and results of an op that computes each channel from the same channel of its operands: they
    belong to the same component. None for another op."""
    numbers = tuple(dict.fromkeys((*refs((op.args, op.kwargs)), *(v for v in op.outputs if v is not None))))
    values = [graph.values[number] for number in numbers]
    if op.target in ELEMENTWISE or op.target == DEQUANTIZE:
        per_channel = len(values[0].shape) >= 3 and all(value.shape == values[0].shape for value in values)
    elif op.target in _POOLS:
        per_channel = all(len(value.shape) == 4 for value in values)
    else:
        per_channel = op.target in _PER_CHANNEL or is_depthwise(graph, op)
    activations = [value for value in values if len(value.shape) >= 3 and value.id != weight_of(op)]
    single_sample = all(value.shape[0] == 1 for value in activations)
    return numbers if per_channel and single_sample and all(map(is_contiguous, values)) else None


def components(graph: JointGraph) -> list[Component]:
    """Return the components that can be split, that with the largest activation first. A component is bounded by
    convolutions over all channels; what other ops read or compute stays whole."""
    connections, used_whole = _DisjointSets(), set(graph.outputs)
    ends = set[int]()  # activations at convolutions over all channels
    for op in graph.ops:
        connected, sides = connected_values(graph, op), sides_of(op)
        if connected is not None:
            connections.add(connected)
        elif sides is not None and all(graph.values[v].shape[0] == 1 for v in (sides.of_dim_0, sides.of_dim_1)):
            for side in (sides.of_dim_0, sides.of_dim_1):
                bias = sides.bias if side in op.outputs else None
                connections.add((side,) if bias is None else (side, bias))
            ends |= {sides.of_dim_0, sides.of_dim_1}
        else:
            used_whole |= {value for value in (*refs((op.args, op.kwargs)), *op.outputs) if value is not None}
    used_whole |= {value for pair in graph.mutations for value in pair}
    candidates = (_component(graph, values, used_whole) for values in connections.sets() if values & ends)
    return sorted((c for c in candidates if c is not None), key=lambda c: (-c.largest_bytes, min(c.values)))


class _DisjointSets:
    """Disjoint sets of values, in the order in which they were added."""

    def __init__(self) -> None:
        self.set_of: dict[int, set[int]] = {}
        """By value: its set, the same object for all of its members."""

    def add(self, values: Sequence[int]) -> None:
        """Merge the sets of these values into one."""
        merged = self.set_of.setdefault(values[0], {values[0]})
        for value in values:
            other = self.set_of.setdefault(value, {value})
            if merged is not other:
                merged |= other
                self.set_of |= dict.fromkeys(other, merged)

    def sets(self) -> list[frozenset[int]]:
        return list(dict.fromkeys(map(frozenset, self.set_of.values())))


def _component(graph: JointGraph, values: frozenset[int], used_whole: set[int]) -> Component | None:
    """Return the component of these values, of which those in `used_whole` stay whole in memory.

    None if their numbers of channels differ or are 1, if one is a constant, or if an op needs one of their parameters,
    buffers or gradients as a whole.
    """
    weights = {weight for op in graph.ops if (weight := weight_of(op)) is not None}
    axes = {v: 1 if len(graph.values[v].shape) >= 3 and v not in weights else 0 for v in values}
    activations = [graph.values[v] for v in values if axes[v] == 1]
    channel_counts = {activation.shape[1] for activation in activations}
    stored = {v for v in values if graph.values[v].kind in ("parameter", "buffer", "constant")}
    gradients = {gradient for parameter, gradient in graph.gradients if parameter in stored}
    has_constant = any(graph.values[v].kind == "constant" for v in stored)
    if len(channel_counts) != 1 or 1 in channel_counts or has_constant or used_whole & (stored | gradients):
        return None
    (channels,) = channel_counts
    if any(graph.values[v].shape[axis] != channels for v, axis in axes.items()):
        return None
    largest_bytes = max((activation.bytes for activation in activations if activation.kind == "result"), default=0)
    return Component(channels, axes, frozenset(values & used_whole), largest_bytes)
