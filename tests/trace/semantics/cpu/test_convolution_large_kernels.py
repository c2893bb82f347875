"""The input's gradient of strided convolutions of one channel with large kernels, beside what torch's profiler saw."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from truth.cpu_allocator import measured_peak

import memplan

pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="the blocks of AVX2 are rules of their own"
)


@pytest.mark.parametrize(
    ("make", "space"),
    [
        (lambda: nn.Conv1d(1, 64, 100, stride=50), (4000,)),
        (lambda: nn.Conv1d(1, 64, 200, stride=100), (4000,)),
        (lambda: nn.Conv1d(1, 64, 300, stride=80), (4000,)),
        (lambda: nn.Conv1d(1, 64, 400, stride=160), (4000,)),
        (lambda: nn.Conv2d(1, 64, 16, stride=10), (112, 112)),
        (lambda: nn.Conv2d(1, 192, 16, stride=16), (112, 112)),
    ],
    ids=["100", "200", "300", "400", "16x16 by 10", "16x16"],
)
def test_one_channel_is_taken_in_shorter_vectors(make: Callable[[], nn.Module], space: tuple[int, ...]) -> None:
    def build() -> Callable[[], None]:
        layer, x = make(), torch.randn(2, 1, *space, requires_grad=True)

        def step() -> None:
            layer(x).pow(2).sum().backward()
            layer.zero_grad()
            x.grad = None

        return step

    assert memplan.simulate(memplan.record(build, device="cpu")).peak_allocated == measured_peak(build)
