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


def permuted(count: int) -> Callable[[Tensor], Tensor]:
    return alone(lambda x: torch.randperm(count, device="cuda"))


def sampled(x: Tensor, *, corners: bool) -> Tensor:
    return F.grid_sample(x, ones(4, 64, 64, 2), align_corners=corners)


def solved(x: Tensor) -> Tensor:
    side = x.shape[-2]
    return torch.linalg.solve_triangular(ones(*x.shape[:-2], side, side), x, upper=True)


def gru(x: Tensor) -> Tensor:
    gates, bias = ones(384, 128), ones(384)
    return torch.gru_cell(x, ones(64, 128).requires_grad_(), gates, gates * 2, bias, bias)


CASES: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor], int]] = {
    "distances of all points": ((100, 64), F.pdist, 2_606_592),
    "and of many": ((1000, 64), F.pdist, 258_363_904),
    "distances of two sets": ((500, 64), lambda x: torch.cdist(x, ones(600, 64)), 70_641_152),
    "by another norm": ((500, 64), lambda x: torch.cdist(x, ones(600, 64), p=1.0), 146_719_744),
    "of batches by another norm": ((4, 50, 64), lambda x: torch.cdist(x, ones(4, 30, 64), p=3.0), 68_827_136),
    "of few": ((20, 64), lambda x: torch.cdist(x, ones(30, 64)), 67_167_232),
    "differing coordinates": ((50, 64), lambda x: torch.cdist(x, ones(30, 64), p=0.0), 67_155_456),
    "infinite": (ROWS, alone(lambda x: x.isinf()), 67_684_864),
    "bilinear": ((64, 100), lambda x: F.bilinear(x, ones(64, 50), ones(30, 100, 50)), 69_079_552),
    "permutation of 2": ((8,), permuted(2), 67_111_936),
    "permutation of 1000": ((8,), permuted(1_000), 67_134_464),
    "permutation of 20000": ((8,), permuted(20_000), 67_843_584),
    "permutation of 40000": ((8,), permuted(40_000), 69_049_344),
    "a draw": (ROWS, alone(lambda x: torch.multinomial(x, 1)), 67_622_400),
    "draws": (ROWS, alone(lambda x: torch.multinomial(x, 50)), 67_660_288),
    "draws with replacement": (ROWS, alone(lambda x: torch.multinomial(x, 50, replacement=True)), 68_158_464),
    "of one distribution": (LINE, alone(lambda x: torch.multinomial(x, 50, replacement=True)), 67_591_680),
    "median": (ROWS, lambda x: x.median(), 69_433_856),
    "median but for nan": (ROWS, lambda x: x.nanmedian(), 69_433_856),
    "median of few": ((7,), lambda x: x.nanmedian(), 67_113_984),
    "largest": (CUBE, lambda x: x.max(), 67_952_640),
    "largest of columns": (ROWS, alone(lambda x: x.topk(3, dim=0)), 67_621_888),
    "sorted rows": (ROWS, alone(lambda x: x.sort()), 68_141_056),
    "sorted columns": (ROWS, alone(lambda x: x.sort(dim=0)), 68_133_376),
    "running sum": (LINE, alone(lambda x: x.cumsum(0)), 67_350_528),
    "running sum of many": ((1_000_000,), alone(lambda x: x.cumsum(0)), 75_114_496),
    "in half precision": ((1_000_000,), alone(lambda x: x.bfloat16().cumsum(0)), 75_113_472),
    "in double precision": ((100_000,), alone(lambda x: x.double().cumsum(0)), 69_112_832),
    "running sum of rows": (ROWS, alone(lambda x: x.cumsum(1)), 67_621_888),
    "gradient of columns": ((1000, 64), lambda x: x[:, places(5000)], 88_882_688),
    "gradient of places": ((1000, 64), lambda x: x[places(5000), places(5000)], 67_972_096),
    "embedding": ((1000, 64), lambda x: F.embedding(places(4000), x), 69_161_984),
    "embedding of narrow rows": ((4, 3), lambda x: F.embedding(places(3584), x), 67_343_360),
    "bags": ((1000, 64), lambda x: F.embedding_bag(places(1000, 4), x), 68_442_624),
    "marked places": (ROWS, lambda x: x.masked_scatter(bits(*ROWS), ones(64_000)), 68_455_424),
    "windows": ((1000, 64), lambda x: x.unfold(0, 10, 3), 67_630_080),
    "histogram": (LINE, alone(lambda x: x.histc(10)), 67_350_528),
    "margins": (ROWS, lambda x: F.soft_margin_loss(x, ones(*ROWS)), 68_389_888),
    "squares": (ROWS, alone(lambda x: F.mse_loss(x, ones(*ROWS))), 68_132_864),
    "margins alone": (ROWS, alone(lambda x: F.soft_margin_loss(x, ones(*ROWS))), 67_877_376),
    "samples of an image": ((4, 8, 64, 64), lambda x: sampled(x, corners=True), 68_944_896),
    "not by cuDNN": ((4, 8, 64, 64), lambda x: sampled(x, corners=False), 68_420_608),
    "groups of single elements": ((64, 128), lambda x: F.group_norm(x, 4, ones(128)), 67_278_336),
    "a gated cell": ((64, 128), gru, 68_163_072),
    "triangle": ((10, 3), solved, 67_112_960),
    "triangles": ((9, 100, 3), solved, 67_505_152),
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


@pytest.mark.parametrize(
    ("op", "peak"),
    [
        (lambda x: x.max(), 843_776),
        (lambda x: x.prod(), 721_920),
        (lambda x: x.prod(0), 796_672),
        (lambda x: x.prod(-1), 800_256),
        (lambda x: x.cumprod(0), 1_502_208),
        (lambda x: x.cumprod(-1), 1_502_208),
    ],
)
def test_a_derivative_that_a_mode_changes_is_that_without_one(op: Callable[[Tensor], Tensor], peak: int) -> None:
    """As torch 2.11.0+cu130 counted it on a dry H100, each in a process's first memory: zeros, so that none is found
    among the operands."""

    def alone() -> Callable[[], None]:
        x = ones(*CUBE).requires_grad_()
        return lambda: op(x).sum().backward()

    assert memplan.simulate(memplan.record(alone, device="h100", steps=1)).peak_allocated == peak


def test_products_of_nothing_take_no_workspace() -> None:
    """As torch 2.11.0+cu130 on a dry H100: an op without rows, columns or places between them calls no library."""

    def nothing() -> Callable[[], None]:
        narrow, wide = ones(4, 0).requires_grad_(), ones(0, 4)
        return lambda: (narrow @ wide).sum().backward()

    assert memplan.simulate(memplan.record(nothing, device="h100")).peak_allocated == 1024
