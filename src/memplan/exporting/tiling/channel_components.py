"""Which values of a device's graph can be computed one group of channels at a time, and which of them only together.

What an activation, a pool, a depthwise convolution or a batch norm makes of a channel follows from that channel alone.
Values that such ops join form a component: either all of them are in groups, or none. A convolution over all channels
ends a component at both sides: of its result it can compute some channels alone, and of its operand it can add what
some channels contribute to what those before them made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memplan.exporting.kernels.elementwise import ELEMENTWISE
from memplan.exporting.lowering import convolution_splitting as conv
from memplan.exporting.lowering import norm_splitting as norm
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
    """A convolution over all channels: what has the channels of its result, and what those of its operand."""

    wide: int
    narrow: int
    weight: int
    """Its first dimension has the channels of ``wide``, its second one those of ``narrow``; or the gradient of one."""
    bias: int | None
    """It has the channels of the result."""


@dataclass(frozen=True)
class Component:
    """Values whose channels are split alike."""

    channels: int
    values: Mapping[int, int]
    """The dimension of channels of each: the second one of activations, the first one of weights."""
    whole: frozenset[int]
    """Of these, what other ops read or make as a whole."""
    largest: int
    """Bytes of the largest of them."""


def sides_of(op: GraphOp) -> Sides | None:
    """Return the sides of a convolution that is one group; None for another op."""
    if op.target not in _CONVOLUTIONS or op.args[groups_at(op)] != 1:
        return None
    made = op.outputs[0]
    assert made is not None, "somebody reads it"
    first, second = op.args[0].value, op.args[1].value
    if op.target == conv.WEIGHT_GRADIENT:
        return Sides(first, second, made, None)
    bias = op.args[2].value if isinstance(op.args[2], Ref) else None
    wide, narrow = (made, first) if op.target == conv.GATHER else (first, made)
    return Sides(wide, narrow, second, bias)


def is_depthwise(graph: JointGraph, op: GraphOp) -> bool:
    """Return whether an op is a convolution with a group for each channel, of one channel each."""
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
    """Return the weight of a convolution, or the gradient of one that an op makes."""
    if op.target not in _CONVOLUTIONS:
        return None
    return op.outputs[0] if op.target == conv.WEIGHT_GRADIENT else op.args[1].value


def joined_by(graph: JointGraph, op: GraphOp) -> tuple[int, ...] | None:
    """Return the values that an op joins in one component; None where it needs several channels at once."""
    found = [*dict.fromkeys((*refs((op.args, op.kwargs)), *(one for one in op.outputs if one is not None)))]
    values = [graph.values[one] for one in found]
    if op.target in ELEMENTWISE:
        kept = len(values[0].shape) >= 3 and all(one.shape == values[0].shape for one in values)
    elif op.target in _POOLS:
        kept = all(len(one.shape) == 4 for one in values)
    else:
        kept = op.target in _PER_CHANNEL or is_depthwise(graph, op)
    activations = [one for one in values if len(one.shape) >= 3 and one.id != weight_of(op)]
    single = all(one.shape[0] == 1 for one in activations)
    return tuple(found) if kept and single and all(map(is_contiguous, values)) else None


def components(graph: JointGraph) -> list[Component]:
    """Return the components that can be split, the largest first."""
    joined, whole, ends = _Joined(), set(graph.outputs), set[int]()
    for op in graph.ops:
        together, sides = joined_by(graph, op), sides_of(op)
        if together is not None:
            joined.add(together)
        elif sides is not None and graph.values[sides.wide].shape[0] == graph.values[sides.narrow].shape[0] == 1:
            for side in (sides.wide, sides.narrow):
                joined.add((side,) if sides.bias is None or side not in op.outputs else (side, sides.bias))
            ends |= {sides.wide, sides.narrow}
        else:
            whole |= {one for one in (*refs((op.args, op.kwargs)), *op.outputs) if one is not None}
    whole |= {value for pair in graph.mutations for value in pair}
    made = (_component(graph, values, whole) for values in joined.sets() if values & ends)
    return sorted((one for one in made if one is not None), key=lambda one: (-one.largest, min(one.values)))


class _Joined:
    """Sets of values, of which any two can become one."""

    def __init__(self) -> None:
        self.of: dict[int, set[int]] = {}

    def add(self, values: Sequence[int]) -> None:
        """Join the sets that these are in."""
        for value in values:
            mine, other = self.of.setdefault(values[0], {values[0]}), self.of.setdefault(value, {value})
            if mine is not other:
                mine |= other
                self.of |= dict.fromkeys(other, mine)

    def sets(self) -> list[frozenset[int]]:
        """Return the sets, in the order in which they began."""
        return list(dict.fromkeys(frozenset(one) for one in self.of.values()))


def _component(graph: JointGraph, values: frozenset[int], whole: set[int]) -> Component | None:
    """Return a component; None where it has one channel, or a weight that is read as a whole, too."""
    weights = {weight for op in graph.ops if (weight := weight_of(op)) is not None}
    activations = [graph.values[one] for one in values if len(graph.values[one].shape) >= 3 and one not in weights]
    counts = {one.shape[1] for one in activations}
    handed = {one for one in values if graph.values[one].kind in ("parameter", "buffer", "constant")}
    gradients = {gradient for of, gradient in graph.gradients if of in handed}
    known = any(graph.values[one].kind == "constant" for one in handed)
    if len(counts) != 1 or 1 in counts or known or whole & (handed | gradients):
        return None
    (channels,) = counts
    axes = {one: 1 if len(graph.values[one].shape) >= 3 and one not in weights else 0 for one in values}
    if any(graph.values[one].shape[axis] != channels for one, axis in axes.items()):
        return None
    largest = max((one.bytes for one in activations if one.kind == "result"), default=0)
    return Component(channels, axes, frozenset(values & whole), largest)
