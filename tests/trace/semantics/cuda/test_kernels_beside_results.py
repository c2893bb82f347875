"""Ops whose kernels take memory of their own on a card, beside what torch counted there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from environment import ENVIRONMENT, needs_cuda_torch
from torch import Tensor
from torch.nn import functional as F
from truth.card_peaks import peaks, steps_of

import memplan

ROWS, LINE, CUBE = (64, 1000), (30_000,), (50, 30, 40)


def alone(op: Callable[[Tensor], object]) -> Callable[[Tensor], Tensor]:
    """An op that has no derivative, before one that takes little."""

    def run(x: Tensor) -> Tensor:
        op(x.detach())
        return x

    return run


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype, device="cuda")


def bits(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bool, device="cuda")


def places(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64, device="cuda")


def sampled(x: Tensor) -> Tensor:
    return F.grid_sample(x, ones(4, 64, 64, 2), align_corners=False)


def solved(x: Tensor) -> Tensor:
    side = x.shape[-2]
    return torch.linalg.solve_triangular(ones(*x.shape[:-2], side, side), x, upper=True)


def gru(x: Tensor) -> Tensor:
    gates, bias = ones(384, 128), ones(384)
    return torch.gru_cell(x, ones(64, 128).requires_grad_(), gates, gates * 2, bias, bias)


CASES: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor], int]] = {
    "distances of two sets": ((500, 64), lambda x: torch.cdist(x, ones(600, 64)), 70_641_152),
    "of few": ((20, 64), lambda x: torch.cdist(x, ones(30, 64)), 67_167_232),
    "differing coordinates": ((50, 64), lambda x: torch.cdist(x, ones(30, 64), p=0.0), 67_155_456),
    "infinite": (ROWS, alone(lambda x: x.isinf()), 67_684_864),
    "largest of columns": (ROWS, alone(lambda x: x.topk(3, dim=0)), 67_621_888),
    "sorted rows": (ROWS, alone(lambda x: x.sort()), 68_141_056),
    "sorted columns": (ROWS, alone(lambda x: x.sort(dim=0)), 68_133_376),
    "running sum": (LINE, alone(lambda x: x.cumsum(0)), 67_350_528),
    "running sum of rows": (ROWS, alone(lambda x: x.cumsum(1)), 67_621_888),
    "embedding": ((1000, 64), lambda x: F.embedding(places(4000), x), 69_161_984),
    "bags": ((1000, 64), lambda x: F.embedding_bag(places(1000, 4), x), 68_442_624),
    "histogram": (LINE, alone(lambda x: x.histc(10)), 67_350_528),
    "samples of an image": ((4, 8, 64, 64), sampled, 68_420_608),
    "a gated cell": ((64, 128), gru, 68_163_072),
    "few large triangles": ((4, 100, 3), solved, 67_285_504),
    "a sum of one truth": ((1,), alone(lambda x: bits().sum()), 67_110_912),
}  # fmt: skip
"""Shape, op, and the peak in bytes of its step, as torch 2.11.0+cu130 counted it on a dry H100."""


def build() -> Callable[[], None]:
    """One step for each case, in order."""
    return steps_of(CASES)


@pytest.fixture(scope="module")
def predicted() -> dict[str, int]:
    return peaks(memplan.record(build, device="h100", steps=len(CASES)), CASES)


@pytest.mark.parametrize("name", CASES)
def test_what_a_kernel_takes_is_predicted(name: str, predicted: dict[str, int]) -> None:
    assert predicted[name] == CASES[name][2]


@needs_cuda_torch
def test_the_figures_are_those_of_a_dry_card() -> None:
    dry = memplan.measure(build, device="h100", dry=True, environment=ENVIRONMENT, steps=len(CASES))
    assert peaks(dry, CASES) == {name: peak for name, (_, _, peak) in CASES.items()}


def test_products_of_nothing_take_no_workspace() -> None:
    """As torch 2.11.0+cu130 on a dry H100: an op without rows, columns or places between them calls no library."""

    def nothing() -> Callable[[], None]:
        narrow, wide = ones(4, 0).requires_grad_(), ones(0, 4)
        return lambda: (narrow @ wide).sum().backward()

    assert memplan.simulate(memplan.record(nothing, device="h100")).peak_allocated == 1024
