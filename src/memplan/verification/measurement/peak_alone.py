"""Measure the peak of a step that runs by itself, on the CPU or on a CUDA card."""

from __future__ import annotations

from collections.abc import Callable

from memplan.planning.graph.placement import Home
from memplan.verification.measurement import cuda_peak
from memplan.verification.measurement.peak_and_time import Meter, measure_step
from memplan.verification.measurement.trial import Trial

_STEPS = 2
"""Number of steps to run: optimizers allocate their state in the first."""


def measure_trial(trial: Trial, home: Home) -> tuple[int, int]:
    """Return the resident bytes, and the bytes at the peak of two steps.

    On a card the peak is that of the reserved bytes, less what is allocated outside of the trial. The larger of two
    measurements counts, since the second reuses segments that the first has left in the allocator.
    """
    if home.card is None:
        with Meter() as meter:
            resident = _run(trial, meter)
        return resident, resident + trial.initial_state_bytes + meter.measured(trial.name).growth_peak
    allocated_by_trial = trial.resident + trial.initial_state_bytes
    outside, resident, reserved = cuda_peak.allocated(home.name) - allocated_by_trial, 0, 0
    with cuda_peak.older_objects_frozen():
        for _ in range(2):
            with cuda_peak.measuring_peak(home.name) as peak:
                resident = _run(trial)
            reserved = max(reserved, peak.reserved)
    return resident, reserved - outside


def peak_growth(step: Callable[[], object], home: Home) -> int:
    """Run a step, and return the bytes at its peak, less those that were allocated before."""
    if home.card is None:
        return measure_step(step).growth_peak
    with cuda_peak.measuring_peak(home.name) as peak:
        step()
    return peak.growth


def _run(trial: Trial, meter: Meter | None = None) -> int:
    """Run the steps of a trial, counted by ``meter``, and return its resident bytes."""
    resident = 0
    for _ in range(_STEPS):
        trial.prepare()
        trial.gradients_of_step(meter)
        resident = trial.resident  # what forward and backward ran with; `release` frees the inputs
        trial.update_step(meter)
        trial.release()
    return resident
