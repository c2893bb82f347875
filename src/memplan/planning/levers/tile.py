"""Run a segment of the step piece by piece, so that its inner tensors exist one piece at a time."""

from __future__ import annotations

from memplan._bytes import format_bytes
from memplan.planning.graph.joint_graph import SavedForm
from memplan.planning.levers.lever import Grade, Lever, Reason
from memplan.planning.tiles.tiled import Tile as Segment


class Tile(Lever):
    """Run segments of a step piece by piece. `memplan.planning.tile_search` chooses them."""

    name = "tile"

    def grade(self, form: SavedForm | None = None) -> Grade:
        """Return ``reordered``: gradients of weights and statistics are sums over pieces."""
        return "reordered"

    def reason_of(self, freed_bytes: int, segment: Segment, piece_bytes: int, *, gradients_in_forward: bool) -> Reason:
        """Describe what running a segment in pieces frees, for the plan's table.

        Args:
            freed_bytes: those of its inner values.
            segment: with the axis and the number of pieces.
            piece_bytes: most bytes that a piece takes.
            gradients_in_forward: whether the forward pass computes the gradients, too.
        """
        axis = {0: "samples", 1: "tokens"}.get(segment.axis.dim, f"dimension {segment.axis.dim}")
        gradients = (
            "with its gradients in the forward pass"
            if gradients_in_forward
            else "each computed again in the backward pass"
        )
        text = f"in {segment.pieces} pieces along {axis}, {gradients}; a piece takes "
        text += f"up to {format_bytes(piece_bytes)}"
        if segment.repeats:
            text += " and computes again what it reads of an earlier segment, which is never whole"
        details = {"pieces": segment.pieces, "dim": segment.axis.dim, "piece_bytes": piece_bytes}
        return Reason(max(0, freed_bytes), text, details, self.grade())
