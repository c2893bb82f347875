"""Each call of a fitted model is counted: as planned, or with the reason for which it stepped aside."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from verification.fitting.quick import fit

import memplan
from memplan.errors import RecordingError
from memplan.planning.capture.flat_call import call_of
from memplan.planning.settings import Settings
from memplan.rewriting.keys import UnkeyedError
from memplan.verification.fitting.fit import Fitted
from memplan.verification.fitting.plan_cache import Plans


class Net(nn.Module):
    """Its second argument says what it does that no plan can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.GELU(), nn.Linear(64, 16), nn.Tanh())
        self.seen = 0

    def forward(self, x: Tensor, how: Any = "") -> Tensor:
        out = self.net(x)
        if how == "branch":
            return out * 2 if out.sum() > 0 else out * 3
        if how == "count":
            self.seen += 1
        if how == "seed":
            torch.manual_seed(0)
        if how == "raise":
            raise ZeroDivisionError("mine")
        return out


class Own(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


X = torch.linspace(-1, 1, 64 * 16).reshape(64, 16)

REASONS: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "an argument": (lambda model: model(X, object()), "an argument of type object, neither a tensor nor plain data"),
    "a kind of tensor": (
        lambda model: model(X.as_subclass(Own)),
        "an input is a Own, and its __torch_function__ makes the outputs what they are",
    ),
    "a branch": (lambda model: model(X, "branch"), "needs the values of a tensor to go on|goes on both ways"),
    "an attribute": (lambda model: model(X, "count"), r"forward\(\) changes the attribute .*seen"),
    "a seed": (lambda model: model(X, "seed"), r"forward\(\) sets torch's random state"),
}


@pytest.fixture
def fitted() -> Fitted:
    torch.manual_seed(0)
    made = fit(Net(), X, budget="85%", pairs=0)
    assert made.changed
    assert made.stats == type(made.stats)()  # calls of the proof do not count
    return made


def test_every_reason_is_counted_and_its_first_call_says_it(fitted: Fitted) -> None:
    fitted.model(X).sum().backward()
    fitted.model.zero_grad()
    for name, (call, said) in REASONS.items():
        with pytest.warns(UserWarning, match=f"memplan: a call runs unplanned: .*({said})") as caught:
            call(fitted.model)
        assert [one.filename for one in caught] == [__file__], name
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call(fitted.model)
    stats = fitted.stats
    assert (stats.planned, stats.unplanned, stats.without_grad) == (1, 2 * len(REASONS), 0)
    assert set(stats.why.values()) == {2}
    expected = [said for _, said in REASONS.values()]
    assert all(re.search(said, why) for said, why in zip(expected, stats.why, strict=True))


def test_the_users_exception_in_a_later_call_is_theirs_and_no_call_is_counted(fitted: Fitted) -> None:
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match=r"^mine$") as caught:
            fitted.model(X, "raise")
        assert not isinstance(caught.value, memplan.MemplanError)
    assert fitted.stats == type(fitted.stats)()
    fitted.model(X).sum().backward()
    assert fitted.stats.planned == 1


def test_until_the_model_is_handed_over_an_exception_of_its_own_is_not_taken_for_a_reason() -> None:
    plans = Plans(Net(), Settings(), 1 << 30, [].append)
    with pytest.raises(RecordingError, match="ZeroDivisionError: mine"):
        plans(call_of((X, "raise"), {}), False)
    plans.handed_over = True
    with pytest.raises(UnkeyedError, match="ZeroDivisionError: mine"):
        plans(call_of((X, "raise"), {}), False)
