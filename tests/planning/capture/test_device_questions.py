"""Questions of a tensor's device within a segment: with data they are calls of torch functions, without data none."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memplan.planning.capture.capture import capture
from memplan.planning.capture.flat_call import call_of
from memplan.planning.ops.tile import TILE
from memplan.planning.tiles.tiled import Axis, Tile


class Asking(nn.Module):
    """Two layers, the second on the device of what the first returns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return the second's result."""
        hidden = F.relu(self.first(x))
        return self.second(hidden.to(hidden.device))


def test_a_segment_ends_at_the_same_call() -> None:
    """Calls have the same numbers in the trace of the step as written and in that of the segment."""
    model, call = Asking(), call_of((torch.randn(6, 4),), {})
    calls = [op.call for op in capture(model, call).graph.forward_ops if op.target == "aten.addmm.default"]
    first, last = calls
    assert first is not None
    assert last is not None
    graph = capture(model, call, tiles=[Tile(first, last, Axis(0, 6), 2)]).graph
    assert [op.target for op in graph.forward_ops].count(TILE) == 1
    assert all(op.target != "aten.addmm.default" for op in graph.forward_ops)
