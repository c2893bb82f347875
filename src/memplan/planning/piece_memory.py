"""Estimate the memory that a piece of a segment takes, before the segment is traced.

The ops of a piece run on a share of the axis: in the forward pass, and again under autograd before their derivatives.
What is live at each op follows from what the ops and their derivatives read in the joint graph. Values and workspaces
are those of the whole, divided by the number of pieces; elements at borders, which two pieces compute, count twice.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from memplan.planning.graph.joint_graph import GraphOp, JointGraph
from memplan.planning.tiles.tiled import Tiled

_COPIES_WINDOWS = frozenset(["aten.convolution.default", "aten.convolution_backward.default"])
"""Ops that copy a window of an operand along a dimension of space, which is not contiguous."""


class Derivatives:
    """The backward ops of a step, by the forward ops whose derivatives they compute."""

    def __init__(self, graph: JointGraph) -> None:
        self.graph = graph
        self._by_forward_op: dict[int, list[GraphOp]] = {}
        """By index of the forward op, in the captured order."""
        self._sums_of: dict[int, list[GraphOp]] = {}
        """By value: ops that read it and belong to no forward op. They add the gradients of several readers."""
        for op in graph.ops:
            if op.phase != "backward" or op.is_view:
                continue
            if op.gradient_of is not None:
                self._by_forward_op.setdefault(op.gradient_of, []).append(op)
                continue
            for value in op.reads:
                self._sums_of.setdefault(value, []).append(op)

    def of(self, ops: Sequence[GraphOp]) -> list[GraphOp]:
        """Return the backward ops of some forward ops in the captured order, with sums of the gradients they
        compute."""
        own = [derivative for op in ops for derivative in self._by_forward_op.get(op.index, ())]
        sums = [each for derivative in own for value in derivative.makes for each in self._sums_of.get(value, ())]
        return sorted({op.index: op for op in (*own, *sums)}.values(), key=lambda op: op.index)


@dataclass(frozen=True)
class PieceMemory:
    """Bytes that a piece of a segment allocates in addition to what the segment reads and returns as a whole."""

    tiled: Tiled
    ops: tuple[GraphOp, ...]
    """Forward ops that a piece runs: those of ``tiled.program.nodes``, in their order."""
    derivatives: Derivatives
    """Of the step."""

    def forward(self, pieces: int) -> int:
        """Return the peak of a piece in the forward pass, in bytes. ``pieces``: their number."""
        return self._peak(self.ops, pieces)

    def backward(self, pieces: int) -> int:
        """Return the peak of a piece that runs again and computes gradients, in bytes. ``pieces``: their number."""
        not_computed = {value for index in self.tiled.nodes_without_values for value in self.ops[index].makes}
        return self._peak((*self.ops, *self.derivatives.of(self.ops)), pieces, not_computed)

    def _peak(self, ops: Sequence[GraphOp], pieces: int, not_computed: Collection[int] = ()) -> int:
        """Return the peak of ops that run one after the other, the forward ops first.

        ``not_computed``: results without values.
        """
        graph, tiled = self.derivatives.graph, self.tiled
        made = {value for op in ops for value in op.makes}
        last_use = {value: at for at, op in enumerate(ops) for value in (*op.makes, *op.reads)}
        for value in {graph.base(value) for value in tiled.program.outputs} & made:
            last_use[value] = max(last_use[value], len(self.ops) - 1)  # results live until all ops have run forward
        static = {graph.base(value) for value in tiled.program.static_inputs}
        overlaps = dict(zip((op.index for op in self.ops), tiled.overlap_by_op(pieces), strict=True))
        norms = {self.ops[index].index for index in tiled.norms}

        def size(value: int, share: float, weight_shapes: Collection[tuple[int, ...]]) -> int:
            """Return the bytes of a result: a share of the whole, or all of it for the gradient of a weight."""
            if value in not_computed:
                return 0
            whole = graph.values[value].bytes
            return whole if graph.values[value].shape in weight_shapes else int(share * whole)

        level = peak = 0
        freed = [0] * len(ops)
        """By position: bytes of the values that are not used after it."""
        for at, op in enumerate(ops):
            of_derivative = op.phase == "backward"
            forward_op = graph.ops[op.gradient_of] if of_derivative and op.gradient_of is not None else op
            share = overlaps.get(forward_op.index, 1.0) / pieces
            shapes = {graph.values[value].shape for value in forward_op.reads if value in static}
            for value in op.makes:
                bytes_of_value = size(value, share, shapes if of_derivative else ())
                level += bytes_of_value
                freed[last_use[value]] += bytes_of_value
            workspace = max(0, op.scratch) + op.discarded
            if of_derivative and forward_op.index in norms:  # the normalized input
                workspace += graph.values[forward_op.makes[0]].bytes
            if tiled.axis.dim and op.target in _COPIES_WINDOWS:
                workspace += sum(graph.values[v].bytes for v in op.reads if v not in made and v not in static)
            peak = max(peak, level + int(share * workspace))
            level -= freed[at]
        return peak
