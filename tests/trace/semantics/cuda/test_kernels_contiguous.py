"""Ops whose kernels make an operand contiguous on a card, such as the expanded gradient of a bare sum."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from environment import ENVIRONMENT, needs_cuda_torch
from torch import Tensor
from torch.nn import functional as F
from truth.card_peaks import peaks, steps_of

import memplan

IMAGE, LINE, VOLUME, MATRIX = (4, 64, 32, 32), (8, 64, 512), (2, 16, 16, 16, 16), (512, 512)


def resized(mode: str, antialias: bool = False) -> Callable[[Tensor], Tensor]:
    return lambda x: F.interpolate(x, scale_factor=2, mode=mode, antialias=antialias)


def turned(op: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The same of a view that is not contiguous, and without its gradient: the copy is one of the forward pass."""
    return lambda x: op(x.detach().transpose(1, 2)).sum() + x


def labels() -> Tensor:
    return torch.zeros(512, dtype=torch.int64, device="cuda")


CASES: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor], int]] = {
    "unfold": (IMAGE, lambda x: F.unfold(x, 3, padding=1), 19_923_968),
    "unfold of apart patches": (IMAGE, lambda x: F.unfold(x, 2, stride=4), 2_622_464),
    "unfold of a view": ((4, 32, 64, 32), turned(lambda x: F.unfold(x, 3)), 11_440_128),
    "fold": ((4, 576, 900), lambda x: F.fold(x, (32, 32), 3), 18_686_976),
    "fold of a view": ((4, 900, 576), turned(lambda x: F.fold(x, (32, 32), 3)), 24_883_200),
    "fold of apart patches": ((2, 256, 225), lambda x: F.fold(x, (60, 60), 2, stride=4), 4_148_224),
    "roll": (IMAGE, lambda x: x.roll(1, 2), 3_146_752),
    "roll by two dimensions": (IMAGE, lambda x: x.roll((1, 2), (2, 3)), 3_146_752),
    "roll by three dimensions of a view": (IMAGE, turned(lambda x: x.roll((1, 1, 1), (1, 2, 3))), 4_194_304),
    "roll of a flat view": (IMAGE, turned(lambda x: x.roll(1)), 3_145_728),
    "reflected line": (LINE, lambda x: F.pad(x, [1, 2], mode="reflect"), 3_152_896),
    "reflected image": (IMAGE, lambda x: F.pad(x, [1, 2, 1, 2], mode="reflect"), 3_352_576),
    "nearest line": (LINE, resized("nearest"), 4_195_328),
    "nearest-exact line": (LINE, resized("nearest-exact"), 4_195_328),
    "nearest-exact line of a view": (LINE, turned(resized("nearest-exact")), 4_194_304),
    "nearest-exact volume": (VOLUME, resized("nearest-exact"), 5_243_904),
    "nearest-exact volume of a view": (VOLUME, turned(resized("nearest-exact")), 5_242_880),
    "linear line": (LINE, resized("linear"), 4_195_328),
    "antialiased bilinear": (IMAGE, resized("bilinear", antialias=True), 6_292_480),
    "antialiased bilinear of a view": (IMAGE, turned(resized("bilinear", antialias=True)), 6_291_456),
    "antialiased bicubic": (IMAGE, resized("bicubic", antialias=True), 6_292_480),
    "antialiased bicubic of a view": (IMAGE, turned(resized("bicubic", antialias=True)), 6_291_456),
    "adaptive max pool of volumes": (VOLUME, lambda x: F.adaptive_max_pool3d(x, 3), 1_060_352),
    "fractional max pool": (IMAGE, lambda x: F.fractional_max_pool2d(x, 2, output_size=16), 2_884_608),
    "negative log likelihood": (MATRIX, lambda x: F.nll_loss(x, labels(), reduction="none"), 2_104_832),
    "margin of classes": (MATRIX, lambda x: F.multi_margin_loss(x, labels(), reduction="none"), 2_104_320),
    "margin of many labels": (
        MATRIX, lambda x: F.multilabel_margin_loss(x, labels().repeat(512, 1), reduction="none"), 5_245_952,
    ),
}  # fmt: skip
"""Shape, op, and the peak in bytes of its step, as torch 2.11.0+cu130 counted it on a dry H100."""


def build() -> Callable[[], None]:
    """One step for each case, in order."""
    return steps_of(CASES)


@pytest.fixture(scope="module")
def predicted() -> dict[str, int]:
    return peaks(memplan.record(build, device="h100", steps=len(CASES)), CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_copy_is_predicted(name: str, predicted: dict[str, int]) -> None:
    assert predicted[name] == CASES[name][2]


@needs_cuda_torch
def test_the_figures_are_those_of_a_dry_card() -> None:
    dry = memplan.measure(build, device="h100", dry=True, environment=ENVIRONMENT, steps=len(CASES))
    assert peaks(dry, CASES) == {name: peak for name, (_, _, peak) in CASES.items()}
