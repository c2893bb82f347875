"""Predictions and targets of one size that broadcast: which pairs, and bytes as the mended step's recording."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from environment import slow
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import memplan
from memplan.checks.accidental_broadcast import broadcasts_by_mistake

ID = "accidental-broadcast"
ROWS = 512


def build_of(loss: Callable[[Tensor, Tensor], Tensor], target: tuple[int, ...] = (ROWS,)) -> Callable[[], Any]:
    def build() -> Callable[[], Any]:
        model, x, y = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)), torch.randn(ROWS, 8), None
        y = torch.randn(target)

        def step() -> None:
            model.zero_grad()
            loss(model(x), y).backward()

        return step

    return build


def segmentation(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Any]:
    def build() -> Callable[[], Any]:
        model, x, y = nn.Conv2d(3, 1, 3, padding=1), torch.randn(8, 3, 16, 16), torch.rand(8, 16, 16)

        def step() -> None:
            model.zero_grad()
            loss(model(x).sigmoid(), y).backward()

        return step

    return build


def found(build: Callable[[], Any], device: str = "cpu") -> list[memplan.Finding]:
    return [finding for finding in memplan.check(build, device=device) if finding.id == ID]


def peak(build: Callable[[], Any], device: str) -> int:
    return memplan.simulate(memplan.record(build, device=device), workspace="low").peak_allocated


def squared(p: Tensor, y: Tensor) -> Tensor:
    return (p - y).pow(2).mean()


def the_other_way(p: Tensor, y: Tensor) -> Tensor:
    return (y - p).abs().mean()


def by_function(p: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(p, y)


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("device", ["cpu", "h100"])
@pytest.mark.parametrize("loss", [squared, *slow(the_other_way, by_function)])
def test_a_column_and_a_row(loss: Callable[[Tensor, Tensor], Tensor], device: str) -> None:
    (finding,) = found(build_of(loss), device)
    assert finding.severity == "warning"
    assert finding.details["shapes"] == [[ROWS, 1], [ROWS], [ROWS, ROWS]]
    mended = build_of(lambda p, y: loss(p.squeeze(1), y))
    assert finding.bytes == pytest.approx(peak(build_of(loss), device) - peak(mended, device), rel=0.01)
    assert finding.bytes > ROWS * ROWS * 4
    assert found(mended, device) == []


def test_masks_without_their_channel() -> None:
    dice: Callable[[Tensor, Tensor], Tensor] = lambda p, y: 1 - 2 * (p * y).sum() / (p.sum() + y.sum())  # noqa: E731
    (finding,) = found(segmentation(dice))
    assert finding.details["shapes"] == [[8, 1, 16, 16], [8, 16, 16], [8, 8, 16, 16]]
    assert found(segmentation(lambda p, y: dice(p, y[:, None]))) == []


def pairwise(p: Tensor, y: Tensor) -> Tensor:
    score = p.flatten()
    return (score[:, None] - score).abs().mean() + (y[:, None] - score).abs().mean()


def each_with_each(p: Tensor, y: Tensor) -> Tensor:
    return (p - y[None, :]).abs().mean()


def normalized(p: Tensor, y: Tensor) -> Tensor:
    return ((p - p.mean(0)) / p.std(0)).pow(2).mean()


@pytest.mark.parametrize("loss", [pairwise, each_with_each, normalized], ids=lambda loss: loss.__name__)
def test_what_is_meant(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert found(build_of(loss)) == []


def test_weights_and_what_no_gradient_passes() -> None:
    def build() -> Callable[[], Any]:
        weight, x = nn.Parameter(torch.randn(64, 1)), torch.randn(64, requires_grad=True)
        positions, scale = torch.arange(64.0).reshape(64, 1).clone(), torch.arange(64.0)
        return lambda: ((weight * x).sum() + (positions * scale).sum()).backward()

    assert found(build) == []


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 4))
def test_the_rule_is_that_of_a_squeeze_that_is_missing(other: list[int], place: int) -> None:
    """Whenever it says yes, the pair really broadcasts to more than either has, and a squeeze makes them equal."""
    one = [*other[:place], 1, *other[place:]]
    told = broadcasts_by_mistake(tuple(one), tuple(other))
    try:
        size = (torch.empty(one) + torch.empty(other)).numel()
    except RuntimeError:
        assert not told
        return
    assert told == (size > math.prod(other) > 1)
