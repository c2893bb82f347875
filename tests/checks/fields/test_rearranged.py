"""Ops that take positions apart and put them together, against gradients of what they compute."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks.random_stacks import probed
from environment import slow
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import memplan
from memplan.checks.fields.walk import Followed, follow
from memplan.trace.step import StepOptions, build_of


def followed(model: Any, *shape: int) -> Followed:
    build = build_of(model, StepOptions(("x".join(map(str, shape)),), train=False).checked())
    return follow(memplan.record(build, device="cpu", steps=1))


def lost(found: Followed) -> list[tuple[float, float]]:
    (output,) = found.outputs
    return [tuple(max(0.0, float(side)) for side in field.lost(size)) for size, field in output.spatial]  # pyright: ignore[reportReturnType]  # two sides


def conv(channels: int, out: int, kernel: int = 3, padding: int = 0, **more: Any) -> nn.Conv2d:
    made = nn.Conv2d(channels, out, kernel, padding=padding, bias=False, **more).double()
    nn.init.ones_(made.weight)
    return made


class Apply(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def patchwise(kernel: int, stride: int) -> Callable[[Tensor], Tensor]:
    """Patches of which each number sees all of its patch, put back where they were."""

    def function(x: Tensor) -> Tensor:
        size = [(n - kernel) // stride * stride + kernel for n in x.shape[2:]]
        rows = F.unfold(x[:, :, : size[0], : size[1]], kernel, stride=stride)
        return F.fold(rows.sum(1, keepdim=True) + 0 * rows, (size[0], size[1]), kernel, stride=stride)

    return function


def windows(size: int, step: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x.unfold(2, size, step).unfold(3, size, step).sum((-1, -2))


def resized(down: bool, mode: str) -> Callable[[Tensor], Tensor]:
    return lambda x: F.interpolate(x, scale_factor=0.5 if down else 2.0, mode=mode, antialias=True)


def there_and_back(x: Tensor) -> Tensor:
    """Shuffled pixels between two convolutions, and back: positions are what they were."""
    return F.pixel_shuffle(F.pixel_unshuffle(x, 2), 2)


def written(x: Tensor) -> Tensor:
    out = x.new_zeros(*x.shape[:2], x.shape[2] + 3, x.shape[3] + 3)
    out[:, :, 1:-2, 1:-2] = x
    return out


def mixed(x: Tensor) -> Tensor:
    return torch.einsum("nchw,cd->ndhw", x, torch.ones(x.shape[1], x.shape[1], dtype=x.dtype))


FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "patches side by side": (patchwise(3, 3), 3),
    "patches that overlap": (patchwise(4, 2), 2),
    "windows": (windows(3, 1), 1),
    "windows with a step": (windows(3, 2), 1),
    "patches in rows": (windows(2, 2), 1),
    "smaller, antialiased": (resized(True, "bilinear"), 1),
    "larger, antialiased": (resized(False, "bicubic"), 2),
    "smaller, bicubic": (resized(True, "bicubic"), 1),
    "flipped twice": (lambda x: x.flip(2, 3).flip(2, 3), 1),
    "shuffled pixels and back": (there_and_back, 1),
    "unshuffled pixels": (lambda x: F.pixel_unshuffle(x, 2).sum(1, keepdim=True).expand(-1, 4, -1, -1), 1),
    "shuffled pixels": (lambda x: F.pixel_shuffle(x.sum(1, keepdim=True).expand(-1, 16, -1, -1), 2), 2),
    "written into zeros": (written, 1),
    "a product of channels": (mixed, 1),
    "circular padding": (lambda x: F.pad(x, (2, 1, 1, 2), mode="circular"), 1),
}
"""A function, and how many outputs there are before their fields repeat."""


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("after", [1, *slow(0)])
def test_as_the_probe(name: str, after: int) -> None:
    function, period = FUNCTIONS[name]
    make = lambda: nn.Sequential(conv(2, 4), Apply(function), conv(4, 1, 1 + 2 * after))  # noqa: E731
    expected, _ = probed(make(), 50, 2, period)
    assert lost(followed(lambda: make().float(), 1, 2, 50, 50)) == [(float(a), float(b)) for a, b in expected]


@pytest.mark.parametrize(
    "function", [lambda x: x.flip(2), *(lambda x, k=k: torch.rot90(x, k, (2, 3)) for k in (1, 2, 3))]
)
def test_turned_over_it_loses_the_same_of_the_input(function: Callable[[Tensor], Tensor]) -> None:
    """5 rows and 1 column on top and left alone, of an image that is turned later."""
    front = lambda x: F.pad(x[:, :, 5:, 1:], (0, 1, 0, 1))  # noqa: E731
    model = lambda: nn.Sequential(conv(2, 4), Apply(front), Apply(function), conv(4, 1)).float()  # noqa: E731
    assert lost(followed(model, 1, 2, 40, 30)) == [(7, 1), (3, 1)]


@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(st.lists(st.sampled_from(sorted(FUNCTIONS)), min_size=2, max_size=2), st.booleans(), st.integers(60, 63))
def test_one_after_another(names: list[str], padded: bool, size: int) -> None:
    chosen = [FUNCTIONS[name] for name in names]

    def make() -> nn.Module:
        between = [part for function, _ in chosen for part in (Apply(function), conv(4, 4, 3, int(padded)))]
        return nn.Sequential(conv(2, 4), *between)

    try:
        expected, _ = probed(make(), size, 2, math.prod(period for _, period in chosen))
    except RuntimeError:  # a size that does not divide
        reject()
    found = lost(followed(lambda: make().float(), 1, 2, size, size))
    assert found == [(float(a), float(b)) for a, b in expected], names


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(2, 2, 0), (3, 3, 0), (3, 2, 1)])
def test_what_was_pooled_goes_back_into_its_window(kernel: int, stride: int, padding: int) -> None:
    """Every place that a value can go back to, found with values at random."""
    size = 24
    windows = [kernel] * 2, [stride] * 2, [padding] * 2, [size] * 2
    seen: dict[int, set[int]] = {}
    torch.manual_seed(0)
    for _ in range(60):
        x = torch.rand(1, 1, size, size)
        pooled, indices = F.max_pool2d(x, kernel, stride, padding, return_indices=True)
        back = F.max_unpool2d(torch.arange(1.0, pooled.numel() + 1).reshape(pooled.shape), indices, *windows)
        for row, column in back[0, 0].nonzero().tolist():
            seen.setdefault(row, set()).add((int(back[0, 0, row, column]) - 1) // pooled.shape[3])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(1, 1, 1)

        def forward(self, x: Tensor) -> Tensor:
            y, indices = F.max_pool2d(self.first(x), kernel, stride, padding, return_indices=True)
            return F.max_unpool2d(y, indices, *windows)

    (output,) = followed(Model, 1, 1, size, size).outputs
    (_, field), _ = output.spatial
    for place in range(6, size - 6):  # nearer to the border there are fewer
        rows = seen[place]
        pool = lambda row: (row * stride - padding, row * stride - padding + kernel - 1)  # noqa: E731
        assert field.spans[0].low(place) == min(pool(row)[0] for row in rows)
        assert field.spans[0].high(place) == max(pool(row)[1] for row in rows)
    assert list(lost(followed(Model, 1, 1, size, size))) == [(0, 0)] * 2
