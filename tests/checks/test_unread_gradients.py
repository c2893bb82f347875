"""Gradients that no update reads: bytes as the recording of the mended step has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memplan

ID = "unread-gradients"
Build = Callable[[], Callable[[], Any]]
WIDTH = 1024


def stack(count: int = 4) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(count)])


def found(build: Build, device: str = "cpu") -> list[memplan.Finding]:
    return [finding for finding in memplan.check(build, device=device) if finding.id == ID]


def peak(build: Build, device: str = "cpu") -> int:
    return memplan.simulate(memplan.record(build, device=device), workspace="low").peak_allocated


def head_alone(frozen: bool) -> Build:
    """A backbone and a head, of which the optimizer has the head."""

    def build() -> Callable[[], Any]:
        model, x = nn.ModuleDict({"backbone": stack(), "head": nn.Linear(WIDTH, 4)}), torch.randn(64, WIDTH)
        model["backbone"].requires_grad_(not frozen)
        optimizer = torch.optim.SGD(model["head"].parameters(), 0.1)

        def step() -> None:
            optimizer.zero_grad()
            model["head"](model["backbone"](x)).sum().backward()
            optimizer.step()

        return step

    return build


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_parameters_that_no_optimizer_has(device: str) -> None:
    (finding,) = found(head_alone(False), device)
    assert (finding.severity, finding.details["kind"]) == ("warning", "not in an optimizer")
    assert finding.bytes == peak(head_alone(False), device) - peak(head_alone(True), device)
    assert finding.details["held"] == 4 * (WIDTH * WIDTH + WIDTH) * 4
    assert len(finding.details["names"]) == 8
    assert found(head_alone(True), device) == []


def gan(mended: bool) -> Build:
    """A discriminator that is updated, then judges for the generator: its gradients there are read by nothing."""

    def build() -> Callable[[], Any]:
        made, judge, z, real = stack(), stack(), torch.randn(64, WIDTH), torch.randn(64, WIDTH)
        of_made, of_judge = (torch.optim.SGD(model.parameters(), 0.1) for model in (made, judge))

        def step() -> None:
            of_judge.zero_grad()
            (judge(made(z).detach()).mean() - judge(real).mean()).backward()
            of_judge.step()
            if mended:
                of_judge.zero_grad()
                judge.requires_grad_(False)
            of_made.zero_grad()
            (-judge(made(z)).mean()).backward()
            of_made.step()
            if mended:
                of_made.zero_grad()
                judge.requires_grad_(True)

        return step

    return build


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_gradients_of_another_loss(device: str) -> None:
    (finding,) = found(gan(False), device)
    assert (finding.severity, finding.details["kind"]) == ("warning", "after the update")
    assert finding.bytes == pytest.approx(peak(gan(False), device) - peak(gan(True), device), rel=0.02)
    assert "requires_grad_(False)" in finding.advice[1]
    assert found(gan(True), device) == []


def order(early: bool) -> Build:
    """`zero_grad` before the forward pass, in which a large teacher runs, or only before the backward pass."""

    def build() -> Callable[[], Any]:
        model, x = stack(), torch.randn(1024, WIDTH)
        teacher = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)).requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step() -> None:
            if early:
                optimizer.zero_grad()
            with torch.no_grad():
                wanted = teacher(x)
            loss = (model(x) - wanted).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        return step

    return build


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_gradients_that_live_through_the_next_forward_pass(device: str) -> None:
    (finding,) = found(order(False), device)
    assert (finding.severity, finding.details["kind"]) == ("warning", "after the update")
    assert finding.bytes == peak(order(False), device) - peak(order(True), device)
    assert found(order(True), device) == []


def accumulation() -> Callable[[], Any]:
    model, x = stack(), torch.randn(64, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(2):
            model(x).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def by_hand() -> Callable[[], Any]:
    """One half by an optimizer, the other half by a rule of the user's own."""
    model, x = stack(), torch.randn(64, WIDTH)
    optimizer = torch.optim.SGD(model[:2].parameters(), 0.1)

    def step() -> None:
        model(x).mean().backward()
        optimizer.step()
        with torch.no_grad():
            for parameter in model[2:].parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad
        model.zero_grad()

    return step


def no_optimizer() -> Callable[[], Any]:
    model, x = stack(), torch.randn(64, WIDTH)

    def step() -> None:
        model.zero_grad()
        model(x).mean().backward()

    return step


@pytest.mark.parametrize("build", [accumulation, by_hand, no_optimizer])
def test_gradients_that_are_read(build: Build) -> None:
    assert found(build) == []
