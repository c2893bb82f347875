"""Every verb in every way to fail: torch, the process and the user's model are as before."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from environment import thinned
from torch import Tensor, nn
from truth.torch_state import kept

import memplan


class Raising(torch.autograd.Function):
    """An op whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise RuntimeError("backward fails")


class Net(nn.Module):
    def __init__(self, fails: str) -> None:
        super().__init__()
        self.linear, self.norm, self.fails = nn.Linear(8, 8), nn.BatchNorm1d(8), fails

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.linear(x))
        if self.fails == "forward":
            raise ValueError("forward fails")
        if self.fails == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory")
        if self.fails == "interrupt":
            raise KeyboardInterrupt
        if self.fails == "modes":
            torch.set_grad_enabled(False)
            torch.set_default_dtype(torch.float64)
            raise ValueError("it has set what it does not put back")
        return Raising.apply(hidden) if self.fails == "backward" else hidden  # pyright: ignore[reportReturnType]


class Update(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise ValueError("the update fails")


def loss(output: Tensor) -> Tensor:
    raise ValueError("the loss fails")


VERBS: dict[str, Callable[..., Any]] = {
    "explain": lambda *args, **given: memplan.explain(*args, **given, device="cpu"),
    "explain for a card": lambda *args, **given: memplan.explain(*args, **given, device="h100"),
    "check": lambda *args, **given: memplan.check(*args, **given, device="cpu"),
    "sweep": lambda what, x, **given: memplan.sweep(what, {"batch": "4"}, x, **given, device="cpu", jobs=1),
    "largest": lambda what, x, **given: memplan.largest(what, "batch", x, **given, budget="1 MiB", device="cpu"),
    "plan": lambda *args, **given: memplan.plan(*args, **given, budget="1 GiB", costs="roofline"),
    "fit": lambda *args, **given: memplan.fit(*args, **given, budget="1 GiB", pairs=0),
    "verify": lambda what, *args, **given: memplan.verify(what, what, *args, **given, pairs=0),
}
FAILURES = ("forward", "backward", "update", "loss", "memory", "interrupt", "input", "name")


def contents(model: nn.Module) -> Any:
    state = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
    return state, [sorted(vars(part)) for part in model.modules()], model.training, [p.grad for p in model.parameters()]


def outcome(call: Callable[[], Any]) -> str:
    try:
        call()
    except KeyboardInterrupt:
        return "interrupt"
    except Exception as error:  # of whichever kind: what is left behind is asked for
        return type(error).__name__
    return "result"


def pairs() -> list[Any]:
    """All pairs of a verb and a failure; quick are those of a Latin square, in which each verb and failure is once."""
    return [
        pytest.param(verb, fails, marks=() if (row + column) % 8 == 0 else pytest.mark.slow)
        for row, verb in enumerate(VERBS)
        for column, fails in enumerate(FAILURES)
    ]


@pytest.mark.parametrize(("verb", "fails"), pairs())
def test_nothing_is_left_changed(verb: str, fails: str) -> None:
    given: dict[str, Any] = {"loss": torch.sum, "optimizer": torch.optim.SGD}
    if fails == "loss":
        given["loss"] = loss
    elif fails == "update":
        given["optimizer"] = Update
    elif fails == "name":
        given["optimizer"] = "adamww"
    model, x = Net(fails), torch.randn(4, 9 if fails == "input" else 8)
    before = contents(model)
    with kept():
        found = outcome(lambda: VERBS[verb](model, x, **given))
    assert contents(model) == before
    does_not_get_there = fails == "update" and verb in ("plan", "fit")  # whose step ends before the update
    assert found != "result" or does_not_get_there


@pytest.mark.parametrize(
    ("verb", "fails"),
    thinned(product(("record", "measure"), ("build", "forward", "backward", "memory", "interrupt", "modes")), 3),
)
def test_nothing_is_left_changed_by_a_build(verb: str, fails: str) -> None:
    def build() -> Callable[[], None]:
        if fails == "build":
            raise ValueError("build fails")
        model, x = Net(fails), torch.randn(4, 8)
        return lambda: model(x).sum().backward()

    with kept():
        found = outcome(lambda: getattr(memplan, verb)(build))
    assert found == ("interrupt" if fails == "interrupt" else "StepError")
