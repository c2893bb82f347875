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
from memplan.exporting.lowering.device_graph import output_of
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

    wide: int
    """Activation with the channels of the weight's first dimension."""
    narrow: int
    """Activation with the channels of the weight's second dimension."""
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
    """Those that other ops read or compute as a whole."""
    largest: int
    """Bytes of the largest activation."""


def sides_of(op: GraphOp) -> Sides | None:
    """Return the sides of a convolution without groups; None for another op."""
    if op.target not in _CONVOLUTIONS or op.args[groups_at(op)] != 1:
        return None
    output, first, second = output_of(op), op.args[0].value, op.args[1].value
    if op.target == conv.WEIGHT_GRADIENT:
        return Sides(first, second, weight=output, bias=None)
    bias = op.args[2].value if isinstance(op.args[2], Ref) else None
    wide, narrow = (output, first) if op.target == conv.GATHER else (first, output)
    return Sides(wide, narrow, second, bias)


def is_depthwise(graph: JointGraph, op: GraphOp) -> bool:
    """Return whether an op is a convolution whose groups have one channel each."""
    weight = weight_of(op)
    if weight is None:
        return False
    groups = op.args[groups_at(op)]
    shape = graph.values[weight].shape
    return groups == graph.values[op.args[0].value].shape[1] == shape[0] > 1 and shape[1] == 1


def groups_at(op: GraphOp) -> int:
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
    # whole: values that cannot be split; ends: activations at convolutions over all channels
    connections, whole, ends = _DisjointSets(), set(graph.outputs), set[int]()
    for op in graph.ops:
        connected, sides = connected_values(graph, op), sides_of(op)
        if connected is not None:
            connections.add(connected)
        elif sides is not None and graph.values[sides.wide].shape[0] == graph.values[sides.narrow].shape[0] == 1:
            for side in (sides.wide, sides.narrow):
                bias = sides.bias if side in op.outputs else None
                connections.add((side,) if bias is None else (side, bias))
            ends |= {sides.wide, sides.narrow}
        else:
            whole |= {value for value in (*refs((op.args, op.kwargs)), *op.outputs) if value is not None}
    whole |= {value for pair in graph.mutations for value in pair}
    possible = (_component(graph, values, whole) for values in connections.sets() if values & ends)
    return sorted((c for c in possible if c is not None), key=lambda c: (-c.largest, min(c.values)))


class _DisjointSets:
    """Disjoint sets of values, in the order in which they were added."""

    def __init__(self) -> None:
        self.of: dict[int, set[int]] = {}
        """By value: its set, the same object for all of its members."""

    def add(self, values: Sequence[int]) -> None:
        """Merge the sets of these values into one."""
        for value in values:
            first, other = self.of.setdefault(values[0], {values[0]}), self.of.setdefault(value, {value})
            if first is not other:
                first |= other
                self.of |= dict.fromkeys(other, first)

    def sets(self) -> list[frozenset[int]]:
        return list(dict.fromkeys(map(frozenset, self.of.values())))


def _component(graph: JointGraph, values: frozenset[int], whole: set[int]) -> Component | None:
    """Return the component of these values, of which those in `whole` cannot be split themselves.

    None if their numbers of channels differ or are 1, if one is a constant, or if an op needs one of their parameters,
    buffers or gradients as a whole.
    """
    weights = {weight for op in graph.ops if (weight := weight_of(op)) is not None}
    axes = {v: 1 if len(graph.values[v].shape) >= 3 and v not in weights else 0 for v in values}
    activations = [graph.values[v] for v in values if axes[v] == 1]
    counts = {activation.shape[1] for activation in activations}
    stored = {v for v in values if graph.values[v].kind in ("parameter", "buffer", "constant")}
    gradients = {gradient for of, gradient in graph.gradients if of in stored}
    has_constant = any(graph.values[v].kind == "constant" for v in stored)
    if len(counts) != 1 or 1 in counts or has_constant or whole & (stored | gradients):
        return None
    (channels,) = counts
    if any(graph.values[v].shape[axis] != channels for v, axis in axes.items()):
        return None
    largest = max((activation.bytes for activation in activations if activation.kind == "result"), default=0)
    return Component(channels, axes, frozenset(values & whole), largest)
