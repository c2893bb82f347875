"""Measure a step that runs alone, on the CPU or on a card."""

from __future__ import annotations

from collections.abc import Callable

from memplan.planning.graph.placement import Home
from memplan.verification.measurement import cuda_peak
from memplan.verification.measurement.peak_and_time import Meter, measure_step
from memplan.verification.measurement.trial import Trial

_STEPS = 2
"""An optimizer makes its state in the first."""


def measured_alone(trial: Trial, home: Home) -> tuple[int, int]:
    """Return the resident bytes, and the bytes at the peak of two steps. On a card the peak is what is reserved, less
    what is allocated for something else; it is measured twice: the second steps find what the first have left in the
    allocator's cache.

    Args:
        trial: it updates where that is part of the step.
        home: where it runs.
    """
    if home.card is None:
        with Meter() as meter:
            resident = _run(trial, meter)
        return resident, resident + meter.measured(trial.name).growth_peak
    others, resident, reserved = cuda_peak.allocated(home.name) - trial.resident, 0, 0
    for _ in range(2):
        with cuda_peak.watched(home.name) as peak:
            resident = _run(trial)
        reserved = max(reserved, peak.reserved)
    return resident, reserved - others


def growth(step: Callable[[], object], home: Home) -> int:
    """Return the bytes that a step allocates at its peak above what was allocated before."""
    if home.card is None:
        return measure_step(step).growth_peak
    with cuda_peak.watched(home.name) as peak:
        step()
    return peak.growth


def _run(trial: Trial, meter: Meter | None = None) -> int:
    resident = 0
    for _ in range(_STEPS):
        trial.prepare()
        trial.gradients_of_step(meter)
        resident = trial.resident
        trial.update_step(meter)
        trial.rest()
    return resident
