"""Convolutions of volumes in dtypes that oneDNN does not take, beside what torch's profiler saw."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from environment import slow
from torch import nn
from truth.cpu_allocator import measured_peak

import memplan

LAYERS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "a channel a group": (lambda: nn.Conv3d(8, 8, 3, padding=1, groups=8), 8),
    "two groups": (lambda: nn.Conv3d(4, 8, 3, padding=1, groups=2, bias=False), 4),
    "two groups, strided": (lambda: nn.Conv3d(4, 8, 3, stride=2, groups=2), 4),
    "two groups of points": (lambda: nn.Conv3d(4, 8, 1, groups=2), 4),
    "one group": (lambda: nn.Conv3d(4, 8, 3, padding=1), 4),
}


FLOAT16 = pytest.mark.skipif(
    torch.ops.mkldnn._is_mkldnn_fp16_supported(), reason="oneDNN has kernels in float16 for this processor"
)


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float64, id="float64"), pytest.param(torch.float16, id="float16", marks=FLOAT16)]
)
@pytest.mark.parametrize("batch", [2, *slow(1)])
@pytest.mark.parametrize("name", LAYERS)
def test_the_columns_of_volumes_are_of_all_groups(name: str, batch: int, dtype: torch.dtype) -> None:
    make, channels = LAYERS[name]

    def build() -> Callable[[], None]:
        layer, x = make().to(dtype), torch.randn(batch, channels, 6, 7, 8, dtype=dtype, requires_grad=True)

        def step() -> None:
            layer(x).pow(2).sum().backward()
            layer.zero_grad()
            x.grad = None

        return step

    assert memplan.simulate(memplan.record(build, device="cpu")).peak_allocated == measured_peak(build)
