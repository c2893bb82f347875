"""Measuring runs a step twice; the second run finds what the first one found."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import nn
from truth.cpu_allocator import measured_peak

import memplan


def test_a_model_from_outside_is_trained_once() -> None:
    """As one run of two steps trains it, random numbers, momentum and statistics too."""

    def trained(run: Callable[[Callable[[], Callable[[], None]]], object]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        generator = torch.Generator().manual_seed(1)

        def build() -> Callable[[], None]:
            def step() -> None:
                x = torch.randn(4, 8, generator=generator) * random.random()
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
                schedule.step()

            return step

        random.seed(0)
        torch.manual_seed(2)
        run(build)
        return [*model.state_dict().values(), generator.get_state(), torch.tensor(optimizer.param_groups[0]["lr"])]

    def plainly(build: Callable[[], Callable[[], None]]) -> None:
        step = build()
        step()
        step()

    for measured, plain in zip(trained(memplan.measure), trained(plainly), strict=True):
        assert torch.equal(measured, plain)


def test_lists_in_the_state_of_an_optimizer_are_put_back() -> None:
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    memplan.measure(lambda: lambda: optimizer.step(closure))  # pyright: ignore[reportArgumentType]  # it returns one
    (state,) = optimizer.state.values()
    assert len(state["old_dirs"]) < state["n_iter"] <= 8


def test_gradients_and_states_of_outside_are_made_anew() -> None:
    """Had the first run's stayed, the second would not allocate them."""

    def outside() -> Callable[[], Callable[[], None]]:
        model = nn.Linear(64, 64)
        optimizer = torch.optim.Adam(model.parameters())

        def build() -> Callable[[], None]:
            x = torch.randn(4, 64)

            def step() -> None:
                model(x).sum().backward()
                optimizer.step()

            return step

        return build

    assert memplan.simulate(memplan.measure(outside())).peak_allocated == measured_peak(outside())
