"""Interpolation: the predicted peak beside what torch's profiler saw."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from environment import thinned
from torch.nn import functional as F
from truth.cpu_allocator import measured_peak

import memplan

LINES, IMAGES, VOLUMES = ((2, 3, 8), (10,)), ((2, 3, 8, 8), (10, 12)), ((2, 3, 4, 4, 4), (5, 6, 7))
LARGE, FLAT, DOWN = ((1, 4, 30, 30), (200, 150)), ((1, 1, 30, 30), (200, 150)), ((1, 2, 9, 8), (4, 5))
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


@pytest.mark.parametrize(
    ("mode", "shape", "size", "dtype"), thinned(((*c, d) for c in CASES for d in (torch.float32, torch.float64)), 7)
)
def test_neighbors_and_their_weights(
    mode: str, shape: tuple[int, ...], size: tuple[int, ...], dtype: torch.dtype
) -> None:
    assert_peak(resized(shape, dtype, size=size, mode=mode))
