"""Weight gradients of oneDNN that threads share, beside what torch's profiler saw."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from truth.cpu_allocator import measured_peak

import memplan
from memplan.trace.semantics.layout import simd

pytestmark = pytest.mark.skipif(simd() != 16, reason="AVX2's kernel divides the work by other rules")

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "a batch": (lambda: nn.Conv2d(64, 16, 3, padding=1, bias=False), (8, 64, 32, 32)),
    "points of a batch": (lambda: nn.Conv2d(64, 32, 1, bias=False), (8, 64, 32, 32)),
    "channels of points": (lambda: nn.Conv2d(256, 32, 1, bias=False), (8, 256, 14, 14)),
    "points of an image": (lambda: nn.Conv2d(64, 32, 1, bias=False), (1, 64, 64, 64)),
    "rows of an image": (lambda: nn.Conv2d(64, 16, 3, padding=1), (1, 64, 64, 64)),
    "no rows of a low image": (lambda: nn.Conv2d(64, 16, 3, padding=1), (1, 64, 8, 256)),
    "a batch of volumes": (lambda: nn.Conv3d(32, 8, 3, padding=1, bias=False), (2, 32, 20, 24, 24)),
    "slices of a volume": (lambda: nn.Conv3d(16, 8, 3, padding=1, bias=False), (1, 16, 48, 48, 48)),
    "channels of a volume": (lambda: nn.Conv3d(32, 16, 3, padding=1, bias=False), (1, 32, 32, 32, 32)),
}


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", LAYERS)
def test_partial_sums_of_two_threads(name: str) -> None:
    make, shape = LAYERS[name]

    def build() -> Callable[[], None]:
        layer, x = make(), torch.randn(shape)

        def step() -> None:
            layer(x).pow(2).sum().backward()
            layer.zero_grad()

        return step

    assert memplan.simulate(memplan.record(build, device="cpu")).peak_allocated == measured_peak(build)
