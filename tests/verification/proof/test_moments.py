"""The error of moments in 8 bits, on optimizers whose errors are known by hand."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from memplan.verification.measurement.trial import Trial, Work
from memplan.verification.proof.moments import MomentsError, moments_error


def trial(optimizer: Any) -> Trial:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(4, 8)
    return Trial("moments", model, model, Work((x,), loss=lambda y: y.square().mean(), optimizer=optimizer))


sgd = partial(torch.optim.SGD, lr=0.1)


def test_the_same_optimizer_has_no_error() -> None:
    error = moments_error(trial(sgd), sgd)
    assert (error.updates, error.relative, error.worst_relative) == (20, 0.0, 0.0)
    assert error.ok


def test_errors_are_relative_to_what_updates_add() -> None:
    """SGD adds the gradients times the rate: with a rate of 0.105, 5 % more, from the same gradients."""
    error = moments_error(trial(sgd), partial(torch.optim.SGD, lr=0.105))
    assert error.relative == pytest.approx(0.05, rel=1e-4)
    assert error.worst_relative == pytest.approx(0.05, rel=1e-3)
    assert error.ok


def test_too_large_an_error_is_said() -> None:
    error = moments_error(trial(sgd), partial(torch.optim.SGD, lr=0.3), updates=3)
    assert not error.ok
    assert "3 updates by the same gradients" in str(error)
    assert "200.00% off (relative, in L2), and 10% is allowed" in str(error)
    assert not MomentsError(20, float("nan"), "", 0.0).ok


def test_a_single_parameter_may_not_be_far_off() -> None:
    """One of four parameters has a rate 30 % too high: little of all, and too much of this one."""

    def with_a_wrong_rate(parameters: Any) -> torch.optim.Optimizer:
        weight, bias, *others = parameters
        return torch.optim.SGD([{"params": [weight, *others]}, {"params": [bias], "lr": 0.13}], lr=0.1)

    error = moments_error(trial(sgd), with_a_wrong_rate)
    assert error.relative < error.allowed
    assert (error.worst, error.worst_relative) == ("0.bias", pytest.approx(0.3, rel=1e-3))
    assert not error.ok
    assert "most of 0.bias, 30.00%, and 20% is allowed of a parameter" in str(error)
    assert not MomentsError(20, 0.01, "weight", float("nan")).ok


def test_where_nothing_moves_nothing_was_compared() -> None:
    still = partial(torch.optim.SGD, lr=0.0)
    error = moments_error(trial(still), still)
    assert not error.compared
    assert error.ok
    assert str(error) == "moments in 8 bits: nothing was compared, as 20 updates move no parameter"
    moved = moments_error(trial(still), sgd)
    assert moved.compared
    assert not moved.ok  # the other optimizer moves what this one leaves
    assert not moments_error(trial(sgd), still).ok


def test_the_trial_trains_by_its_own_optimizer() -> None:
    given = trial(sgd)
    before = {name: parameter.detach().clone() for name, parameter in given.parameters.items()}
    random = torch.random.get_rng_state()
    moments_error(given, partial(torch.optim.SGD, lr=0.0), updates=2)
    assert all(not torch.equal(before[name], parameter) for name, parameter in given.parameters.items())
    assert torch.equal(random, torch.random.get_rng_state())
