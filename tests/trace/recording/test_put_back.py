"""Measuring runs a step twice; the second run finds what the first one found."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from allocator import measured_peak
from torch import nn

import memplan


def test_a_model_from_outside_is_trained_once() -> None:
    """As one run of two steps trains it, random numbers, momentum and statistics too."""

    def trained(run: Callable[[Callable[[], Callable[[], None]]], object]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        generator = torch.Generator().manual_seed(1)

        def build() -> Callable[[], None]:
            def step() -> None:
                x = torch.randn(4, 8, generator=generator) * random.random()
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()

            return step

        random.seed(0)
        torch.manual_seed(2)
        run(build)
        return [*model.state_dict().values(), generator.get_state(), torch.tensor(len(optimizer.state))]

    def plainly(build: Callable[[], Callable[[], None]]) -> None:
        step = build()
        step()
        step()

    for measured, plain in zip(trained(memplan.measure), trained(plainly), strict=True):
        assert torch.equal(measured, plain)


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
