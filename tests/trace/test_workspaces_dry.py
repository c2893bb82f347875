"""Workspaces as the real cuDNN names them: beside published peaks, and beside the unmodified torch on a dry card."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cudnn.scripted_worker import needs_compiler
from environment import ENVIRONMENT, needs_cuda_torch
from models.convolution_steps import STEPS
from torch import nn

import memplan
from memplan.cudnn import ask as asking

pytestmark = [needs_cuda_torch, needs_compiler]
GIB = 1 << 30


def forward(make: Callable[[], nn.Module], *sizes: int, dtype: torch.dtype = torch.half) -> Callable[[], Any]:
    def build() -> Callable[[], None]:
        model, data = make().cuda().to(dtype).requires_grad_(False), torch.zeros(*sizes, device="cuda", dtype=dtype)

        def step() -> None:
            model(data)

        return step

    return build


@pytest.fixture(autouse=True)
def of_cudnn_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An emulated card runs what cuDNN says, also where it is known that a real one took something else."""
    monkeypatch.setattr(asking, "measured", lambda card, version: {})


def predicted(build: Callable[[], Any], card: str) -> memplan.Timeline:
    return memplan.simulate(memplan.record(build, device=card, steps=1, cudnn=ENVIRONMENT))


def test_a_published_peak_of_a_3d_convolution() -> None:
    """pytorch#95024, an A100 of 80 GB: 12.874233344 GB at most."""
    build = forward(lambda: nn.Conv3d(64, 32, 3, padding=1), 1, 64, 361, 370, 251)
    assert predicted(build, "a100-80gb").steps[0].peak_allocated == 12_874_233_344


def test_a_published_reserve_of_a_2d_convolution() -> None:
    """pytorch#123533, an A100 of 80 GB: 4.02 GiB reserved after a convolution of 1 GiB into 1 GiB."""
    build = forward(lambda: nn.Conv2d(256, 256, 3, padding=1, bias=False), 1, 256, 2048, 1024)
    assert round(predicted(build, "a100-80gb").peak_reserved / GIB, 2) == 4.02


def test_a_published_peak_of_a_3d_convolution_in_float32() -> None:
    """pytorch#128947: 17 GB at a depth of 4: 7.993 GiB of input, 0.996 of result, the rest workspace."""
    build = forward(lambda: nn.Conv3d(256, 64, 3), 1, 256, 4, 1090, 1922, dtype=torch.float32)
    peak = predicted(build, "a100-80gb").steps[0].peak_allocated
    assert round(peak / GIB) == 17
    assert peak / GIB - 7.993 - 0.996 == pytest.approx(7.993, abs=0.003)


@pytest.mark.parametrize("name", ["plain", "channels_last", pytest.param("conv3d", marks=pytest.mark.slow)] + [
    pytest.param(name, marks=pytest.mark.slow) for name in STEPS if name not in ("plain", "channels_last", "conv3d")
])  # fmt: skip
def test_a_step_takes_what_torch_takes_on_a_dry_card(name: str) -> None:
    """Each step's peak is equal to the byte; under benchmark nobody knows the second step's."""
    build = STEPS[name]
    trace = memplan.record(build, device="h100", cudnn=ENVIRONMENT)
    dry = memplan.simulate(memplan.measure(build, device="h100", dry=True, environment=ENVIRONMENT))
    low, high = (memplan.simulate(trace, workspace=case) for case in ("low", "high"))
    if name != "benchmark":
        assert [step.peak_allocated for step in high.steps] == [step.peak_allocated for step in dry.steps]
        assert low.peak_reserved == high.peak_reserved
    assert high.steps[0].peak_allocated == dry.steps[0].peak_allocated
    assert low.steps[1].peak_allocated <= dry.steps[1].peak_allocated <= high.steps[1].peak_allocated
