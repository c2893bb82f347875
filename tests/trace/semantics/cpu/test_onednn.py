"""Weight gradients of oneDNN that threads share or that go by columns, beside what torch's profiler saw."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from truth.cpu_allocator import measured_peak

import memplan
from memplan.trace.semantics.layout import simd

on_avx512 = pytest.mark.skipif(simd() != 16, reason="AVX2's kernel divides the work by other rules")
on_avx2 = pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX2", reason="run in a process with AVX2")

Layers = dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]
LAYERS: Layers = {
    "a batch": (lambda: nn.Conv2d(64, 16, 3, padding=1, bias=False), (8, 64, 32, 32)),
    "points of a batch": (lambda: nn.Conv2d(64, 32, 1, bias=False), (8, 64, 32, 32)),
    "channels of points": (lambda: nn.Conv2d(256, 32, 1, bias=False), (8, 256, 14, 14)),
    "points of an image": (lambda: nn.Conv2d(64, 32, 1, bias=False), (1, 64, 64, 64)),
    "rows of an image": (lambda: nn.Conv2d(64, 16, 3, padding=1), (1, 64, 64, 64)),
    "no rows of a low image": (lambda: nn.Conv2d(64, 16, 3, padding=1), (1, 64, 8, 256)),
    "a batch of volumes": (lambda: nn.Conv3d(32, 8, 3, padding=1, bias=False), (2, 32, 20, 24, 24)),
    "slices of a volume": (lambda: nn.Conv3d(16, 8, 3, padding=1, bias=False), (1, 16, 48, 48, 48)),
    "channels of a volume": (lambda: nn.Conv3d(32, 16, 3, padding=1, bias=False), (1, 32, 32, 32, 32)),
    "columns of small images": (lambda: nn.Conv2d(64, 64, 3, 2, 2, 2, bias=False), (4, 64, 32, 32)),
    "columns of a volume's slices": (lambda: nn.Conv3d(16, 16, 3, 1, 2, 2, bias=False), (2, 16, 16, 16, 16)),
    "columns of an image of groups": (lambda: nn.Conv2d(48, 48, 3, padding=1, groups=16, bias=False), (1, 48, 14, 14)),
}

POINTS: Layers = {
    "more outputs": (lambda: nn.Conv2d(128, 512, 1, bias=False), (5, 128, 28, 28)),
    "more inputs": (lambda: nn.Conv2d(256, 32, 1, bias=False), (8, 256, 14, 14)),
    "few channels": (lambda: nn.Conv2d(64, 32, 1, bias=False), (8, 64, 32, 32)),
    "rows of a prime": (lambda: nn.Conv2d(128, 64, 1, bias=False), (2, 128, 23, 29)),
    "one image": (lambda: nn.Conv2d(48, 32, 1, bias=False), (1, 48, 40, 40)),
    "a volume": (lambda: nn.Conv3d(64, 128, 1, bias=False), (2, 64, 8, 16, 16)),
}
"""1x1 kernels, which threads divide along the batch, the channels, or both."""

AVX2: Layers = {
    "by columns: higher than the image": (lambda: nn.Conv2d(256, 256, 3, padding=1, bias=False), (8, 256, 2, 2)),
    "as high as the image": (lambda: nn.Conv2d(256, 256, 3, padding=1, bias=False), (4, 256, 3, 3)),
    "by columns: dilated, an image each": (lambda: nn.Conv2d(64, 64, 3, 1, 4, 4, bias=False), (4, 64, 20, 20)),
    "by columns: dilated, one image": (lambda: nn.Conv2d(64, 64, 3, 1, 2, 2, bias=False), (4, 64, 32, 32)),
    "by columns: padded depth": (lambda: nn.Conv3d(32, 32, 3, padding=1, bias=False), (2, 32, 16, 16, 16)),
    "blocks of channels": (lambda: nn.Conv2d(64, 64, 3, padding=1, bias=False), (8, 64, 32, 32)),
    "fewer blocks than threads": (lambda: nn.Conv2d(8, 8, 3, padding=1, bias=False), (8, 8, 64, 64)),
    "a volume": (lambda: nn.Conv3d(32, 32, 3, bias=False), (2, 32, 16, 16, 16)),
    "groups": (lambda: nn.Conv2d(64, 64, 3, padding=1, groups=4, bias=False), (4, 64, 32, 32)),
    "points": (lambda: nn.Conv2d(64, 32, 1, bias=False), (8, 64, 32, 32)),
    "points, blocks of channels": (lambda: nn.Conv2d(128, 512, 1, bias=False), (5, 128, 28, 28)),
    "points, large weight": (lambda: nn.Conv2d(512, 256, 1, bias=False), (8, 512, 7, 7)),
}


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@on_avx512
@pytest.mark.parametrize("name", LAYERS)
def test_partial_sums_of_two_threads(name: str) -> None:
    assert_peak_is_measured(*LAYERS[name])


@on_avx512
@pytest.mark.parametrize("threads", [1, 2, 3, 4])
@pytest.mark.parametrize("name", POINTS)
def test_partial_sums_of_points(name: str, threads: int) -> None:
    torch.set_num_threads(threads)
    assert_peak_is_measured(*POINTS[name])


@on_avx2
@pytest.mark.parametrize("threads", [2, 4])
@pytest.mark.parametrize("name", AVX2)
def test_weight_gradients_of_avx2(name: str, threads: int) -> None:
    torch.set_num_threads(threads)
    assert_peak_is_measured(*AVX2[name])


@on_avx512
def test_weight_gradients_in_a_process_with_avx2() -> None:
    """The instructions are chosen when torch is loaded."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "of_avx2", __file__]
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    root = Path(__file__).parents[4]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout
    assert f"{2 * len(AVX2)} passed" in done.stdout


def assert_peak_is_measured(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    """Compare the predicted peak of a layer's step, which is at the weight gradient, with the profiler's."""

    def build() -> Callable[[], None]:
        layer, x = make(), torch.randn(shape)

        def step() -> None:
            layer(x).sum().backward()
            layer.zero_grad()

        return step

    assert memplan.simulate(memplan.record(build, device="cpu")).peak_allocated == measured_peak(build)
