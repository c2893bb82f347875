"""Steps whose sizes are values: what is predicted is never less than is measured, and says what it rests on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from allocator import measured_peak
from steps_by_value import STEPS
from torch import nn

import memplan
from memplan.trace.records import loud


def holds(name: str, times: int) -> None:
    """Whatever is drawn, the prediction is at least the measured peak."""
    trace = memplan.record(STEPS[name])
    predicted = memplan.simulate(trace).peak_allocated
    assert loud(trace.assumptions)
    for seed in range(times):
        torch.manual_seed(seed)
        measured = measured_peak(STEPS[name])
        assert measured <= predicted, (seed, predicted)


@pytest.mark.parametrize("name", STEPS)
def test_a_step_that_rests_on_values_is_bounded(name: str) -> None:
    holds(name, 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_fifty_draws_of_each_step(name: str) -> None:
    holds(name, 50)


def test_memory_that_nobody_wrote_is_no_value() -> None:
    """Rows of known values at positions that are drawn: what lies in the result's memory are not its values."""

    def build() -> Callable[[], None]:
        table = nn.Parameter(torch.randn(2, 16, 8))

        def step() -> None:
            rows = torch.ones(2, 16).nonzero()
            drawn = rows[torch.multinomial(torch.ones(len(rows)), 8)]
            table[drawn[:, 0], drawn[:, 1]].sum().backward()

        return step

    assert memplan.simulate(memplan.record(build)).peak_allocated == measured_peak(build)
