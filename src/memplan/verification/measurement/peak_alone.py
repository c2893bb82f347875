"""A step that runs alone: what is there all the time, its measured peak, and what it leaves to others."""

from __future__ import annotations

from collections.abc import Callable

from memplan.planning.graph.placement import Home
from memplan.verification.measurement import cuda_peak, free_memory
from memplan.verification.measurement.peak_and_time import Meter, measure_step
from memplan.verification.measurement.trial import Trial

_STEPS = 2
"""An optimizer makes its state in the first."""


def measured_alone(trial: Trial, home: Home) -> tuple[int, int]:
    """Bytes that are there all the time, and at the peak of two steps. On a card the latter are reserved, less what is
    allocated for others.

    Args:
        trial: it updates where that is part of the step.
        home: where it runs.
    """
    return _on_cpu(trial) if home.card is None else _on_card(trial, home.name)


def growth(step: Callable[[], object], home: Home) -> int:
    """Bytes that a step holds at its peak above what was there when it began."""
    return measure_step(step).growth_peak if home.card is None else cuda_peak.growth(step, home.name)


def available(home: Home) -> int | None:
    """Bytes that can still be allocated there; None where the system does not say."""
    return free_memory.available() if home.card is None else cuda_peak.available(home.name)


def _on_cpu(trial: Trial) -> tuple[int, int]:
    with Meter() as meter:
        resident = _run(trial, meter)
    return resident, resident + meter.measured(trial.name).growth_peak


def _on_card(trial: Trial, place: str) -> tuple[int, int]:
    """Twice: the steps find an emptied cache, and then what those before have left."""
    found, resident = list[int](), 0
    others = cuda_peak.allocated(place) - trial.resident
    for _ in range(2):
        with cuda_peak.watched(place, others) as peak:
            resident = _run(trial)
        found.append(peak.reserved)
    return resident, max(found)


def _run(trial: Trial, meter: Meter | None = None) -> int:
    resident = 0
    for _ in range(_STEPS):
        trial.prepare()
        trial.gradients_of_step(meter)
        resident = trial.resident
        trial.update_step(meter)
        trial.rest()
    return resident
