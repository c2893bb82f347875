"""Which calls of a planned model are of one kind, how many kinds are remembered, and which run without a plan."""

from __future__ import annotations

import copy
import functools
import linecache
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rewriting.cells import installed, same_state, total
from torch import Tensor, nn
from torch.nn.utils import prune

from memplan.errors import RecordingError
from memplan.planning.capture.flat_call import Call
from memplan.planning.capture.loss_module import with_loss
from memplan.rewriting.install import install
from memplan.rewriting.keys import UnkeyedError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.last(torch.relu(self.first(x))) * scale


def data(batch: int = 8) -> Tensor:
    return torch.randn(batch, 16, generator=torch.Generator().manual_seed(3))


class Counted(nn.Module):
    """A count that is read from an input, and is a number from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        count = int((labels >= 0).sum())
        return nn.functional.cross_entropy(self.linear(x), labels, ignore_index=-1, reduction="sum") / count


def test_values_that_decide_otherwise_in_each_call_are_refused_by_name() -> None:
    model = Counted()
    plans = installed(model)

    def loss(kept: int) -> Tensor:
        return model(torch.ones(16, 16), labels=torch.where(torch.arange(16) < kept, 1, -1))

    for kept in range(1, 9):
        loss(kept)
    with pytest.raises(RecordingError, match="argument labels decide"):
        loss(9)
    assert len(plans.engines) == 8
    assert torch.equal(loss(3), loss(3))


class Readings(nn.Module):
    """What a forward pass reads beside tensors."""

    shadowed = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 4)
        self._hidden, self.listed, self.config = 1.0, [1.0, 1.0], types.SimpleNamespace(scale=1.0)
        self.act = functools.partial(nn.functional.leaky_relu, negative_slope=0.5)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.shadowed * self._hidden * self.listed[1] * self.config.scale
        return self.act(self.linear(x)) * scale


READINGS: dict[str, Callable[[Any], Any]] = {
    "shadowed": lambda m: setattr(m, "shadowed", 0.5),
    "hidden": lambda m: setattr(m, "_hidden", 0.5),
    "list": lambda m: m.listed.__setitem__(1, 0.5),
    "config": lambda m: setattr(m.config, "scale", 0.5),
    "partial": lambda m: setattr(m, "act", functools.partial(nn.functional.leaky_relu, negative_slope=0.1)),
    "tensor": lambda m: setattr(m, "_hidden", torch.tensor(0.5)),
}


@pytest.mark.parametrize("name", READINGS)
def test_what_the_model_reads_is_read_anew(name: str) -> None:
    model = Readings()
    plans, twin = installed(model), copy.deepcopy(model)
    model(data())
    for one in (model, twin):
        READINGS[name](one)
        total(one(data())).backward()
    same_state(twin, model)
    assert len(plans.engines) == 2


def test_a_loss_that_is_annealed() -> None:
    beta = 0.0

    def divergence(out: Tensor) -> Tensor:
        return out.square().mean() * beta

    step = with_loss(Net(), lambda out, target: nn.functional.mse_loss(out, target) + divergence(out))
    plans, target = installed(step), torch.ones(8, 4)
    found = []
    for beta in (0.0, 0.5, 1.0, 0.5):  # noqa: B007  # divergence() reads it
        planned = step(data(), target)
        assert torch.equal(planned, step.forward(data(), target))
        found.append(planned.item())
    assert len(plans.engines) == 3
    assert len(set(found)) == 3


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_weights_that_hooks_compute_are_no_reason_for_another_plan() -> None:
    model = nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(16, 8)), nn.Linear(8, 4))
    prune.l1_unstructured(model[1], "weight", 0.5)
    plans = installed(model)
    for _ in range(3):
        total(model(data())).backward()
        model.zero_grad()
        with torch.no_grad():
            model(data())
    assert len(plans.engines) == 1


class Annealed(Net):
    epoch = 0
    name = "none"

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        assert self.epoch >= 0
        assert self.name
        return super().forward(x, scale)


def test_a_number_that_is_another_in_each_call_is_told_of_once() -> None:
    model: Any = Annealed()
    plans = installed(model)
    for _ in range(10):
        model(data(), scale=float("nan"))
    assert len(plans.engines) == 1
    for at in range(6):
        model(data(), scale=at / 10)
    with pytest.warns(UserWarning, match=r"8 calls that differ in argument scale alone.*as a tensor") as told:
        model(data(), scale=0.7)
    assert told[0].filename == __file__
    model(data(), scale=0.8)
    assert len(plans.engines) == 9
    for step in range(1, 8):
        model.epoch = step
        model(data())
    model.epoch = 8
    with pytest.warns(UserWarning, match="differ in the attribute epoch alone"):
        model(data())


def test_the_kinds_that_were_called_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memplan.rewriting.install._MAX_PLANS", 3)
    monkeypatch.setattr(linecache, "cache", {})
    model = Net()
    plans = installed(model)
    for batch in (2, 3, 4, 2, 5):  # 3 is forgotten
        model(data(batch))
    engines = plans.engines
    assert len(engines) == 3
    assert len(plan_lines()) == 3
    for batch in (4, 2, 5):
        model(data(batch))
    assert set(plans.engines) == set(engines)
    model(data(3))
    assert len(set(plans.engines) - set(engines)) == 1
    loss = total(model(data(3)))
    plans.undo()
    assert plan_lines() == set()
    loss.backward()
    assert model.first.weight.grad is not None


def plan_lines() -> set[str]:
    return {name for name in linecache.cache if name.startswith("<memplan plan")}


def test_two_kinds_with_one_program_keep_its_lines_until_both_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memplan.rewriting.install._MAX_PLANS", 1)
    monkeypatch.setattr(linecache, "cache", {})
    model: Any = Annealed()
    plans = installed(model)
    for name in ("one", "two"):
        model.name = name
        model(data())
    assert len(plan_lines()) == 1
    plans.undo()
    assert plan_lines() == set()


class Modes(nn.Linear):
    def forward(self, input: Tensor, mode: str = "train") -> Tensor:
        out = super().forward(input)
        return out.argmax(-1) if mode == "predict" else out


def test_calls_that_the_planner_has_no_plan_for_run_as_they_are() -> None:
    model = Modes(16, 4)
    asked: list[str] = []

    def planner(call: Call, held: bool) -> None:
        asked.append(str(call.constants))
        raise UnkeyedError("it cannot be")

    install(model, planner)
    for _ in range(2):
        assert model(data(), mode="predict").dtype == torch.int64
    with pytest.warns(UserWarning, match="unplanned: it cannot be") as told:
        model(data()).sum().backward()
    assert told[0].filename == __file__
    model.zero_grad()
    model(data())
    assert model.weight.grad is None
    assert len(asked) == 2
