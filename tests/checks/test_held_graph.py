"""Graphs that live on: steps that hold one, steps that do not, and bytes as the mended step's recording."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memplan

ID = "held-graph"
Build = Callable[[], Callable[[], Any]]


def net() -> nn.Module:
    return nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())], nn.Linear(64, 1))


def training(**backward: Any) -> Build:
    def build() -> Callable[[], Any]:
        model, x, kept = net(), torch.randn(32768, 64), list[Any]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step() -> None:
            optimizer.zero_grad()
            loss = model(x).mean()
            loss.backward(**backward)
            optimizer.step()
            kept[:] = [loss] if backward else []

        return step

    return build


def evaluation(grad: bool, *, total: str = "") -> Build:
    def build() -> Callable[[], Any]:
        model, x = net().eval(), torch.randn(32768, 64)
        losses: list[Any] = []

        def step() -> None:
            with torch.set_grad_enabled(grad):
                loss = model(x).mean()
            if total:
                losses.append(loss if total == "graph" else loss.detach())

        return step

    return build


def found(build: Build, device: str = "cpu") -> list[memplan.Finding]:
    return [finding for finding in memplan.check(build, device=device) if finding.id == ID]


def peak(build: Build, device: str) -> int:
    return memplan.simulate(memplan.record(build, device=device), workspace="low").peak_allocated


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_a_retained_graph(device: str) -> None:
    (finding,) = [f for f in found(training(retain_graph=True), device) if f.details["kind"] == "retained"]
    assert finding.severity == "warning"
    saved = peak(training(retain_graph=True), device) - peak(training(), device)
    assert finding.bytes == pytest.approx(saved, rel=0.01)
    assert "retain_graph=True at " in finding.message
    assert "create_graph" not in finding.message + finding.advice[0]
    assert found(training(), device) == []


def test_the_flag_is_the_one_that_is_set() -> None:
    with pytest.warns(UserWarning, match="create_graph=True"):
        (finding,) = [f for f in found(training(create_graph=True)) if f.details["kind"] == "retained"]
    assert "create_graph=True at " in finding.message
    assert "retain_graph" not in finding.message + finding.advice[0]


@pytest.mark.parametrize("device", ["cpu", "h100"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind: Any, device: str) -> None:
    """Their graph is one op, whose tensors are freed a moment after it."""

    def build() -> Callable[[], Any]:
        model, x = kind(16, 32), torch.randn(20, 8, 16)

        def step() -> None:
            model(x)[0].sum().backward()
            model.zero_grad()

        return step

    assert found(build, device) == []


def test_one_layer_whose_output_is_kept_by_name() -> None:
    def build() -> Callable[[], Any]:
        model, x, kept = nn.Linear(64, 64), torch.randn(4096, 64), list[Any]()

        def step() -> None:
            kept[:] = [torch.tanh(model(x))]
            kept[0].sum().backward()

        return step

    assert found(build) == []


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_evaluation_with_grad(device: str) -> None:
    (finding,) = found(evaluation(True), device)
    assert finding.details["kind"] == "no backward"
    saved = peak(evaluation(True), device) - peak(evaluation(False), device)
    assert finding.bytes == pytest.approx(saved, rel=0.01)
    assert found(evaluation(False), device) == []


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_losses_added_up_with_their_graphs(device: str) -> None:
    (finding,) = [f for f in found(evaluation(True, total="graph"), device) if f.details["kind"] == "growing"]
    one, three = (memplan.record(evaluation(True, total="graph"), device=device, steps=steps) for steps in (1, 3))
    growth = (memplan.simulate(three).peak_allocated - memplan.simulate(one).peak_allocated) / 2
    assert finding.bytes == pytest.approx(growth, rel=0.01)
    assert not [f for f in found(evaluation(True, total="number"), device) if f.details["kind"] == "growing"]


def test_a_second_backward_needs_the_graph() -> None:
    def build() -> Callable[[], Any]:
        model, x = net(), torch.randn(32768, 64)

        def step() -> None:
            model.zero_grad()
            y = model(x)
            y.mean().backward(retain_graph=True)
            y.pow(2).mean().backward()

        return step

    assert found(build) == []


def test_autocast_under_no_grad_has_no_graph() -> None:
    """It casts weights with grad, as it may keep the copies for later calls; what is computed from them has none."""

    def build() -> Callable[[], Any]:
        model, x = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)), torch.randn(64, 512)

        def step() -> None:
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                model(x)

        return step

    assert found(build) == []
