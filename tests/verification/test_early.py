from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from memplan.verification.early import EarlyUpdates


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        torch.optim.AdamW,
        lambda p: torch.optim.AdamW([{"params": p[:2], "lr": 0.5}, {"params": p[2:]}]),
        torch.optim.Adagrad,
    ],
)
def test_parameters_and_state_are_those_of_an_update_after_the_backward_pass(optimizer: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    model[0].bias.requires_grad_(False)
    twin = copy.deepcopy(model)
    early, late = EarlyUpdates(optimizer, model.parameters()), optimizer(list(twin.parameters()))
    schedule = torch.optim.lr_scheduler.StepLR(early.optimizer, 1, 0.5), torch.optim.lr_scheduler.StepLR(late, 1, 0.5)
    for _ in range(3):
        x = torch.randn(4, 5)
        model(x).square().sum().backward()
        assert [name for name, p in model.named_parameters() if p.grad is not None] == []
        early.optimizer.step()
        early.optimizer.zero_grad()
        twin(x).square().sum().backward()
        late.step()
        late.zero_grad()
        for one in schedule:
            one.step()
        assert [n for n, p in twin.named_parameters() if not torch.equal(p, model.get_parameter(n))] == []
    ours, theirs = early.optimizer.state_dict(), late.state_dict()
    assert str(ours["param_groups"]) == str(theirs["param_groups"])
    assert ours["state"].keys() == theirs["state"].keys()
    assert all(str(ours["state"][n]) == str(theirs["state"][n]) for n in theirs["state"])


def test_a_gradient_that_was_there_is_not_applied_with_every_other() -> None:
    model = nn.Linear(3, 2)
    model.register_parameter("stale", nn.Parameter(torch.ones(2)))
    stale = model.get_parameter("stale")
    stale.grad = torch.ones(2)
    early = EarlyUpdates(lambda p: torch.optim.SGD(p, lr=0.1), model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    assert stale.tolist() == [1, 1]
    assert len(early.optimizer.param_groups[0]["params"]) == 3


def test_afterwards_gradients_stay() -> None:
    model = nn.Linear(3, 2)
    early = EarlyUpdates(torch.optim.AdamW, model.parameters())
    early.remove()
    before = model.weight.detach().clone()
    model(torch.randn(4, 3)).sum().backward()
    assert model.weight.grad is not None
    assert torch.equal(before, model.weight)
