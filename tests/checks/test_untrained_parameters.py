"""Parameters that never get a gradient: what a real step leaves without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memplan
from memplan._bytes import format_bytes

ID = "untrained-parameters"
Make = Callable[[], tuple[nn.Module, Callable[[], torch.Tensor]]]


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        self.head = nn.Linear(64, 4)


def by(forward: Callable[[Parts, torch.Tensor], torch.Tensor], *, needs_grad: bool = False) -> Make:
    def make() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
        model, x = Parts(), torch.randn(512, 64, requires_grad=needs_grad)
        return model, lambda: forward(model, x).sum()

    return make


def build_of(make: Make) -> Callable[[], Callable[[], Any]]:
    def build() -> Callable[[], Any]:
        model, loss = make()
        optimizer = torch.optim.AdamW(model.parameters())

        def step() -> None:
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()

        return step

    return build


def found(make: Make, device: str = "cpu") -> list[memplan.Finding]:
    return [finding for finding in memplan.check(build_of(make), device=device) if finding.id == ID]


def really_without(make: Make) -> list[str]:
    model, loss = make()
    loss().backward()
    return sorted(name for name, parameter in model.named_parameters() if parameter.grad is None)


def checkpointed(reentrant: bool) -> Callable[[Parts, torch.Tensor], torch.Tensor]:
    def forward(model: Parts, x: torch.Tensor) -> torch.Tensor:
        hidden: Any = checkpoint(model.body, x, use_reentrant=reentrant)
        return model.head(hidden)

    return forward


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_a_reentrant_checkpoint_of_an_input_without_grad(device: str) -> None:
    make = by(checkpointed(True))
    (finding,) = found(make, device)
    assert (finding.severity, finding.bytes, finding.layer) == ("warning", 0, "body.0")
    assert finding.details["names"] == really_without(make)
    assert (finding.details["parameters"], finding.details["of"]) == (4, 6)
    assert "use_reentrant=False" in finding.advice[0]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_the_win_that_is_none() -> None:
    cut, whole = (by(lambda model, x: model.head(model.body(x))), by(checkpointed(True)))
    peaks = [memplan.simulate(memplan.record(build_of(make), device="cpu")).peak_allocated for make in (cut, whole)]
    (finding,) = found(by(checkpointed(True)))
    assert f"the {format_bytes(peaks[0] - peaks[1])} less at the peak are no win" in finding.message


def test_a_gradient_that_detach_cuts_off() -> None:
    make = by(lambda model, x: model.head(model.body(x).detach()))
    (finding,) = found(make)
    assert finding.details["names"] == really_without(make) == ["body.0.bias", "body.0.weight", "body.2.bias",
                                                                "body.2.weight"]  # fmt: skip
    assert "checkpoint" not in finding.message + finding.advice[0]


def test_of_a_trace_the_cause_is_left_open() -> None:
    make = by(lambda model, x: model.head(model.body(x).detach()))
    (finding,) = [f for f in memplan.check(memplan.record(build_of(make), device="cpu")) if f.id == ID]
    assert finding.details["parameters"] == 4


def frozen(model: Parts, x: torch.Tensor) -> torch.Tensor:
    model.body.requires_grad_(False)
    with torch.no_grad():
        hidden = model.body(x)
    return model.head(hidden)


class Split(nn.Module):
    """Three biases that are read as one, as of queries, keys and values: their gradients are parts of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12, 64))
        self.biases = nn.ParameterList([torch.zeros(4) for _ in range(3)])


def split() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    model, x = Split(), torch.randn(512, 64)
    return model, lambda: nn.functional.linear(x, model.weight, torch.cat(tuple(model.biases))).sum()


@pytest.mark.parametrize(
    "make",
    [
        split,
        by(checkpointed(False)),
        by(checkpointed(True), needs_grad=True),
        by(frozen),
        by(lambda model, x: model.head(x)),  # the body does not run: nothing is used in vain
    ],
    ids=["parts of one gradient", "not reentrant", "an input with grad", "frozen", "unused"],
)
def test_what_is_trained_or_meant_not_to_be(make: Make) -> None:
    assert found(make) == []
