"""Numbers that derivatives keep: the predicted peak beside what the profiler saw without a mode."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from environment import thinned
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from truth.cpu_allocator import measured_peak

import memplan


def assert_peak(build: Callable[[], Callable[[], Any]]) -> None:
    assert memplan.simulate(memplan.record(build, device="cpu")).peak_allocated == measured_peak(build)


def part(x: Tensor) -> Tensor:
    return (x * 2.0).sin() * 3


OPS: dict[str, Callable[[Tensor], Any]] = {
    "one": lambda x: x * 2.0,
    "a whole one": lambda x: x * 2,
    "a truth": lambda x: x * True,
    "a chain of them": lambda x: ((x * 2.0).sin() / 3).exp() * 4,
    "many": lambda x: sum((x * n).sin() for n in range(8)),
    "an inverse": lambda x: 1 / x,
    "in place": lambda x: (x + 1).mul_(2.0).sin(),
    "divided in place": lambda x: (x + 1).div_(2.0).sin(),
    "of a result that nothing reads": lambda x: [x * 2.0, (x * 3.0).sin()][1],
    "checkpointed": lambda x: checkpoint(part, x, use_reentrant=False),
    "checkpointed anew": lambda x: checkpoint(part, x, use_reentrant=True),
    "not kept": lambda x: (x + 2.0 - 3).sin() ** 2,
}


@pytest.mark.parametrize(
    ("name", "dtype"), thinned(itertools.product(OPS, [torch.float32, torch.bfloat16, torch.float64]), 4)
)
def test_a_number_lives_until_its_derivative_has_run(name: str, dtype: torch.dtype) -> None:
    def build() -> Any:
        x = torch.rand(10, dtype=dtype, requires_grad=True)

        def step() -> None:
            x.grad = None
            OPS[name](x).sum().backward()

        return step

    assert_peak(build)


def test_a_number_goes_with_its_graph() -> None:
    def build() -> Any:
        x = torch.rand(4, requires_grad=True)

        def step() -> None:
            x.grad = None
            dropped = (x * 2.0).sin()
            other = (x * 3.0).exp()
            del dropped
            ((x * 4.0).cos() + other).sum().backward()

        return step

    assert_peak(build)


def test_without_a_backward_pass_numbers_do_not_pile_up() -> None:
    def build() -> Any:
        x = torch.rand(4, requires_grad=True)

        def step() -> None:
            for _ in range(5):
                (x * 2.0 * 3.0).sin()

        return step

    assert_peak(build)


def test_a_graph_that_is_kept_keeps_its_numbers() -> None:
    def build() -> Any:
        x = torch.rand(4, requires_grad=True)

        def step() -> None:
            x.grad = None
            loss = (x * 2.0 * 3.0).sin().sum()
            loss.backward(retain_graph=True)
            loss.backward()

        return step

    assert_peak(build)


def test_a_derivative_of_a_derivative() -> None:
    def build() -> Any:
        x = torch.rand(4, requires_grad=True)

        def step() -> None:
            x.grad = None
            (gradient,) = torch.autograd.grad(((x * 2.0) ** 3 / 5).sum(), x, create_graph=True)
            (gradient * 2.0).sum().backward()

        return step

    assert_peak(build)


LAYERS: dict[str, tuple[tuple[int, ...], Callable[[], Callable[[Tensor], Tensor]]]] = {
    "attention": ((3, 2, 8), lambda: (lambda layer: lambda x: layer(x, x, x)[0])(nn.MultiheadAttention(8, 2))),
    "response norm": ((1, 4, 3, 3), lambda: lambda x: F.local_response_norm(x, 2)),
    "pool of powers": ((1, 4, 8), lambda: lambda x: F.lp_pool1d(x, 2, 2)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_multiply_by_numbers(name: str) -> None:
    shape, make = LAYERS[name]

    def build() -> Any:
        layer, x = make(), torch.rand(shape, requires_grad=True)

        def step() -> None:
            x.grad = None
            layer(x).sum().backward()

        return step

    assert_peak(build)


def test_a_number_that_divides_a_view_in_place_stops_nothing() -> None:
    """autograd makes the node of such a view anew while it dispatches what follows, and holds a lock meanwhile."""

    def build() -> Any:
        q, k = (torch.randn(2, 4, 64, 16, requires_grad=True) for _ in range(2))

        def step() -> None:
            q.grad = k.grad = None
            torch.einsum("bhid,bhjd->bhij", q, k).div_(4).softmax(-1).sum().backward()

        return step

    near = 16  # the number itself is left out
    assert memplan.simulate(memplan.record(build)).peak_allocated == pytest.approx(measured_peak(build), abs=near)
