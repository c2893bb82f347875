"""What is held beside a model's step, against bytes worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import memplan
from memplan.integrations.scripts.beside import held_beside

BATCH, WIDTH = 64, 100
INPUT = memplan.spec(f"{BATCH}x{WIDTH}")
SCALARS = 16
"""The sum, its gradient of ones, and what else is one number."""


def beside(build: Callable[[], Callable[[], Any]], *, updates: bool = False, device: str = "cpu") -> int:
    trace = memplan.record(build, device=device)
    return held_beside(trace, "Sequential", ["0"], [INPUT], updates=updates)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH))


def held(build_more: Callable[[], Any] = lambda: None) -> Callable[[], Callable[[], Any]]:
    def build() -> Callable[[], Any]:
        model, data, more = net(), torch.randn(BATCH, WIDTH), build_more()
        return lambda: (model(data).sum().backward(), more)

    return build


def test_a_model_and_its_input_are_nothing_beside() -> None:
    assert beside(held()) <= SCALARS


def test_tensors_of_the_scripts_own_count_all_the_time() -> None:
    assert 0 <= beside(held(lambda: torch.zeros(1000))) - 4000 <= SCALARS


def test_a_second_tensor_like_the_input_counts() -> None:
    more = beside(held(lambda: torch.randn(BATCH, WIDTH)))
    assert 0 <= more - 4 * BATCH * WIDTH <= SCALARS


def test_another_models_weights_count() -> None:
    assert 0 <= beside(held(lambda: nn.Conv1d(10, 20, 3, bias=False))) - 4 * 600 <= SCALARS


def test_what_building_alone_holds_does_not() -> None:
    def build() -> Callable[[], Any]:
        step = held()()
        torch.zeros(100_000)
        return step

    assert beside(build) <= SCALARS


def test_a_loss_outside_counts_what_it_keeps_and_its_gradients() -> None:
    """exp keeps its result; its gradient is a tensor of its own, and so is the one that goes on to the model."""

    def build() -> Callable[[], Any]:
        model, data = net(), torch.randn(BATCH, WIDTH)
        return lambda: (model(data) * 2).exp().sum().backward()

    whole = 4 * BATCH * WIDTH
    assert 2 * whole <= beside(build) <= 2 * whole + 2 * SCALARS


def test_an_optimizers_state_counts_where_the_plan_has_none() -> None:
    def build() -> Callable[[], Any]:
        model, data = net(), torch.randn(BATCH, WIDTH)
        optimizer = torch.optim.SGD(model.parameters(), lr=1, momentum=0.9)

        def step() -> None:
            model(data).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    state = 4 * (WIDTH * WIDTH + WIDTH)
    assert beside(build, updates=True) <= SCALARS
    assert beside(build) >= state


def test_on_a_card_it_is_blocks() -> None:
    assert beside(held(lambda: torch.zeros(10)), device="h100") % 512 == 0
