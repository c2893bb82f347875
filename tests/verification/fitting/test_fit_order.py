"""Plans that move ops of the backward pass, as they run: the same bits, and the bytes that were said."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from environment import slow
from torch import Tensor, nn
from torch.nn import functional as F
from truth.cpu_allocator import allocations, peak_of
from verification.fitting.quick import QUICK, fit, plan

import memplan
from memplan.errors import UsageError
from memplan.planning import study
from memplan.planning.graph.dependencies import must_precede
from memplan.planning.plan.plan import Plan
from memplan.planning.search.search import Search


class LateWeights(nn.Module):
    """Large activations first, large weights last; dropout, a ReLU in place, a norm, branches and a buffer of its
    own."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(16, 512), nn.LayerNorm(512)
        self.left, self.right = nn.Linear(64, 1024), nn.Linear(64, 1024)
        self.down, self.last = nn.Linear(512, 64), nn.Linear(1024, 1024)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        h = F.relu(self.norm(self.first(x)), inplace=True)
        h = F.dropout(F.gelu(h), 0.3, self.training)
        h = self.down(h).unflatten(0, (16, -1)).mean(1)
        h = F.dropout(torch.tanh(self.left(h)) * self.right(h), 0.5, self.training)
        return self.last(h)


def step() -> tuple[LateWeights, Tensor, dict[str, Any]]:
    torch.manual_seed(0)
    return LateWeights(), torch.randn(1024, 16), {"targets": torch.randn(16, 1024), "loss": F.mse_loss}


def captured(budget: Any) -> Plan:
    """The plan in the order that autograd has."""
    model, x, given = step()
    return memplan.plan(model, x, budget=budget, heuristics=memplan.Heuristics(order=False, shakes=0), **given)


@pytest.fixture(scope="module")
def highest() -> tuple[Plan, Plan]:
    """Plans with all that memory, in the captured order and where ops may be moved."""
    model, x, given = step()
    return captured("1 GiB"), plan(model, x, budget="1 GiB", **given)


def test_the_models_own_call_moves_the_same_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the plan of model and loss keeps the budget by its order, the model's own call is not planned anew."""
    model, x, given = step()
    as_captured = captured("1 GiB")
    searched, within = list[int](), Search.within
    monkeypatch.setattr(Search, "within", lambda self, target: searched.append(target) or within(self, target))
    fitted = fit(model, x, budget=as_captured.floor - 1, pairs=0, **given)
    assert fitted.plan.choices.order
    assert set(searched) == {as_captured.floor - 1}
    planned_for_loss = len(searched)
    searched.clear()
    plan(step()[0], x, budget=as_captured.floor - 1, **given)
    assert len(searched) == planned_for_loss
    model.zero_grad()
    resident = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers(), x, given["targets"]))

    def run() -> None:
        given["loss"](model(x), given["targets"]).backward()

    assert resident + peak_of(allocations(run)) <= as_captured.floor - 1
    assert fitted.stats.planned == 1


def test_what_fits_is_not_moved_and_what_does_not_is_moved_before_anything_is_recomputed(
    highest: tuple[Plan, Plan],
) -> None:
    as_captured, free = highest
    assert free.choices == as_captured.choices
    assert free.choices.order == ()
    assert free.floor < 0.95 * as_captured.floor
    assert "order of ops" not in {decision.lever for decision in free.decisions}
    model, x, given = step()
    budgets = (free.peak - share * (free.peak - free.floor) // 10 for share in range(1, 10))
    moved = next(made for budget in budgets if (made := plan(model, x, budget=budget, **given)).choices.order)
    assert moved.seconds == 0
    assert not moved.choices.recompute
    assert not moved.changes_nothing
    assert moved.grade == "exact"
    assert captured(moved.budget).seconds > 0
    (decision,) = (each for each in moved.decisions if each.lever == "order of ops")
    assert decision.bytes > 0
    assert "ops of the backward pass run earlier or later than autograd runs them, such as mm of " in decision.reason
    assert ", ops of the backward pass moved. " in moved.summary
    assert "No plan in this order of ops and budget adds less than" in moved.summary
    assert "; its order needs at least " in moved.summary
    assert decision.reason.endswith(" higher")
    assert "in autograd's order the same decisions have a peak that is " in decision.reason


@pytest.mark.parametrize("share", [0.5, *slow(0.0)])
def test_the_step_is_the_same_bit_for_bit_and_takes_what_was_said(share: float, highest: tuple[Plan, Plan]) -> None:
    as_captured, free = highest
    budget = int(free.floor + share * (as_captured.floor - free.floor))
    model, x, given = step()
    twin = copy.deepcopy(model)
    fitted = fit(model, x, budget=budget, pairs=1, **given)
    assert fitted.proof.failures == ()
    assert fitted.plan.choices.order
    assert Plan.from_json(fitted.plan.to_json()) == fitted.plan
    assert fitted.proof.peak == pytest.approx(fitted.plan.peak, rel=0.001)
    assert fitted.proof.peak <= budget < as_captured.floor
    assert fitted.loss is not None
    planned = fitted.loss
    for seed in range(2):  # a new mask each time, and the buffer counted
        for each, loss in ((twin, lambda: given["loss"](twin(x), given["targets"])),
                           (model, lambda: planned(x, given["targets"]))):  # fmt: skip
            torch.manual_seed(seed)
            each.zero_grad()
            loss().backward()
            assert torch.equal(torch.rand(3), _drawn(seed, twin, x))
        assert torch.equal(model.seen, twin.seen)
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            assert torch.equal(one.grad, other.grad)
    model.zero_grad()
    resident = sum(each.untyped_storage().nbytes() for each in (*model.parameters(), model.seen, x, given["targets"]))
    peak = resident + peak_of(allocations(lambda: planned(x, given["targets"]).backward()))
    assert peak == pytest.approx(fitted.plan.peak, rel=0.001)
    fitted.undo()


def _drawn(seed: int, model: LateWeights, x: Tensor) -> Tensor:
    """What is drawn next after a step in eager mode."""
    twin = copy.deepcopy(model)
    torch.manual_seed(seed)
    twin(x).sum().backward()
    return torch.rand(3)


@pytest.mark.slow
def test_a_saved_plan_runs_in_its_order_and_no_other(highest: tuple[Plan, Plan], tmp_path: Any) -> None:
    model, x, given = step()
    made = plan(model, x, budget=highest[0].floor - 1, **given)
    made.save(tmp_path / "plan.json")
    back = Plan.load(tmp_path / "plan.json")
    assert back == made
    fitted = fit(model, x, budget=made.budget, plan=back, pairs=1, **given)
    assert fitted.proof.ok
    assert fitted.plan.choices == made.choices
    fitted.undo()
    for order in (made.choices.order[::-1], made.choices.order[1:], (*made.choices.order[1:], 10**6)):
        text = made.to_json().replace(_listed(made.choices.order), _listed(order))
        assert text != made.to_json()
        with pytest.raises(UsageError, match="in another order than they can run in"):
            plan(model, x, budget=made.budget, plan=Plan.from_json(text), **given)


def _listed(order: tuple[int, ...]) -> str:
    return f'"order":{json.dumps(order, separators=(",", ":"))}'


@pytest.mark.slow
def test_smaller_inputs_run_in_the_order_of_the_plan(highest: tuple[Plan, Plan]) -> None:
    model, x, given = step()
    fitted = fit(model, x, budget=highest[0].floor - 1, pairs=1, **given)
    assert fitted.loss is not None
    small, target = torch.randn(512, 16), given["targets"]
    torch.manual_seed(3)
    model.zero_grad()
    fitted.loss(small, target).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    fitted.undo()
    model.zero_grad()
    torch.manual_seed(3)
    given["loss"](model(small), target).backward()
    for one, other in zip(gradients, model.parameters(), strict=True):
        assert one is not None
        assert other.grad is not None
        assert torch.equal(one, other.grad)


def in_higher_order(search: Search) -> Search:
    """Ops whose results no other op reads run last: the gradients of weights, whose operands live until then."""
    before = must_precede(search.graph)
    read = set[int]().union(*before.values())
    order = [op.index for op in search.graph.backward_ops]
    return search.in_order((*(op for op in order if op in read), *(op for op in order if op not in read)))


@pytest.mark.slow
def test_a_budget_that_the_captured_order_alone_meets_is_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order is chosen by the peak near the floor: a floor itself can be higher."""
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())))
    x, given = torch.randn(2048, 64), {"targets": torch.randn(2048, 64), "loss": F.mse_loss}
    alone = plan(model, x, budget="1 GiB", heuristics=replace(QUICK, order=False), **given)
    monkeypatch.setattr(study, "in_lower_order", in_higher_order)
    assert plan(model, x, budget="1 GiB", **given).floor > alone.floor
    made = plan(model, x, budget=alone.floor, **given)
    assert made.choices.order == ()
    assert made.choices.recompute
    assert made.lower_bound <= made.peak <= made.floor == alone.floor
    with pytest.raises(memplan.BudgetError) as error:
        plan(model, x, budget=alone.floor - 1, **given)
    assert error.value.smallest_budget == alone.floor
