"""Which calls run by decisions that were made for others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from environment import needs_sizes_as_symbols
from models.networks import SmallGPT, token_loss
from torch import Tensor, nn
from verification.fitting.quick import QUICK

from memplan import _torch
from memplan.errors import BudgetError
from memplan.planning.capture.flat_call import Call, call_of
from memplan.planning.capture.loss_module import with_loss
from memplan.planning.graph.resident import OutsideMemory
from memplan.planning.inductor.candidate_search import Candidate
from memplan.planning.levers.lever import GradientUse
from memplan.planning.planner import Planner
from memplan.planning.schedule.scheduler import Schedule
from memplan.planning.settings import Settings
from memplan.planning.study import Planned
from memplan.planning.validation.validate import validate
from memplan.rewriting.compiled import compile_parts
from memplan.rewriting.engine import Engine
from memplan.rewriting.keys import UnkeyedError
from memplan.verification.fitting import plan_cache
from memplan.verification.fitting.plan_cache import Plans, Reused
from memplan.verification.measurement.peak_and_time import measure_step, storage_bytes


def call(batch: int, length: int) -> Call:
    tokens = torch.arange(batch * length).reshape(batch, length)
    return call_of((tokens % 40, tokens * 7 % 40), {})


class Tokens(nn.Module):
    """Of each token by itself: captured and planned in a third of the time that attention takes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(40, 32), nn.Linear(64, 40)
        hidden = (nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), *hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(tokens)))


def plans_of(model: nn.Module, budget: int) -> Plans:
    return Plans(with_loss(model, token_loss), Settings(heuristics=QUICK), budget, notify=[].append)


@pytest.fixture
def plans() -> Plans:
    torch.manual_seed(0)
    return plans_of(Tokens(), 200_000)


@pytest.fixture
def attention() -> Plans:
    torch.manual_seed(0)
    return plans_of(SmallGPT(layers=2), 600_000)


@pytest.mark.slow
def test_smaller_calls_take_over_the_decisions_keep_the_budget_and_are_the_step(
    attention: Plans, monkeypatch: Any
) -> None:
    plans = attention
    first = plans(call(4, 24), False)
    assert isinstance(first, Planned)
    monkeypatch.setattr(plans._planner, "planned", lambda *_, **__: pytest.fail("solved for anew"))
    for batch, length in ((4, 23), (3, 17), (2, 8), (4, 24)):
        found = plans(call(batch, length), False)
        assert isinstance(found, Reused)
        graph = found.captured.graph
        assert validate(graph, found.schedule, budget=600_000, outside_memory=found.outside_memory) <= first.plan.peak
        assert len(found.schedule.choices.recompute) == len(first.schedule.choices.recompute)
    found, small = plans(call(3, 17), False), call(3, 17)
    step = plans._module
    gradients: list[list[Any]] = []
    for run in (lambda: Engine(found.captured, found.schedule).run(step, small), lambda: step(*small.tensors)):
        step.zero_grad()
        torch.manual_seed(3)
        run().backward()
        gradients.append([parameter.grad for parameter in step.parameters()])
    assert [torch.equal(*pair) for pair in zip(*gradients, strict=True)] == [True] * len(gradients[0])


@pytest.mark.slow
@pytest.mark.skipif(_torch.cpp_compiler() is None, reason="Inductor needs a C++ compiler, and none is here")
def test_of_fused_steps_the_code_for_the_smaller_call_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Op by op a step may take more than the budget that it keeps as fused kernels."""
    torch.manual_seed(0)
    budget, judge, peaks = 900_000, plan_cache.lower_and_predict, list[int]()

    def judged(made: Schedule, outside_memory: OutsideMemory) -> Candidate:
        found = judge(made, outside_memory)
        peaks.append(found.peak)
        return found

    step = with_loss(SmallGPT(layers=2), token_loss)
    plans = Plans(step, Settings(engine="inductor", heuristics=QUICK), budget, notify=[].append)
    first = plans(call(4, 24), False)
    monkeypatch.setattr(plan_cache, "lower_and_predict", judged)
    found, small = plans(call(4, 20), False), call(4, 20)
    assert isinstance(first, Planned)
    assert isinstance(found, Reused)
    assert found.fused is not None
    assert found.schedule.choices.fused
    engine = Engine(found.captured, found.schedule, compile_parts(found.fused))
    engine.run(step, small).backward()  # what is compiled on the first call takes no part
    step.zero_grad()
    measured = measure_step(lambda: engine.run(step, small).backward()).growth_peak
    there = storage_bytes([*step.parameters(), *step.buffers(), *small.tensors])
    assert measured + there == pytest.approx(peaks[0], rel=0.05)
    assert measured + there <= budget
    plans._budget = peaks[0] - 1
    plans.plans[:] = [first]
    assert isinstance(plans(small, False), Planned)


class Modes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, mode: str = "") -> Tensor:
        out = self.linear(x)
        if mode == "branch" and out.sum() > 0:
            return out * 2
        return out.argmax(-1) if mode == "predict" else out


def call_of_modes(batch: int) -> Call:
    return call_of((torch.ones(batch, 4),), {})


def test_larger_calls_other_modes_and_held_gradients_are_planned_anew_and_told() -> None:
    told: list[str] = []
    plans = Plans(nn.Sequential(Modes(), nn.Dropout()), Settings(heuristics=QUICK), 1_000, told.append)
    plans(call_of_modes(2), False)
    assert told == []
    assert isinstance(plans(call_of_modes(3), False), Planned)
    assert isinstance(plans(call_of_modes(2), True), Planned)
    plans._module.eval()
    assert isinstance(plans(call_of_modes(2), False), Planned)
    assert told == [
        "planned anew: a call with inputs 3x4",
        "planned anew: a call with inputs 2x4, with gradients held",
        "planned anew: a call with inputs 2x4",
    ]
    with pytest.raises(BudgetError) as caught:
        plans(call_of_modes(400), False)
    assert "gradients are held" not in str(caught.value)


def test_a_budget_that_held_gradients_exceed_says_so() -> None:
    plans = Plans(Modes(), Settings(heuristics=QUICK), 1_000, [].append)
    plans(call_of_modes(2), False)
    plans._budget = floor(plans, False)
    with pytest.raises(BudgetError, match=r"gradients are held when the call begins.*set_to_none=True") as caught:
        plans(call_of_modes(2), True)
    assert caught.value.smallest_budget == floor(plans, True) > plans._budget
    assert caught.value.held_by
    assert caught.value.timeline.peak_allocated == caught.value.smallest_budget


def floor(plans: Plans, held: bool) -> int:
    settings = Settings(gradients=GradientUse(accumulates=held), heuristics=QUICK)
    with pytest.raises(BudgetError) as caught:
        Planner(plans._module).planned(call_of_modes(2), settings, 1)
    return caught.value.smallest_budget


def test_later_calls_that_cannot_be_captured_are_left_to_the_model() -> None:
    x = torch.ones(2, 4)
    plans = Plans(Modes(), Settings(heuristics=QUICK), 10_000, [].append)
    assert plans(call_of((x,), {}), False)
    with pytest.raises(UnkeyedError, match="needs the values of a tensor"):
        plans(call_of((x, "branch"), {}), False)
    with pytest.raises(UnkeyedError, match="Nothing in the step needs a gradient"):
        plans(call_of((x, "predict"), {}), False)
    with pytest.raises(BudgetError):
        plans(call_of((torch.ones(2000, 4),), {}), False)


def test_what_is_kept_of_plans_and_shapes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memplan.verification.fitting.plan_cache._MAX_PLANS", 4)
    monkeypatch.setattr("memplan.verification.fitting.plan_cache._MAX_CAPTURES", 5)
    plans = Plans(Modes(), Settings(heuristics=QUICK), 10_000, [].append)
    first = plans(call_of((torch.ones(2, 4),), {}), False)
    for batch in range(3, 15):
        plans(call_of((torch.ones(batch, 4),), {}), False)
        assert len(plans.plans) <= 4
        assert sum(len(kind.seen) for kind in plans._shapes._families.values()) <= 5
    assert plans.plans[0] is first
    assert isinstance(plans(call_of((torch.ones(14, 4),), {}), False), Reused)


def test_the_expected_call_is_not_asked_about_again(plans: Plans) -> None:
    planned = plans(call(4, 24), False)
    assert isinstance(planned, Planned)
    plans.expect(planned)
    assert plans(call(4, 24), True) is not planned
    assert plans(call(4, 24), False) is planned
    assert plans(call(4, 24), False) is not planned


@needs_sizes_as_symbols
def test_sizes_one_after_another_are_traced_once_and_are_the_step(plans: Plans, monkeypatch: Any) -> None:
    first = plans(call(4, 24), False)
    plans(call(4, 23), False)
    monkeypatch.setattr(plans._planner, "planned", lambda *_, **__: pytest.fail("solved for anew"))
    monkeypatch.setattr(
        "memplan.planning.capture.symbolic_shapes.capture", lambda *_: pytest.fail("captured by itself")
    )
    monkeypatch.setattr(
        "memplan.planning.capture.symbolic_shapes.capture_symbolic", lambda *_: pytest.fail("traced again")
    )
    for length in (22, 13, 7, 2):
        found, small = plans(call(4, length), False), call(4, length)
        assert isinstance(found, Reused)
        assert len(found.schedule.choices.recompute) == len(first.schedule.choices.recompute)
        engine = Engine(found.captured, found.schedule)
        assert gradients_of(plans, lambda e=engine, c=small: e.run(plans._module, c)) == gradients_of(
            plans, lambda c=small: plans._module(*c.tensors)
        )
    monkeypatch.undo()
    plans._module.eval()  # a graph for training is none for evaluation
    assert not any("dropout" in op.target for op in plans(call(4, 6), False).captured.graph.ops)


def gradients_of(plans: Plans, run: Callable[[], Any]) -> list[list[float]]:
    plans._module.zero_grad()
    torch.manual_seed(3)
    run().backward()
    return [[] if one.grad is None else one.grad.flatten().tolist() for one in plans._module.parameters()]
