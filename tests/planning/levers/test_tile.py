"""What the plan's table says of a segment in pieces."""

from __future__ import annotations

import pytest

from memplan.planning.levers.tile import Tile
from memplan.planning.tiles.tiled import Axis
from memplan.planning.tiles.tiled import Tile as Segment


@pytest.mark.parametrize(
    ("axis", "said"), [(Axis(0, 16), "samples"), (Axis(1, 1, 64), "tokens"), (Axis(2), "dimension 2")]
)
def test_the_reason_says_where_it_is_cut(axis: Axis, said: str) -> None:
    """Number of pieces, axis and the bytes of a piece; sums are in another order."""
    reason = Tile().reason_of(5 << 20, Segment(3, 7, axis, 8), 1 << 20, gradients_in_forward=False)
    assert f"in 8 pieces along {said}" in reason.text
    assert "computed again in the backward pass" in reason.text
    assert "1.0 MiB" in reason.text
    assert (reason.bytes, reason.grade) == (5 << 20, "reordered")
