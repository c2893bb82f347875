"""Fourier transforms over each dimension, and rolls: the predicted peak beside what torch's profiler saw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from truth.cpu_allocator import measured_peak

import memplan

SHAPES = ((7,), (3, 8), (2, 3, 8, 10))


def assert_peak(op: Callable[[Tensor], Tensor], shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
    def build() -> Any:
        x = torch.rand(shape, dtype=dtype, requires_grad=True)

        def step() -> None:
            x.grad = None
            op(x).abs().sum().backward()

        return step

    assert memplan.simulate(memplan.record(build, device="cpu")).peak_allocated == measured_peak(build), shape


@pytest.mark.parametrize("name", ["fft", "rfft", "ihfft", "ifft", "irfft", "hfft"])
def test_a_transform_of_each_dimension(name: str) -> None:
    for shape in SHAPES:
        for dim in range(len(shape)):
            assert_peak(lambda x, dim=dim: getattr(torch.fft, name)(x, dim=dim), shape)


@pytest.mark.parametrize("name", ["fftn", "rfftn", "ihfftn", "ifftn", "irfftn", "hfftn"])
def test_a_transform_of_several_dimensions(name: str) -> None:
    transform = getattr(torch.fft, name)
    for shape in SHAPES:
        assert_peak(transform, shape)
    for dims in ((1, 2), (0, 3), (3, 1), (0, 1, 2)):
        assert_peak(lambda x, dims=dims: transform(x, dim=dims), SHAPES[-1], torch.float64)
    assert_peak(lambda x: transform(x.transpose(1, 2), dim=(1, 2)), SHAPES[-1])


@pytest.mark.parametrize("dims", [(0,), (1, 2), (0, 1, 3)])
def test_a_roll_goes_dimension_by_dimension(dims: tuple[int, ...]) -> None:
    assert_peak(lambda x: x.roll((1,) * len(dims), dims), SHAPES[-1])
    assert_peak(torch.fft.fftshift, SHAPES[len(dims) - 1])


def test_a_spectrogram() -> None:
    assert_peak(lambda x: torch.stft(x, 8, return_complex=True, window=torch.ones(8)), (64,))
