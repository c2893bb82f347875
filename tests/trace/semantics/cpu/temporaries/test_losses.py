"""Losses, reduced in each way: the predicted peak beside what torch's profiler saw without a mode."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from environment import slow, thinned
from torch import Tensor
from torch.nn import functional as F
from truth.cpu_allocator import measured_peak

import memplan

LOSSES: dict[str, Callable[..., Tensor]] = {
    "squares": F.mse_loss,
    "absolutes": F.l1_loss,
    "smooth absolutes": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "soft margin": F.soft_margin_loss,
    "cross entropy": F.binary_cross_entropy,
    "cross entropy of logits": F.binary_cross_entropy_with_logits,
    "divergence": F.kl_div,
    "poisson": F.poisson_nll_loss,
}


def peaks(build: Callable[[], Callable[[], None]]) -> tuple[int, int]:
    return memplan.simulate(memplan.record(build, device="cpu")).peak_allocated, measured_peak(build)


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize(
    ("name", "reduction", "dtype"),
    thinned(itertools.product(LOSSES, ["mean", "none", "sum"], [torch.float32, torch.bfloat16]), 11)
    + slow(*itertools.product(LOSSES, ["mean", "none", "sum"], [torch.float64])),
)
def test_a_loss_takes_what_the_allocator_saw(name: str, reduction: str, dtype: torch.dtype) -> None:
    for shape in ((), (7,), (3, 100)):

        def build(shape: tuple[int, ...] = shape) -> Any:
            x, y = torch.rand(shape).to(dtype).requires_grad_(), torch.rand(shape).to(dtype)

            def step() -> None:
                x.grad = None
                LOSSES[name](x, y, reduction=reduction).sum().backward()

            return step

        predicted, measured = peaks(build)
        assert abs(predicted - measured) <= 16  # a number that torch wraps
