"""`memplan.plan`: a model that is only described is planned as the same one with data would be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from environment import slow
from torch import Tensor, nn
from torch.nn import functional as F

import memplan
from memplan.errors import BudgetError, InputError, RecordingError
from memplan.planning import planner
from memplan.planning.api import plan, plan_or_floor
from memplan.planning.capture.capture import Captured
from memplan.planning.capture.flat_call import Call
from memplan.planning.graph.precision import EXACT, Precision
from memplan.trace.step import StepOptions


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Dropout(0.1), nn.Conv2d(16, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 5),
    )  # fmt: skip


def frozen() -> nn.Module:
    made = convolutions()
    made.get_submodule("0").requires_grad_(False)
    return made


def half() -> nn.Module:
    return convolutions().to(torch.bfloat16)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 32)
        self.head = nn.Linear(32, 100, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 32, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


def normed() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(16, 64)), nn.GELU(), nn.Linear(64, 16))


IMAGES = "4x3x32x32"
CASES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "convolutions": (convolutions, IMAGES),
    "frozen": (frozen, IMAGES),
    "half": (half, f"{IMAGES}:bfloat16"),
    "tied": (Tied, "4x16:int64<100"),
    "recurrent": (Recurrent, "4x8x16"),
    "weight norm": (normed, "8x16"),
}


@pytest.mark.parametrize("name", ["half", "tied", *slow("convolutions", "frozen", "recurrent", "weight norm")])
def test_what_makes_a_model_is_planned_as_the_model(name: str) -> None:
    make, inputs = CASES[name]
    inputs = memplan.spec(inputs)
    floor = plan(make(), inputs, budget="1 GiB", costs="roofline").floor
    found, expected = (plan(what, inputs, budget=floor, costs="roofline") for what in (make, make()))
    assert found == expected


def test_nothing_of_a_model_that_is_to_be_made_is_allocated() -> None:
    def wide() -> nn.Module:
        return nn.Sequential(nn.Linear(1 << 20, 1 << 20), nn.ReLU())

    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as seen:
        found = plan(
            wide, "2x1048576", targets="2:int64<1048576", loss=F.cross_entropy, budget=10**15, costs="roofline",
            optimizer=torch.optim.AdamW,
        )  # fmt: skip
    assert found.peak > 4 * 4 << 40
    taken = [event.cpu_memory_usage for event in seen.events() or ()]
    assert 0 < max(taken) < 1 << 20


def test_the_random_state_and_the_default_dtype_stay() -> None:
    before = torch.get_rng_state()
    plan(convolutions, IMAGES, budget="1 GiB", costs="roofline")
    assert torch.equal(torch.get_rng_state(), before)


class Loose(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scales = [torch.arange(8.0)]

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scales[0]


def test_a_tensor_that_is_no_buffer_needs_the_module() -> None:
    with pytest.raises(InputError, match=r"scales is a tensor that is neither parameter nor buffer.*register_buffer"):
        plan(Loose, "2x8", budget="1 GiB")
    assert plan(Loose(), "2x8", budget="1 GiB").peak > 0


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy() * 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2


class Leaving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return Doubled.apply(self.linear(x))


def test_what_has_to_run_to_be_known_needs_the_module() -> None:
    with pytest.raises(RecordingError, match="Pass the module itself"):
        plan(Leaving, "2x8", budget="1 GiB")
    assert plan(Leaving(), "2x8", budget="1 GiB").peak > 0


def test_a_model_without_data_cannot_be_made_to_fit() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model = convolutions()
    with pytest.raises(InputError, match=r"without data.*memplan\.plan"):
        memplan.fit(model, IMAGES, budget="1 GiB")


def test_where_only_the_smallest_budget_is_asked_for_nothing_else_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    step = StepOptions((memplan.spec(IMAGES),))
    floor = plan_or_floor(convolutions, step, 1, None)
    assert isinstance(floor, int)
    with pytest.raises(BudgetError) as caught:
        plan(convolutions, memplan.spec(IMAGES), budget=floor - 1, costs="roofline")
    assert caught.value.lower_by, "planned in fewer bits"
    captured = list[Precision]()
    capture = planner.capture

    def noted(model: nn.Module, call: Call, precision: Precision, *rest: Any) -> Captured:
        captured.append(precision)
        return capture(model, call, precision, *rest)

    monkeypatch.setattr(planner, "capture", noted)
    assert plan_or_floor(convolutions, step, floor - 1, None) == floor == caught.value.smallest_budget
    found = plan_or_floor(convolutions, step, floor, None)
    assert found == plan(convolutions, memplan.spec(IMAGES), budget=floor, costs="roofline")
    assert set(captured) == {EXACT}
