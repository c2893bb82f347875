"""Drawing samples: the predicted peak beside what torch's profiler saw without a mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from truth.cpu_allocator import measured_peak

import memplan


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("samples", [1, 3])
def test_drawing_by_weights_takes_what_the_allocator_saw(samples: int, replacement: bool, dtype: torch.dtype) -> None:
    for shape in ((50,), (20, 30), (300, 40), (500, 3), (4, 3)):

        def build(shape: tuple[int, ...] = shape) -> Any:
            weights = torch.rand(shape, dtype=dtype)
            return lambda: torch.multinomial(weights, samples, replacement=replacement)

        predicted = memplan.simulate(memplan.record(build, device="cpu")).peak_allocated
        assert predicted == measured_peak(build), shape
