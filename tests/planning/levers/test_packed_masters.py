"""Packed master weights in plans, and a fitted training beside one that holds its master weights in float32."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from environment import slow
from models.master_weights import Held
from torch import nn
from torch.nn import functional as F

import memplan

OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
packed = partial(memplan.PackedMasters, optimizer_class=torch.optim.AdamW, **OPTIONS)


def make() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(64, 8)).to(torch.bfloat16)


def loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.float(), labels)


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(256, 64, generator=draws).to(torch.bfloat16), torch.randint(8, (256,), generator=draws)


@pytest.mark.slow
@pytest.mark.parametrize("early", [True, *slow(False)])
def test_a_fitted_training_is_the_one_with_master_weights(early: bool) -> None:
    model = make()
    reference = copy.deepcopy(model)
    held = Held(reference, torch.optim.AdamW, **OPTIONS)
    images, labels = batch()
    fitted = memplan.fit(model, images, targets=labels, loss=loss, optimizer=packed, budget="85%", early=early, pairs=0)
    assert (fitted.changed, fitted.proof.same, fitted.proof.within_budget) == (True, True, True)
    assert fitted.loss is not None
    optimizer = fitted.optimizer if early else packed(model.parameters())
    for seed in range(5):
        images, labels = batch(seed)
        reference.zero_grad()
        loss(reference(images), labels).backward()
        held.step()
        optimizer.zero_grad()
        fitted.loss(images, labels).backward()
        optimizer.step()
        for expected, master, parameter in zip(held.model, held.masters, model.parameters(), strict=True):
            assert torch.equal(expected, parameter)
            assert torch.equal(master, optimizer.master(parameter))
    assert fitted.stats.planned == 5


def test_a_plan_names_the_lever_and_counts_2_bytes_a_parameter() -> None:
    images, labels = batch()
    make_plan = partial(memplan.plan, make, images, targets=labels, loss=loss, budget="95%")
    plan, plain = make_plan(optimizer=packed), make_plan(optimizer=partial(torch.optim.AdamW, **OPTIONS))
    elements = sum(parameter.numel() for parameter in make().parameters())
    (decision,) = (one for one in plan.decisions if one.lever == "packed masters")
    assert (decision.bytes, decision.grade, decision.scope.kind) == (2 * elements, "exact", "step")
    assert "packed masters" in str(plan)
    assert memplan.Plan.from_json(plan.to_json()) == plan
    assert not [one for one in plain.decisions if one.lever == "packed masters"]
    steps = 4 * len(list(make().parameters()))  # Adam's counts of updates
    assert plan.resident["optimizer_state"] == (2 + 4 + 4) * elements + steps  # the low half and two moments
    assert plain.resident["optimizer_state"] == (2 + 2) * elements + steps
