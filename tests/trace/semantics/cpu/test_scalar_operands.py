"""Single ops with numbers as operands: the predicted peak beside what torch's profiler saw without a mode."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from environment import thinned
from torch import nn
from truth.cpu_allocator import measured_peak

import memplan

MADE: dict[str, Callable[[], torch.Tensor]] = {
    "float": lambda: torch.ones(100),
    "int": lambda: torch.ones(100, dtype=torch.int64),
    "bool": lambda: torch.ones(100, dtype=torch.bool),
    "byte": lambda: torch.ones(100, dtype=torch.int8),
    "bfloat16": lambda: torch.ones(100, dtype=torch.bfloat16),
    "double": lambda: torch.ones(100, dtype=torch.float64),
    "complex": lambda: torch.ones(100, dtype=torch.complex64),
}
OPS: dict[str, Callable[[torch.Tensor], Any]] = {
    "times a fraction": lambda x: x * 2.0,
    "times a whole number": lambda x: 2 * x,
    "plus, of two numbers": lambda x: torch.add(x, 1, alpha=2),
    "plus, the number first": lambda x: torch.add(0.3, x, alpha=0.7 if x.is_floating_point() else 2),
    "in radians": lambda x: torch.deg2rad(x) if x.is_floating_point() else x,
    "in degrees": lambda x: torch.rad2deg(x) if x.is_floating_point() else x,
    "minus": lambda x: 1 - x if x.dtype is not torch.bool else x,
    "from a fraction": lambda x: 0.5 - x if x.dtype is not torch.bool else x,
    "over": lambda x: x / 2,
    "its inverse": lambda x: 1 / x,
    "a power of two": lambda x: 2**x,
    "squared": lambda x: x**2,
    "compared": lambda x: x == 3,
    "compared to a fraction": lambda x: x != 0.5,
    "larger than a fraction": lambda x: x > 0.5 if not x.is_complex() else x,
    "to a fraction": lambda x: x**0.5,
    "its logarithm": lambda x: torch.xlogy(x, 2.5) if not x.is_complex() else x,
    "with a sign": lambda x: torch.copysign(x, -1.0) if not x.is_complex() else x,
    "the rest of a fraction": lambda x: x % 2.5 if not x.is_complex() and x.dtype is not torch.bool else x,
    "in place": lambda x: x.mul_(1).add_(0) if x.dtype is not torch.bool else x,
    "its inverse in place": lambda x: x.pow_(1) if x.dtype is not torch.bool else x,
    "filled": lambda x: x.fill_(1.0),
    "a list": lambda x: torch.ops.aten._foreach_mul.Scalar([x, x], 2) if x.dtype is not torch.bool else x,
    "its mean": lambda x: x.mean() if x.is_floating_point() else x,
    "is infinite": lambda x: torch.isinf(x) if not x.is_complex() else x,
    "rounded": lambda x: torch.div(x, 2, rounding_mode="floor") if not x.is_complex() else x,
    "the rest": lambda x: x % 2 if not x.is_complex() else x,
    "shifted": lambda x: x << 2 if x.dtype is torch.int64 else x,
    "masked": lambda x: torch.where(x == x, x, 0),
    "a new one": lambda x: torch.tensor([1.0, 2.0]),
}


@pytest.mark.parametrize(("op", "dtype"), thinned(itertools.product(OPS, MADE), 9))
def test_a_number_takes_what_the_allocator_saw(op: str, dtype: str) -> None:
    def build() -> Any:
        x = MADE[dtype]()
        return lambda: OPS[op](x)

    assert memplan.simulate(memplan.record(build, device="cpu")).peak_allocated == measured_peak(build)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("shape", [(6, 32, 20), (32, 20), (4, 20, 32)])
def test_a_linear_layer_adds_its_bias_in_place(gradients: bool, shape: tuple[int, ...]) -> None:
    """Under a dispatch mode torch makes another result; no mode of ours is on while it is measured."""

    def build() -> Any:
        layer, x = nn.Linear(32, 64), torch.ones(shape)

        def step() -> None:
            with torch.set_grad_enabled(gradients):
                y = layer(x if shape[-1] == 32 else x.transpose(-1, -2))
            if gradients:
                y.sum().backward()

        return step

    assert memplan.simulate(memplan.record(build, device="cpu")).peak_allocated == measured_peak(build)
