"""What a plan may lose, in words."""

from __future__ import annotations

import torch

from memplan.planning.precision import EXACT, SMALLEST_HALF, UNSCALED, Precision


def test_it_is_lossy_where_anything_is_in_fewer_bits() -> None:
    assert not EXACT.lossy
    assert Precision("bfloat16").lossy
    assert Precision(save="bfloat16").lossy
    assert str(EXACT) == "exact"
    assert str(Precision("bfloat16", "int8")) == "computing in bfloat16 and saving in 8 bits"
    assert str(Precision(save="bfloat16")) == "saving in bfloat16"


def test_what_is_said_of_float16_is_so() -> None:
    least, less = torch.tensor([SMALLEST_HALF, SMALLEST_HALF / 4])
    assert least.half() > 0
    assert less.half() == 0
    assert less.bfloat16() > 0
    assert "6e-08" in UNSCALED
    assert "GradScaler" in UNSCALED
