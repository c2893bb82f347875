"""Layers of few channels, with and without a bias: the predicted peak beside what torch's profiler saw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from truth.convolution_bytes import only_avx512
from truth.cpu_allocator import measured_peak

import memplan

pytestmark = [only_avx512, pytest.mark.usefixtures("one_thread")]
LAYERS: dict[str, tuple[Callable[[int, int, bool], nn.Module], tuple[int, ...]]] = {
    "of lines": (lambda a, b, bias: nn.Conv1d(a, b, 3, padding=1, bias=bias), (9,)),
    "of images": (lambda a, b, bias: nn.Conv2d(a, b, 3, padding=1, bias=bias), (9, 9)),
    "of single pixels": (lambda a, b, bias: nn.Conv2d(a, b, 1, bias=bias), (9, 9)),
    "of volumes": (lambda a, b, bias: nn.Conv3d(a, b, 3, bias=bias), (5, 5, 5)),
    "transposed": (lambda a, b, bias: nn.ConvTranspose2d(a, b, 3, bias=bias), (9, 9)),
}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("channels", [(4, 5), (4, 16), (8, 5), (16, 5), (3, 5), (20, 24), (16, 16)])
@pytest.mark.parametrize("name", LAYERS)
def test_a_bias_that_fills_no_block_is_padded(name: str, channels: tuple[int, int], batch: int) -> None:
    make, space = LAYERS[name]
    for bias in (False, True):

        def build(bias: bool = bias) -> Any:
            layer, x = make(*channels, bias), torch.rand(batch, channels[0], *space, requires_grad=True)

            def step() -> None:
                x.grad = None
                layer.zero_grad()
                layer(x).sum().backward()

            return step

        assert memplan.simulate(memplan.record(build, device="cpu")).peak_allocated == measured_peak(build)
