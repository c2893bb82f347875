"""What ops take on a card besides their results, as recorded: products of groups of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memplan


def experts(dtype: torch.dtype, columns: int = 16) -> Callable[[], Callable[[], Any]]:
    def build() -> Callable[[], Any]:
        weight = nn.Parameter(torch.randn(4, columns, 16).to(dtype))
        x, ends = torch.randn(32, 16).to(dtype), torch.tensor([8, 16, 24, 32], dtype=torch.int32)
        return lambda: F.grouped_mm(x, weight.transpose(1, 2), offs=ends)

    return build


@pytest.mark.parametrize("card", ["h100", "rtx4090", "b200"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_product_of_groups_is_recorded_in_every_dtype(card: str, dtype: torch.dtype) -> None:
    trace = memplan.record(experts(dtype), device=card, steps=1)
    (op,) = (op for op in trace.ops if op.name == "aten._grouped_mm.default")
    assert trace.storages[op.writes[0]].bytes == 32 * 16 * dtype.itemsize
    workspaces = [s for s in trace.counted if s.cause == "workspace"]
    own_kernel = dtype is torch.bfloat16 and card != "rtx4090"  # else a product for each group, by cuBLAS
    assert len(workspaces) == (0 if own_kernel else 1)


def test_rows_begin_at_multiples_of_16_bytes() -> None:
    trace = memplan.record(experts(torch.float32, columns=5), device="h100", steps=1)
    (op,) = (op for op in trace.ops if op.name == "aten._grouped_mm.default")
    assert trace.storages[op.writes[0]].bytes == (31 * 8 + 5) * 4
