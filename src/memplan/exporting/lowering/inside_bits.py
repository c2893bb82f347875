"""Save of a bounded activation, such as ReLU6, a bit for each element: whether it lies within the bounds.

Its gradient reads no more of it, so the activation itself need neither be kept nor computed again for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from math import prod

from memplan.exporting.lowering.device_graph import WORD, rounded_to_words
from memplan.planning.graph.joint_graph import GraphOp, JointGraph, Ref, SavedForm, Value
from memplan.planning.graph.op_schema import arguments_of, is_contiguous
from memplan.planning.levers.encode import NAME, Encode
from memplan.planning.levers.lever import Situation

INSIDE = "inside"
"""The codec: a bit is set where the element is neither at most the lower bound nor at least the upper one."""
GRADIENT = "aten.hardtanh_backward.default"
SMALLEST = 256
"""Smallest value in bytes whose bits are offered: each offer takes the planner's time."""


class InsideBits(Encode):
    """Offers the bits of activations with two bounds."""

    def forms(self, graph: JointGraph, situation: Situation) -> Iterator[tuple[SavedForm, Value]]:
        """Yield an encoding for each activation whose gradient the backward pass computes."""
        for value, readers in sorted(_readers(graph).items()):
            activation = graph.values[value]
            mask_bytes = rounded_to_words(-(-prod(activation.shape) // 8))  # a bit for each element, rounded up
            name = f"{activation.name}_{INSIDE}"
            mask = Value(  # the registry of levers assigns the ids that are -1
                -1, name, "encoded", base=-1, bytes=mask_bytes, shape=(mask_bytes,), stride=(1,), dtype="uint8",
                place=activation.place,
            )  # fmt: skip
            direct = tuple(op.index for op in readers)
            yield SavedForm(NAME, value, encoded=-1, codec=INSIDE, can_restore_value=False, direct_readers=direct), mask


def bounds_of(op: GraphOp) -> tuple[float, float]:
    """Return the bounds of the activation whose gradient an op computes."""
    arguments = arguments_of(op.target, op.args, op.kwargs)
    return float(arguments["min_val"]), float(arguments["max_val"])


def _readers(graph: JointGraph) -> dict[int, list[GraphOp]]:
    """Return by activation the gradient ops that can read its bits. Bits are of one pair of bounds: where gradients
    have several, the most ops with the same."""
    ops_by_bounds: dict[int, dict[tuple[float, float], list[GraphOp]]] = defaultdict(lambda: defaultdict(list))
    for op in graph.backward_ops:
        if op.target == GRADIENT and isinstance(op.args[0], Ref) and isinstance(op.args[1], Ref):
            gradient, value = graph.values[op.args[0].value], graph.values[op.args[1].value]
            maker = graph.maker.get(value.id)
            is_computed = value.kind == "result" and maker is not None and maker.phase == "forward"
            is_whole_storage = not value.is_view and value.bytes == WORD * prod(value.shape)
            # the kernel numbers bits by elements, and reads the gradient at the same position
            same_layout = is_contiguous(value) and is_contiguous(gradient) and gradient.base != value.id
            if is_computed and is_whole_storage and same_layout and value.bytes >= SMALLEST:
                ops_by_bounds[value.id][bounds_of(op)].append(op)
    return {value: max(by_bounds.values(), key=len) for value, by_bounds in ops_by_bounds.items()}
