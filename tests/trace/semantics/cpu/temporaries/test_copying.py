"""A transposed matrix is copied through a block, which is there meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from truth.cpu_allocator import measured_peak

import memplan

COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "in order": lambda x: x.t().contiguous(),
    "by reshape": lambda x: x.t().reshape(-1),
    "into another": lambda x: torch.empty(x.shape[::-1], dtype=x.dtype).copy_(x.t()),
    "as it lies": lambda x: x.t().clone(),
    "of a part": lambda x: x[:, :-1].t().contiguous(),
    "cast": lambda x: x.t().to(torch.float16, memory_format=torch.contiguous_format),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.int64, torch.bool])
@pytest.mark.parametrize("name", COPIES)
def test_a_copy_takes_what_the_allocator_saw(name: str, dtype: torch.dtype) -> None:
    for shape in ((70, 90), (60, 60), (60, 59), (20, 180), (130, 130)):

        def build(shape: tuple[int, ...] = shape) -> Any:
            x = torch.zeros(shape, dtype=dtype)
            return lambda: COPIES[name](x)

        predicted = memplan.simulate(memplan.record(build, device="cpu")).peak_allocated
        assert predicted == measured_peak(build), shape
