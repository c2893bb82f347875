"""Plan a step at one value of an axis: the smallest feasible budget, and the cost of the plan."""

from __future__ import annotations

from dataclasses import dataclass

from memplan.errors import InputError
from memplan.planning.api import plan_or_floor
from memplan.studies.axes.subject import Maker, Subject
from memplan.trace.recording.session import Target


@dataclass(frozen=True)
class PlanFigures:
    """Figures of a planned step. Bytes are allocated bytes, as in plans, with the workspaces of CPU kernels."""

    least: int
    """Smallest budget for which there is a plan."""
    fits: bool
    peak: int | None = None
    """Peak of the plan; None if it does not fit."""
    seconds: float | None = None
    """Estimated seconds that the plan adds to the step."""
    step_seconds: float | None = None
    """Estimated seconds of the step without the plan."""


def plan_step(subject: Subject, target: Target, budget: int) -> PlanFigures:
    """Plan a step for a budget in bytes.

    Raises:
        InputError: the step is inference or has converted weights, which cannot be planned.
        MemplanError: as `memplan.plan`.
    """
    options = subject.options
    if not options.train or subject.window is not None or options.dtype is not None:
        raise InputError(
            "a plan of inference, or of converted weights",
            expected="a training step in fp32 or under autocast, which alone can be planned",
            do="Leave fit (--fit) out",
        )
    make = Maker(subject.what, subject.arguments, subject.changes)
    device = None if target.card is None else target.name
    result = plan_or_floor(subject.what if make.plain else make, options, budget, device)
    if isinstance(result, int):
        return PlanFigures(result, fits=False)
    return PlanFigures(
        min(result.floor, result.peak), fits=True, peak=result.peak, seconds=result.seconds,
        step_seconds=result.step_seconds,
    )  # fmt: skip
