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


POINTS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "more outputs": (lambda: nn.Conv2d(128, 512, 1, bias=False), (5, 128, 28, 28)),
    "more inputs": (lambda: nn.Conv2d(256, 32, 1, bias=False), (8, 256, 14, 14)),
    "few channels": (lambda: nn.Conv2d(64, 32, 1, bias=False), (8, 64, 32, 32)),
    "rows of a prime": (lambda: nn.Conv2d(128, 64, 1, bias=False), (2, 128, 23, 29)),
    "one image": (lambda: nn.Conv2d(48, 32, 1, bias=False), (1, 48, 40, 40)),
    "a volume": (lambda: nn.Conv3d(64, 128, 1, bias=False), (2, 64, 8, 16, 16)),
}
"""1x1 kernels, which threads divide along the batch, the channels, or both."""


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", LAYERS)
def test_partial_sums_of_two_threads(name: str) -> None:
    assert_peak_is_measured(*LAYERS[name])


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
@pytest.mark.parametrize("name", POINTS)
def test_partial_sums_of_points(name: str, threads: int) -> None:
    torch.set_num_threads(threads)
    assert_peak_is_measured(*POINTS[name])


def assert_peak_is_measured(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    """Compare the predicted peak of a layer's step, which is at the weight gradient, with the profiler's."""

    def build() -> Callable[[], None]:
        layer, x = make(), torch.randn(shape)

        def step() -> None:
            layer(x).sum().backward()
            layer.zero_grad()

        return step

    assert memplan.simulate(memplan.record(build, device="cpu")).peak_allocated == measured_peak(build)
