"""Interpolation and bilinear layers: the predicted peak beside what torch's profiler saw."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from truth.cpu_allocator import measured_peak

import memplan

LINES, IMAGES, VOLUMES = ((2, 3, 8), (10,)), ((2, 3, 8, 8), (10, 12)), ((2, 3, 4, 4, 4), (5, 6, 7))
LARGE, FLAT, DOWN, ROW = ((1, 4, 30, 30), (200, 150)), ((1, 1, 30, 30), (200, 150)), ((1, 2, 9, 8), (4, 5)), (
    (1, 2, 9, 8), (9, 5),
)  # fmt: skip
CASES = [
    *(("nearest", *case) for case in (LINES, IMAGES, VOLUMES, LARGE, FLAT)),
    *(("nearest-exact", *case) for case in (LINES, IMAGES, LARGE)),
    ("linear", *LINES),
    *(("bilinear", *case) for case in (IMAGES, LARGE, FLAT, DOWN)),
    *(("bicubic", *case) for case in (IMAGES, LARGE, DOWN)),
    ("trilinear", *VOLUMES),
]


def assert_peak(build: Any) -> None:
    assert memplan.simulate(memplan.record(build, device="cpu")).peak_allocated == measured_peak(build)


def resized(shape: tuple[int, ...], dtype: torch.dtype, **how: Any) -> Any:
    def build() -> Any:
        x = torch.rand(shape, dtype=dtype, requires_grad=True)

        def step() -> None:
            x.grad = None
            F.interpolate(x, **how).sum().backward()

        return step

    return build


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("mode", "shape", "size"), CASES)
def test_neighbors_and_their_weights(
    mode: str, shape: tuple[int, ...], size: tuple[int, ...], dtype: torch.dtype
) -> None:
    assert_peak(resized(shape, dtype, size=size, mode=mode))


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("shape", "size"), [IMAGES, LARGE, DOWN, ROW])
def test_the_weights_of_a_filter(shape: tuple[int, ...], size: tuple[int, ...], mode: str, aligned: bool) -> None:
    assert_peak(resized(shape, torch.float32, size=size, mode=mode, antialias=True, align_corners=aligned))


def test_the_weights_of_a_filter_by_its_scale() -> None:
    assert_peak(resized((1, 2, 8, 8), torch.float64, scale_factor=(0.55, 0.65), mode="bilinear", antialias=True))


@pytest.mark.parametrize(("left", "right", "out", "batch"), [(3, 4, 5, 1), (8, 2, 3, 16), (2, 3, 1, 4)])
def test_a_bilinear_layer_goes_feature_by_feature(left: int, right: int, out: int, batch: int) -> None:
    def build() -> Any:
        layer = nn.Bilinear(left, right, out)
        x, y = torch.rand(batch, left, requires_grad=True), torch.rand(batch, right, requires_grad=True)

        def step() -> None:
            tensors: list[Tensor] = [x, y, *layer.parameters()]
            for tensor in tensors:
                tensor.grad = None
            layer(x, y).sum().backward()

        return step

    assert_peak(build)
