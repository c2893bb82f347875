"""Zeroed gradients and untouched states, with bytes as the mended step's recording."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from environment import slow
from torch import nn

import memplan

ID = "idle-state"
Build = Callable[[], Callable[[], Any]]


def training(*, to_none: bool) -> Build:
    def build() -> Callable[[], Any]:
        model, x = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(6)]), torch.randn(16384, 1024)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)

        def step() -> None:
            optimizer.zero_grad(set_to_none=to_none)
            model(x).sigmoid().mean().backward()
            optimizer.step()

        return step

    return build


def freezing(*, dropped: bool) -> Build:
    """A backbone that was trained once, and is frozen since."""

    def build() -> Callable[[], Any]:
        backbone, head, x = nn.Linear(1024, 1024), nn.Linear(1024, 4), torch.randn(8, 1024)
        optimizer = torch.optim.Adam([*backbone.parameters(), *head.parameters()], foreach=False)
        head(backbone(x)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for parameter in backbone.parameters():
            parameter.requires_grad_(False)
            if dropped:
                del optimizer.state[parameter]

        def step() -> None:
            optimizer.zero_grad()
            head(backbone(x)).sum().backward()
            optimizer.step()

        return step

    return build


def found(build: Build, device: str) -> list[memplan.Finding]:
    return [finding for finding in memplan.check(build, device=device) if finding.id == ID]


def later_peak(build: Build, device: str) -> int:
    """Of a step in which gradients and states are there already."""
    return memplan.simulate(memplan.record(build, device=device), workspace="low").steps[-1].peak_allocated


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_zeroed_gradients(device: str) -> None:
    (finding,) = found(training(to_none=False), device)
    assert finding.details["held"] == 6 * (1024 * 1024 + 1024) * 4
    saved = later_peak(training(to_none=False), device) - later_peak(training(to_none=True), device)
    assert finding.bytes == pytest.approx(saved, rel=0.01)
    assert found(training(to_none=True), device) == []


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_states_that_nothing_updates(device: str) -> None:
    (finding,) = found(freezing(dropped=False), device)
    saved = later_peak(freezing(dropped=False), device) - later_peak(freezing(dropped=True), device)
    assert finding.bytes == pytest.approx(saved, rel=0.01)
    assert found(freezing(dropped=True), device) == []


def beside_others(others: int, *, trained: bool) -> Build:
    """A benchmark that keeps the models and optimizers of its earlier rows."""

    def build() -> Callable[[], Any]:
        x = torch.randn(8, 1024)
        models = [nn.Sequential(nn.Linear(1024, 1024), nn.BatchNorm1d(1024)) for _ in range(others + 1)]
        optimizers = [torch.optim.AdamW(model.parameters()) for model in models]

        def step(row: int = -1) -> None:
            optimizers[row].zero_grad()
            models[row](x).sum().backward()
            optimizers[row].step()

        for row in range(others if trained else 0):
            step(row)
        return step

    return build


@pytest.mark.parametrize(("device", "trained"), [("cpu", False), ("h100", True), *slow(("cpu", True), ("h100", False))])
def test_models_that_no_step_uses(device: str, trained: bool) -> None:
    """Weights, gradients and two moments each: what the step takes less without the others."""
    (finding,) = found(beside_others(2, trained=trained), device)
    saved = later_peak(beside_others(2, trained=trained), device) - later_peak(beside_others(0, trained=False), device)
    assert finding.bytes == pytest.approx(saved, rel=0.01)
    assert finding.bytes == pytest.approx(2 * (1024 * 1024 + 3 * 1024) * 4 * (4 if trained else 1), rel=0.01)
    assert (finding.details["kind"], len(finding.details["models"])) == ("unused models", 2)
    assert found(beside_others(0, trained=False), device) == []


def test_a_layer_that_the_model_skips_is_no_model() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(1024, 1024), nn.Linear(1024, 1024)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    def build() -> Callable[[], Any]:
        model, x = Net(), torch.randn(8, 1024)
        return lambda: model(x).sum().backward()

    assert found(build, "cpu") == []
