"""What a plan may lose, in words."""

from __future__ import annotations

import torch
from torch import nn

from memplan.planning.capture.capture import capture
from memplan.planning.capture.flat_call import call_of
from memplan.planning.graph.precision import EXACT, SMALLEST_HALF, UNSCALED, Precision


def test_it_is_lossy_where_anything_is_in_fewer_bits() -> None:
    assert not EXACT.lossy
    assert Precision("bfloat16").lossy
    assert Precision(save="bfloat16").lossy
    assert str(EXACT) == "exact"
    assert str(Precision("bfloat16", "int8")) == "computing in bfloat16 and saving in 8 bits"
    apart = Precision("bfloat16", "bfloat16", ("stem", "head"))
    assert str(apart) == "computing in bfloat16, in stem, head as written and saving in bfloat16"
    assert str(Precision(save="bfloat16")) == "saving in bfloat16"


def test_what_is_said_of_float16_is_so() -> None:
    least, less = torch.tensor([SMALLEST_HALF, SMALLEST_HALF / 4])
    assert least.half() > 0
    assert less.half() == 0
    assert less.bfloat16() > 0
    assert "6e-08" in UNSCALED
    assert "GradScaler" in UNSCALED


class Casting(nn.Module):
    """Returns what it computes in, in another precision by design, and one tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.layer(x)
        return y.float().mean(), y.bfloat16(), y, y


def test_outputs_have_the_dtypes_that_the_model_gives_them() -> None:
    captured = capture(Casting(), call_of((torch.randn(2, 8),), {}), Precision("bfloat16"))
    dtypes = [captured.graph.values[captured.graph.outputs[at]].dtype for at in captured.returned.output_indices]
    assert dtypes == ["float32", "bfloat16", "float32", "float32"]
    assert captured.returned.output_indices[2] == captured.returned.output_indices[3]
