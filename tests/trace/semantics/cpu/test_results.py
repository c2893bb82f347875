"""Results that are other than fake tensors say: the predicted peak beside what torch's profiler saw."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from truth.cpu_allocator import measured_peak

import memplan


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("columns", "train"), [(16, True), (5, False)])
def test_a_product_of_groups(dtype: torch.dtype, columns: int, train: bool) -> None:
    """Rows are padded to 16 bytes; a gradient takes none whose rows are not."""

    def build() -> Any:
        weight = nn.Parameter(torch.randn(4, columns, 16).to(dtype), requires_grad=train)
        x, ends = torch.randn(32, 16).to(dtype), torch.tensor([8, 16, 24, 32], dtype=torch.int32)

        def step() -> None:
            loss = F.grouped_mm(x, weight.transpose(1, 2), offs=ends).pow(2).mean()
            if train:
                loss.backward()

        return step

    assert memplan.simulate(memplan.record(build, device="cpu")).peak_allocated == measured_peak(build)
