"""LBFGS makes all of its iterations in a recording, as it does where nothing ends it early."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from environment import slow
from torch import nn
from truth.cpu_allocator import measured_peak

import memplan


def fitting(**options: Any) -> Callable[[], Callable[[], None]]:
    def build() -> Callable[[], None]:
        net, x, y = nn.Linear(64, 64, bias=False), torch.randn(16, 64), torch.randn(16, 64)
        optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, **options)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (net(x) - y).square().mean()
            loss.backward()
            return loss

        return lambda: (optimizer.step(closure), None)[1]  # pyright: ignore[reportArgumentType]

    return build


@pytest.mark.parametrize(
    "options", [{"max_iter": 6, "history_size": 6}, *slow({}, {"max_iter": 10, "history_size": 3})]
)
def test_the_history_is_kept(options: dict[str, Any]) -> None:
    trace = memplan.record(fitting(**options))
    assert memplan.simulate(trace).peak_allocated == measured_peak(fitting(**options))
    assert any("all of its iterations" in one.text for one in trace.assumptions)
    assert all(one.kind != "branch" for one in trace.assumptions)


def test_a_search_along_a_line_takes_no_more() -> None:
    """How often it tries depends on values; the fewer, the more iterations are left and the more history is kept."""
    options: dict[str, Any] = {"max_iter": 8, "line_search_fn": "strong_wolfe"}
    predicted = memplan.simulate(memplan.record(fitting(**options))).peak_allocated
    assert all(measured_peak(fitting(**options)) <= predicted for _ in range(3))
