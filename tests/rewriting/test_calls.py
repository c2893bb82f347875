"""Counts of a planned module's calls."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memplan.planning.planner import Planner
from memplan.planning.settings import Settings
from memplan.rewriting.calls import Calls, CallStats, sum_stats
from memplan.rewriting.install import Installed, install


def test_counts_of_several_modules_add_up() -> None:
    one = CallStats(2, 3, {"a": 1, "b": 2}, 4)
    assert sum_stats([one, CallStats(10, 1, {"b": 1}, 20)]) == CallStats(12, 4, {"a": 1, "b": 3}, 24)
    assert sum_stats([]) == CallStats()
    assert str(one) == "2 calls ran as planned, 3 unplanned (a: 1; b: 2), 4 without grad"
    assert str(CallStats(1)) == "1 call ran as planned, 0 unplanned, 0 without grad"


def test_threads_count_together() -> None:
    calls = Calls()

    def count() -> None:
        for _ in range(1000):
            calls.planned()
            calls.unplanned("a")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls.stats() == CallStats(4000, 4000, {"a": 4000})
    calls.restart()
    assert calls.stats() == CallStats()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, extra: Any = None) -> Tensor:
        return self.linear(x).tanh()


def planned(model: nn.Module) -> Installed:
    planner = Planner(model)
    return install(model, lambda call, held: planner.planned(call, Settings(costs="roofline"), 1 << 40))


def test_every_call_is_counted_once() -> None:
    model, x = Net(), torch.randn(4, 8)
    made = planned(model)
    for _ in range(3):
        model(x).sum().backward()
        model.zero_grad()
    with torch.no_grad():
        model(x)
    assert made.calls.stats() == CallStats(3, without_grad=1)
    model.linear.requires_grad_(False)
    model(x)  # nothing requires a gradient
    assert made.calls.stats() == CallStats(3, without_grad=2)


def test_the_first_call_that_steps_aside_says_why_and_all_are_counted() -> None:
    model, x = Net(), torch.randn(4, 8)
    made = planned(model)
    with pytest.warns(UserWarning, match="a call runs unplanned: an argument of type object, neither a tensor"):
        model(x, extra=object())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x, extra=object())
    with pytest.warns(UserWarning, match=r"a call runs unplanned: it is under a transform of torch\.func"):
        torch.func.vmap(model)(x[None])
    stats = made.calls.stats()
    assert (stats.planned, stats.unplanned) == (0, 3)
    assert list(stats.why.values()) == [2, 1]


def test_a_call_is_prepared_before_it_comes() -> None:
    model, x = Net(), torch.randn(4, 8)
    asked = list[bool]()
    planner = Planner(model)

    def plan(call: Any, held: bool) -> Any:
        asked.append(held)
        return planner.planned(call, Settings(costs="roofline"), 1 << 40)

    made = install(model, plan)
    from memplan.planning.capture.flat_call import call_of

    made.prepare(call_of((x,), {}), has_gradients=False)
    assert asked == [False]
    model(torch.randn(4, 8)).sum().backward()
    assert asked == [False]
    assert made.calls.stats() == CallStats(1)
