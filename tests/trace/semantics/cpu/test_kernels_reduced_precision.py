"""Sums in bfloat16 over dimensions that are not one in memory are made in float32."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from environment import slow, thinned
from torch import Tensor
from truth.cpu_allocator import measured_peak

import memplan

SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "of each channel": lambda x: x.sum((0, 2, 3)),
    "of each channel, in channels last": lambda x: x.to(memory_format=torch.channels_last).sum((0, 2, 3)),
    "of positions": lambda x: x.sum((-1, -2)),
    "over samples and rows": lambda x: x.sum((0, 2), keepdim=True),
    "over one dimension": lambda x: x.sum(1),
    "of all": lambda x: x.sum(),
    "of a part": lambda x: x[:, :2].sum(),
    "of each second": lambda x: x[..., ::2].sum(),
    "of one sample, expanded": lambda x: x[:1].expand(x.shape).sum((0, 2)),
    "as float32": lambda x: x.sum((0, 2), dtype=torch.float32),
    "of exponentials": lambda x: x.logsumexp((0, 2)),
    "of gradients, for what was broadcast": lambda x: x * x[:1, :, :1, :1],
}


@pytest.mark.parametrize(
    ("name", "dtype"), thinned(itertools.product(SUMS, [torch.bfloat16, torch.float16, torch.float32]), 4)
)
def test_a_sum_takes_what_the_allocator_saw(name: str, dtype: torch.dtype) -> None:
    def build() -> Any:
        x = torch.rand(4, 8, 16, 16, dtype=dtype, requires_grad=True)

        def step() -> None:
            x.grad = None
            SUMS[name](x).sum().backward()

        return step

    assert memplan.simulate(memplan.record(build, device="cpu")).peak_allocated == measured_peak(build)


def norm_step(shape: tuple[int, ...], dtype: torch.dtype, *, training: bool, affine: bool, last: bool) -> Any:
    """A build: batch norm of what is in channels last, or not."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}

    def build() -> Any:
        kind = {2: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d, 5: torch.nn.BatchNorm3d}[len(shape)]
        norm = kind(shape[1], affine=affine).train(training).to(dtype)

        def step() -> None:
            x = torch.rand(shape, dtype=dtype, requires_grad=True)
            y = x.to(memory_format=formats[len(shape)]) if last else x
            torch.relu(norm(y) * 1).sum().backward()

        return step

    return build


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float32)])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("training", [True, *slow(False)])
def test_one_position_a_channel_is_normed_as_in_channels_last(training: bool, last: bool, dtype: torch.dtype) -> None:
    for shape in ((2, 64, 1, 1), (32, 256, 1, 1), (4, 512, 1, 1, 1), (4, 128), (4, 16, 3, 3)):
        if last and len(shape) == 2:
            continue
        for affine in (False, True):
            build = norm_step(shape, dtype, training=training, affine=affine, last=last)
            predicted = memplan.simulate(memplan.record(build, device="cpu")).peak_allocated
            assert predicted == measured_peak(build), (shape, affine)
