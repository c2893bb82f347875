"""Steps whose sizes are values: what is predicted is never less than is measured, and says what it rests on."""

from __future__ import annotations

import pytest
import torch
from allocator import measured_peak
from steps_by_value import STEPS

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
