"""Which precision is taken: the fastest that fits, the one that loses less where they are as fast."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from processor import needs_avx512
from torch import nn
from torch.nn import functional as F

import memplan
from memplan.devices import find
from memplan.errors import BudgetError
from memplan.planning import planner, tiers
from memplan.planning.calls import call_of
from memplan.planning.graph import JointGraph
from memplan.planning.lowering import blocks
from memplan.planning.planner import Planner, Settings
from memplan.planning.precision import EXACT, UNSCALED, Precision
from memplan.planning.search import Heuristics

QUICK = Heuristics(shakes=1, rounds=8)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(3)]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *parts, nn.Flatten(), nn.Linear(8 * 256, 5))


def given() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, 3, 16, 16), torch.randint(5, (8,))


def planned(budget: int | str, **options: Any) -> memplan.Plan:
    x, y = given()
    options = {"costs": "roofline", "heuristics": QUICK, **options}
    return memplan.plan(net(), x, targets=y, loss=F.cross_entropy, budget=budget, **options)


@needs_avx512
def test_the_fastest_of_all_kinds_is_taken() -> None:
    x, _ = given()
    call, model = call_of((x,), {}), net()
    exact = Planner(model).planned(call, Settings(1 << 30, costs="roofline")).plan
    for share in (0.9, 0.6, 0.5):
        settings = Settings(int(share * exact.peak), costs="roofline", heuristics=QUICK, allow="lossy")
        took = Planner(model).planned(call, settings).plan
        times = list[float]()
        for precision in (EXACT, *(Precision(c, s) for c in ("", "bfloat16") for s in ("exact", "bfloat16", "int8"))):
            try:  # a planner of its own: nothing is shared
                one = Planner(model).planned(call, replace(settings, precision=precision)).plan
            except BudgetError:
                continue
            assert one.total_seconds is not None
            times.append(one.total_seconds)
        assert took.total_seconds is not None
        assert took.peak <= settings.budget
        assert took.total_seconds <= min(times) / tiers.WORTH_IT * 1.001


def test_what_loses_less_is_taken_where_it_is_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "lower_precision", lambda card, device: "")
    plan = planned("1GB", allow="lossy")
    assert (plan.precision, plan.grade) == (EXACT, "exact")


@needs_avx512
def test_what_an_exact_plan_cannot_do_is_offered_and_done() -> None:
    floor = planned("1GB").floor
    with pytest.raises(BudgetError) as caught:
        planned(int(0.8 * floor))
    said = str(caught.value)
    assert "allow='lossy' (--allow lossy) meets it by computing in bfloat16" in said
    assert "a step predicted" in said
    plan = planned(int(0.8 * floor), allow="lossy")
    assert plan.precision.compute == "bfloat16"
    assert plan.peak <= 0.8 * floor < floor
    assert caught.value.lower_by[-1].bytes == plan.peak
    with pytest.raises(BudgetError) as caught:
        planned(1)
    assert "lossy" not in str(caught.value)
    with pytest.raises(BudgetError) as caught:
        planned(int(0.2 * floor), allow="lossy")
    assert floor > caught.value.smallest_budget > 0.2 * floor
    assert planned(caught.value.smallest_budget, allow="lossy").peak <= caught.value.smallest_budget


@needs_avx512
def test_it_is_the_same_every_time() -> None:
    budget = int(0.8 * planned("1GB").floor)
    one, other = (planned(budget, allow="lossy") for _ in range(2))
    assert one == other


def test_a_card_without_bfloat16_computes_in_float16_and_says_what_that_needs() -> None:
    assert tiers.lower_precision(find("t4"), "cpu") == "float16"
    assert tiers.lower_precision(find("h100"), "cpu") == "bfloat16"
    assert tiers.lower_precision(None, "cpu") == "bfloat16"
    torch.manual_seed(0)
    # no convolutions: on processors without float16 they take more in it
    layers = [part for _ in range(6) for part in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())]
    model, x, y = nn.Sequential(*layers), torch.randn(512, 64), torch.randint(64, (512,))
    options: dict[str, Any] = {"targets": y, "loss": F.cross_entropy, "costs": "roofline", "heuristics": QUICK}
    exact = memplan.plan(model, x, budget="1GB", **options)
    plan = memplan.plan(model, x, budget=int(0.7 * exact.floor), allow="lossy", device="t4", **options)
    assert plan.precision.compute == "float16"
    assert UNSCALED in plan.notes


def test_under_autocast_only_what_is_saved_is_left_to_lose() -> None:
    settings = Settings(1 << 30, allow="lossy")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert {one.compute for one in tiers.tiers(net(), settings)} == {""}
    assert next(tiers.tiers(net(), settings)) == EXACT
    assert EXACT not in tiers.tiers(net(), Settings(1, allow="lossy", without=(EXACT,)))


def test_blocks_that_are_slower_in_fewer_bits_compute_as_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs by hand: in bfloat16 the second block takes ten times as long, and all others half as long."""
    with_costs = planner.with_costs

    def by_hand(graph: JointGraph, **_: Any) -> JointGraph:
        ops = {op.index: op for op in graph.ops}
        for block, inside in blocks(graph).items():
            low = any("conv" in op.target and graph.values[op.makes[0]].dtype == "bfloat16" for op in inside)
            seconds = (10 if block.startswith("2") else 0.5) if low else 1
            ops |= {op.index: replace(op, seconds=1e-3 * seconds / len(inside)) for op in inside}
        return replace(with_costs(graph, how="roofline"), ops=tuple(ops.values()))

    monkeypatch.setattr(planner, "with_costs", by_hand)
    plan = planned("1GB", allow="lossy")
    assert plan.precision.compute == "bfloat16"
    assert plan.precision.apart
    assert all(name.startswith("2") for name in plan.precision.apart)
    assert str(plan.precision).startswith("computing in bfloat16")
    told = {one.layer for one in plan.decisions if one.lever == "lower precision"}
    assert told
    assert not [layer for layer in told if layer is not None and layer in plan.precision.apart]
    assert memplan.Plan.from_json(plan.to_json()) == plan
