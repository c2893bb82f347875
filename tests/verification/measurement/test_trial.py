"""A side of a comparison that begins anew does what it did the first time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from memplan.verification.measurement.trial import Trial, Work


class AtOnce(torch.optim.Optimizer):
    """Makes its state when it is made, and counts on it."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["steps"] = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                self.state[parameter]["steps"] += 1
                parameter.sub_(parameter.grad / self.state[parameter]["steps"])


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, AtOnce])
def test_it_begins_anew_with_an_optimizer_that_has_updated_nothing(kind: Any, early: bool) -> None:
    """Also where the optimizer makes its state at once, and after a backward pass that no update followed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    work = Work((torch.randn(5, 4),), optimizer=lambda parameters: kind(parameters, lr=0.1))
    begun, trial = Trial("begun", model, model, work), Trial("trial", model, model, work, in_backward=early)

    def steps() -> list[torch.Tensor]:
        for _ in range(2):
            trial.prepare()
            trial.gradients_of_step()
            trial.update_step()
        return [one.detach().clone() for one in trial.parameters.values()]

    first = steps()
    trial.prepare()
    trial.gradients_of_step()
    trial.release()
    trial.restart_from(begun)
    assert all(torch.equal(one, other) for one, other in zip(first, steps(), strict=True))


class Counting(nn.Module):
    """What it computes depends on how often it ran, and on what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.calls, self.seen, self.again = 0, {"sizes": [1]}, []
        self.again.append(self.again)  # contains itself
        self.known = [self.layer.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen["sizes"].append(len(self.seen["sizes"]) + 1)
        assert self.known[0] is self.layer.weight
        return self.layer(x) * self.calls + sum(self.seen["sizes"])


def test_it_begins_anew_with_the_attributes_that_the_module_has() -> None:
    torch.manual_seed(0)
    model = Counting()
    work = Work((torch.randn(5, 4),))
    begun, trial = Trial("begun", model, model, work), Trial("trial", model, model, work)

    def outputs() -> list[torch.Tensor]:
        found = []
        for _ in range(2):
            trial.prepare()
            trial.gradients_of_step()
            found.append(trial.output)
            trial.update_step()
            trial.release()
        return found

    first = outputs()
    assert not torch.equal(*first)
    model.forward = lambda x: x  # pyright: ignore[reportAttributeAccessIssue]  # as a plan takes its place
    trial.restart_from(begun)
    assert all(torch.equal(one, other) for one, other in zip(first, outputs(), strict=True))
    assert (model.calls, model.seen) == (0, {"sizes": [1]})
