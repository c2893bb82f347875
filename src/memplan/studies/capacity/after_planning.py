"""A step at one value of an axis, planned: the smallest budget that a plan keeps, and its cost."""

from __future__ import annotations

from dataclasses import dataclass

from memplan.errors import BudgetError, InputError
from memplan.planning.api import plan
from memplan.studies.axes.subject import Maker, Subject
from memplan.trace.recording.session import Target


@dataclass(frozen=True)
class Planned:
    """Figures of a planned step. Bytes as plans count them: allocated, with the CPU's kernels."""

    least: int
    """Smallest budget that a plan was found for."""
    fits: bool
    peak: int | None = None
    """Bytes at the peak of the plan, where it fits."""
    seconds: float | None = None
    """Seconds that the plan adds to the step, estimated."""
    step_seconds: float | None = None
    """Seconds of the step without it."""


def planned(subject: Subject, target: Target, budget: int) -> Planned:
    """Plan a step for a budget.

    Raises:
        InputError: a step that cannot be planned: inference, converted weights.
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
    try:
        made = plan(
            subject.what if make.plain else make, *options.inputs, kwargs=options.kwargs, targets=options.targets,
            loss=options.loss, budget=budget, optimizer=options.optimizer, autocast=options.autocast,
            device=None if target.card is None else target.name, costs="roofline",
        )  # fmt: skip
    except BudgetError as error:
        return Planned(error.smallest_budget, False)
    return Planned(min(made.floor, made.peak), True, made.peak, made.seconds, made.step_seconds)
