"""Comparing tensors: the predicted peak beside what torch's profiler saw without a mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from truth.cpu_allocator import measured_peak

import memplan

OPS: dict[str, Callable[[Tensor], Any]] = {
    "close": lambda x: torch.allclose(x, x),
    "close, with NaNs equal": lambda x: torch.allclose(x, x, equal_nan=True),
    "close without a tolerance": lambda x: torch.allclose(x, x, 0, 0),
    "close integers": lambda x: torch.allclose(x.long(), x.long()),
    "close booleans": lambda x: torch.allclose(x > 0.5, x > 0.5),
    "close complex numbers": lambda x: torch.allclose(x + 1j, x + 1j),
    "close to a row": lambda x: torch.allclose(x, x[:1]),
    "equal": lambda x: torch.equal(x, x),
    "which are close": lambda x: torch.isclose(x, x),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", OPS)
def test_a_comparison_takes_what_the_allocator_saw(name: str, dtype: torch.dtype) -> None:
    for shape in ((5, 5), (1,), (2,), (70, 70)):

        def build(shape: tuple[int, ...] = shape) -> Any:
            x = torch.rand(shape, dtype=dtype)
            return lambda: OPS[name](x)

        predicted = memplan.simulate(memplan.record(build, device="cpu")).peak_allocated
        assert predicted == measured_peak(build), shape
