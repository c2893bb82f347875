"""Moments in 8 bits in plans: only where lossy plans are allowed and nothing else fits, and what they save."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from environment import slow
from torch import nn
from torch.nn import functional as F

import memplan
from memplan.errors import BudgetError, UsageError
from memplan.planning import precision_search
from memplan.planning.cost import optimizer_memory
from memplan.planning.graph.precision import Precision
from memplan.planning.ops import eight_bit_moments

pytest.importorskip("torchao.optim")

LAYERS, WIDTH = 2, 256
WEIGHTS = LAYERS * WIDTH * WIDTH
OPTIMIZER = partial(torch.optim.AdamW, lr=1e-3)
SAVED = 2 * LAYERS * (3 * WIDTH * WIDTH - 4 * WIDTH * WIDTH // 256 - 1024) - 4
"""By hand: of each weight's two moments a byte an element is left of four, and there are scales and tables; the
learning rate is a tensor."""


def make() -> nn.Module:
    """Weights of a single shape: torchao compiles the update of each shape by itself."""
    torch.manual_seed(0)
    layers = ((nn.Linear(WIDTH, WIDTH, bias=False), nn.GELU()) for _ in range(LAYERS))
    return nn.Sequential(*(layer for pair in layers for layer in pair))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(0)
    return torch.randn(16, WIDTH, generator=draws), torch.randint(WIDTH, (16,), generator=draws)


def asked(**options: Any) -> dict[str, Any]:
    _, labels = batch()
    return {"targets": labels, "loss": F.cross_entropy, "optimizer": OPTIMIZER, **options}


def budget() -> int:
    """Bytes for weights, gradients and half of the moments in float32."""
    rows, _ = batch()
    floor = memplan.plan(make(), rows, budget="1 GiB", costs="roofline", **asked()).floor
    return floor - 4 * WEIGHTS


def test_they_are_taken_where_nothing_else_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, _ = batch()
    recorded, update_of = list[type](), optimizer_memory.update_of
    monkeypatch.setattr(optimizer_memory, "update_of", lambda *args: recorded.append(type(args[0])) or update_of(*args))
    least, options = budget(), {"costs": "roofline", "allow": "lossy", **asked()}
    recorded.clear()
    plan = memplan.plan(make(), rows, budget=least, **options)
    assert recorded == [partial, eight_bit_moments.EightBitMoments]  # once for all precisions
    assert plan.precision.moments == "int8"
    assert plan.grade == "lossy"
    (decision,) = [decision for decision in plan.decisions if decision.lever == "8-bit moments"]
    assert (decision.bytes, decision.grade) == (SAVED, "lossy")
    assert plan.peak <= least
    assert "moments in 8 bits" in plan.summary
    roomy = memplan.plan(make(), rows, budget="1 GiB", **options)
    assert not roomy.precision.moments
    assert plan.resident["optimizer_state"] == roomy.resident["optimizer_state"] - SAVED
    assert memplan.Plan.from_json(plan.to_json()).precision == plan.precision


class WithIdleBranch(nn.Module):
    """Most of the optimizer's state is of weights without a gradient in this step, of the shape compiled anyway."""

    def __init__(self) -> None:
        super().__init__()
        self.used = make()
        self.idle = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def test_state_of_idle_weights_counts_in_what_may_be_saved() -> None:
    rows, _ = batch()
    torch.manual_seed(0)
    model, options = WithIdleBranch(), {"costs": "roofline", **asked()}
    floor = memplan.plan(model, rows, budget="1 GiB", **options).floor
    idle = sum(weight.numel() for weight in model.idle.parameters())
    saved = 2 * 3 * idle  # of two moments, 3 of 4 bytes an element, without scales
    plan = memplan.plan(model, rows, budget=floor - saved // 2, allow="lossy", **options)
    assert plan.precision.moments == "int8"
    assert plan.peak <= floor - saved // 2


def test_never_without_lossy_and_never_without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, _ = batch()
    least = budget()
    with pytest.raises(BudgetError, match=r"allow='lossy' \(--allow lossy\) meets it by moments in 8 bits"):
        memplan.plan(make(), rows, budget=least, costs="roofline", **asked())
    monkeypatch.setattr(eight_bit_moments, "find_spec", lambda name: None)
    with pytest.raises(BudgetError, match=r"moments in 8 bits were left out: .*torchao is not installed"):
        memplan.plan(make(), rows, budget=least, costs="roofline", allow="lossy", **asked())
    with pytest.raises(BudgetError) as error:
        memplan.plan(make(), rows, budget=least, costs="roofline", **asked())
    assert "moments" not in str(error.value)


def test_they_are_not_planned_where_they_cannot_meet_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """To record torchao's update compiles it: a budget of half of the weights is refused without that."""
    rows, _ = batch()
    made = list[Any]()
    monkeypatch.setattr(eight_bit_moments, "_import_optimizers", made.append)
    with pytest.raises(BudgetError):
        memplan.plan(make(), rows, budget=WEIGHTS // 2, costs="roofline", allow="lossy", **asked())
    assert made == []


def test_other_optimizers_are_not_looked_at_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of SGD with momentum is as large as the weights. Half of it less than any plan needs is too little."""
    rows, _ = batch()
    searched = list[Any]()
    fastest = precision_search.fastest
    monkeypatch.setattr(precision_search, "fastest", lambda *args, **kw: searched.append(args) or fastest(*args, **kw))
    for optimizer, tried in ((partial(torch.optim.SGD, lr=0.1, momentum=0.9), 0), (OPTIMIZER, 1)):
        options = asked(optimizer=optimizer, costs="roofline")
        floor = memplan.plan(make(), rows, budget="1 GiB", **options).floor
        searched.clear()
        with pytest.raises(BudgetError) as error:
            memplan.plan(make(), rows, budget=floor - 2 * WEIGHTS, **options)
        assert len(searched) == tried
        assert ("moments in 8 bits" in str(error.value)) == bool(tried)
    sgd = asked(optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9), costs="roofline", allow="lossy")
    with pytest.raises(BudgetError) as error:
        memplan.plan(make(), rows, budget=floor // 2, **sgd)
    assert "moments" not in str(error.value)


@pytest.mark.parametrize("early", slow(False, True))
def test_a_fitted_training_has_them(early: bool) -> None:
    """The proof compares 20 updates with float32 moments, and the loop trains by torchao's optimizer."""
    rows, labels = batch()
    model = make()
    options = asked(early=early)
    floor = memplan.plan(model, rows, budget="1 GiB", **options).floor
    least = floor - 4 * WEIGHTS
    fitted = memplan.fit(model, rows, budget=least, allow="lossy", pairs=0, **options)
    assert fitted.plan.precision == Precision(moments="int8")
    assert fitted.proof.peak <= least
    moments = fitted.proof.moments
    assert moments is not None
    assert moments.updates == 20
    assert 0.001 < moments.relative < 0.06
    # nothing but the moments is lossy: all else is compared bit for bit, over three steps
    assert (fitted.proof.grade, fitted.proof.steps) == ("exact", 3)
    assert not fitted.proof.exact
    assert fitted.proof.predicted == fitted.plan.peak
    assert 0 <= fitted.plan.peak - fitted.proof.peak <= 64  # the rate, which is a tensor; the loss
    assert "moments in 8 bits: what 20 updates" in str(fitted.proof)
    assert type(fitted.optimizer).__name__ == "AdamW8bit"
    assert any("AdamW8bit" in note and "train with fitted.optimizer" in note for note in fitted.notes)
    assert fitted.loss is not None
    losses = list[float]()
    for _ in range(5):
        fitted.optimizer.zero_grad()
        loss = fitted.loss(rows, labels)
        loss.backward()
        fitted.optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]
    fitted.undo()
    with pytest.raises(UsageError, match=r"lossy \(moments in 8 bits\)"):
        memplan.fit(model, rows, budget=least, plan=fitted.plan, pairs=0, **options)


def test_with_a_plan_the_models_own_call_has_the_plans_moments() -> None:
    """The loss outside of the plan takes more than within: only with moments in 8 bits, which the training does not
    have, would the model's own call meet the budget."""
    rows, _ = batch()
    options = asked()
    floor = memplan.plan(make(), rows, budget="1 GiB", **options).floor
    plan = memplan.plan(make(), rows, budget=floor, **options)
    assert not plan.precision.lossy
    fitted = memplan.fit(make(), rows, budget=floor, plan=plan, allow="lossy", pairs=0, **options)
    assert fitted.optimizer is None
    (note,) = [note for note in fitted.notes if "with its loss outside of the plan" in note]
    assert "needs at least" in note
    fitted.undo()
