"""Compute blocks of layers in lower precision, in lossy plans: the step is captured under autocast before planning."""

from __future__ import annotations

from collections.abc import Sequence

from memplan._bytes import format_bytes
from memplan._text import format_seconds
from memplan.planning.graph.joint_graph import GraphOp, JointGraph, SavedForm
from memplan.planning.levers.lever import Grade, Lever, Reason


class LowerPrecision(Lever):
    """Compute in lower precision. `memplan.planning.precision_search` chooses the dtype and the blocks."""

    name = "lower precision"

    def grade(self, form: SavedForm | None = None) -> Grade:
        """Return ``lossy``: every result is rounded."""
        return "lossy"

    def of_block(
        self,
        graph: JointGraph,
        ops: Sequence[GraphOp],
        dtype: str,
        forward_values: Sequence[int],
        weight_copies: Sequence[int],
    ) -> tuple[Reason, Sequence[int]]:
        """Describe what a block of layers computes in lower precision, and return the ids of the values that are
        smaller. ``forward_values`` are those of the block but for copies of weights in lower precision, which are
        ``weight_copies``."""
        smaller = [value for value in forward_values if graph.values[value].dtype == dtype]
        copy_bytes = sum(graph.values[copy].bytes for copy in weight_copies)
        text = f"{dtype} in {len(smaller)} of {len(forward_values)} results, forward and backward in "
        text += format_seconds(sum(op.seconds for op in ops))
        text += f"; {format_bytes(copy_bytes)} of copies of weights" if copy_bytes else ""
        details = {"dtype": dtype, "cast_copies": copy_bytes, "values": len(smaller)}
        freed = sum(graph.values[value].bytes for value in smaller)  # they have at most half of the bytes of float32
        return Reason(freed, text, details, self.grade()), smaller
