"""A captured step with its convolutions in channels last: where that is done, and that it computes the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from environment import slow
from torch import Tensor, nn
from torch.nn import functional as F

import memplan
from memplan import _torch
from memplan.errors import BudgetError, CompileError
from memplan.planning import planner
from memplan.planning import settings as settings_
from memplan.planning import study as study_
from memplan.planning import study as studying
from memplan.planning.capture import recapture
from memplan.planning.capture.capture import Captured, capture
from memplan.planning.capture.flat_call import call_of
from memplan.planning.graph.precision import EXACT

needs_compiler = pytest.mark.skipif(_torch.cpp_compiler() is None, reason="Inductor needs a C++ compiler")
SETTINGS = settings_.Settings(engine="inductor", costs="roofline")


class Net(nn.Module):
    """Two convolutions with a norm, and something between them."""

    def __init__(self, between: Callable[[Tensor], Tensor] = F.relu, dims: int = 2) -> None:
        super().__init__()
        convolution = {2: nn.Conv2d, 3: nn.Conv3d}[dims]
        self.first, self.second = convolution(3, 32, 3, padding=1), convolution(32, 4, 3, padding=1)
        self.norm = {2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dims](32)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.norm(self.first(x))))


def _relaid(model: nn.Module, x: Tensor) -> Captured | None:
    call = call_of((x,), {})
    return recapture.recapture_in_channels_last(model, call, capture(model, call), EXACT)


def _image(dims: int = 2) -> Tensor:
    return torch.randn(2, 3, *[12] * dims)


@pytest.mark.parametrize("dims", [2, 3])
def test_convolutions_read_and_make_channels_last(dims: int) -> None:
    found = _relaid(Net(dims=dims), _image(dims))
    assert found is not None
    assert found.channels_last
    graph = found.graph
    for name, operand in (("aten.convolution.default", 0), ("aten.convolution_backward.default", 1)):
        read = [graph.values[op.args[operand].value] for op in graph.ops if op.target == name]
        assert len(read) >= 2
        assert all(one.stride[1] == 1 for one in read)
    made = next(graph.values[op.makes[0]] for op in graph.ops if "norm" in op.target)
    assert made.stride[1] == 1


def test_what_is_returned_is_in_order() -> None:
    found = _relaid(Net(), _image())
    assert found is not None
    output = found.graph.values[found.graph.outputs[0]]
    assert output.stride == torch.empty(output.shape).stride()


@pytest.mark.parametrize(
    "between",
    [
        pytest.param(lambda x: F.dropout(x, 0.5), id="numbers are drawn in the order of memory"),
        pytest.param(lambda x: x.view(2, -1).view(2, 32, 12, 12), id="a view of what lies in order"),
        pytest.param(lambda x: x.as_strided((2, 32, 12, 12), (4608, 144, 12, 1)), id="a look at memory"),
        pytest.param(lambda x: F.instance_norm(x) * 1.0, id="a norm that puts in order what it reads"),
    ],
)
def test_left_as_it_is(between: Callable[[Tensor], Tensor]) -> None:
    assert _relaid(Net(between), _image()) is None


def _written_through(x: Tensor) -> Tensor:
    flat = x.flatten(1)
    flat[:, ::2] = 0.0
    return x


def test_left_where_a_view_would_be_a_copy_that_is_written_into() -> None:
    assert _relaid(Net(_written_through), _image()) is None


def test_left_as_the_user_laid_it_out() -> None:
    assert _relaid(Net(), _image().contiguous(memory_format=torch.channels_last)) is None


def test_left_without_convolutions_of_images() -> None:
    assert _relaid(nn.Conv1d(3, 4, 3), torch.randn(2, 3, 16)) is None
    assert _relaid(nn.Linear(12, 4), _image()) is None


class Beside(Net):
    """With a product of a square matrix beside its convolutions."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.square = nn.Parameter(torch.randn(size, size))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (self.square @ self.square).mean()


@pytest.mark.parametrize(("size", "is_left"), [(64, False), (256, True)])
def test_left_where_convolutions_are_little_of_the_work(size: int, is_left: bool) -> None:
    """They are 288 x 9 x 32 x (3 + 4) products, and the matrix size ** 3: 69 % of all, and 3 %."""
    assert (_relaid(Beside(size), _image()) is None) is is_left


@cache
def _study() -> study_.Study:
    """In either layout by the same seconds."""
    study = planner.Planner(Net()).study(call_of((_image(),), {}), SETTINGS, key=0)
    assert len(study.layouts(SETTINGS)) == 2
    return study


def _takes(monkeypatch: pytest.MonkeyPatch, times: float) -> None:
    """Let a step in channels last take so many times what it takes as it is."""
    own = _study().captured.graph
    monkeypatch.setattr(studying, "step_seconds", lambda graph: 1.0 if graph is own else times)


@pytest.mark.parametrize(("times", "first"), [(0.9, True), (1.05, True), (1.5, False)])
def test_last_where_it_takes_much_longer(times: float, first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    _takes(monkeypatch, times)
    assert [one.captured.channels_last for one in _study().layouts(SETTINGS)] == [first, not first]
    assert _study().layouts(replace(SETTINGS, channels_last=False)) == [_study()]


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(("times", "base"), [(3.0, 3.0), *slow((1.05, None))])
def test_a_plan_in_a_slower_layout_says_what_its_own_step_takes(
    times: float, base: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside what the step takes as it is written."""
    _takes(monkeypatch, times)
    (there,) = (one for one in _study().layouts(SETTINGS) if one.captured.channels_last)
    plan = study_._Planning(there, SETTINGS, 1 << 30).fused().plan  # pyright: ignore[reportPrivateUsage]
    assert (plan.step_seconds, plan.base_seconds) == (1.0, base)


@pytest.mark.parametrize("times", [0.9, *slow(1.5)])
@pytest.mark.parametrize(("here", "there"), [(100, 80), (80, None), (None, 80), *slow((80, 100), (None, None))])
def test_refused_with_the_least_of_both_whichever_is_faster_here(
    here: int | None, there: int | None, times: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with that of one where the other cannot be compiled."""

    def refuse(self: Any) -> None:
        least = there if self._study.captured.channels_last else here
        if least is None:
            raise CompileError("", expected="", do="")
        raise BudgetError("", expected="", do="", smallest_budget=least)

    _takes(monkeypatch, times)
    monkeypatch.setattr(study_._Planning, "fused", refuse)
    neither = here is None and there is None
    with pytest.raises(CompileError if neither else BudgetError) as caught:
        _study().planned(SETTINGS, 1 << 30)
    assert neither or getattr(caught.value, "smallest_budget", None) == 80


@pytest.mark.parametrize("refusal", [BudgetError("", smallest_budget=1), CompileError("", expected="", do="")])
@pytest.mark.parametrize("times", [0.9, 1.5])
def test_the_other_layout_is_taken_where_the_first_does_not_do(
    times: float, refusal: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan(self: Any) -> study_.Study:
        if self._study is first:
            raise refusal
        return self._study

    _takes(monkeypatch, times)
    first, other = _study().layouts(SETTINGS)
    monkeypatch.setattr(study_._Planning, "fused", plan)
    assert _study().planned(SETTINGS, 1 << 30) is other


def test_keyword_arguments_are_relaid_too() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 3, 3, 3))

        def forward(self, x: Tensor) -> Tensor:
            return F.conv2d(input=x, weight=self.weight).relu().sum()

    found = _relaid(Named(), _image())
    assert found is not None
    convolution = next(op for op in found.graph.ops if op.target == "aten.convolution.default")
    assert found.graph.values[convolution.args[0].value].stride[1] == 1


@pytest.mark.slow
@needs_compiler
def test_a_pool_whose_gradient_lies_in_order_counts_with_its_copies() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 64, 3, padding=1), nn.Linear(64 * 16 * 16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(F.max_pool2d(self.first(x).relu(), 2).flatten(1))

    fitted = memplan.fit(Pooled(), torch.randn(32, 3, 32, 32), loss=torch.sum, budget="1GB", engine="inductor", pairs=0)
    assert fitted.proof.ok
    assert fitted.proof.predicted is not None
    assert abs(fitted.proof.predicted - fitted.proof.peak) <= 0.01 * fitted.proof.peak


@pytest.mark.slow
@needs_compiler
def test_a_fused_step_in_channels_last_is_the_same_and_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(studying, "SLOWER", float("inf"))  # whatever seconds are measured on a busy machine
    torch.manual_seed(0)
    model, x = nn.Sequential(Net(), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(4, 4, 3)), torch.randn(4, 3, 64, 64)
    twin = nn.Sequential(Net(), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(4, 4, 3))
    twin.load_state_dict(model.state_dict())
    fitted = memplan.fit(model, x, budget="1 GiB", engine="inductor")
    assert fitted.proof.ok
    assert fitted.proof.predicted is not None
    assert abs(fitted.proof.predicted - fitted.proof.peak) <= 0.01 * fitted.proof.peak
    assert "clone" in fitted.plan.program, "the first convolution's operand is laid out anew"
    output, expected = fitted.model(x), twin(x)
    assert output.stride() == expected.stride()
    torch.testing.assert_close(output, expected)
    output.square().sum().backward()
    expected.square().sum().backward()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert one.grad is not None
        assert one.grad.stride() == one.stride()
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-4)
    smaller = fitted.model(x[:2])
    assert smaller.shape[0] == 2
