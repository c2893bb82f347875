"""Memory over time as scalars for TensorBoard, where it is installed."""

from __future__ import annotations

import importlib.util
import os

from memplan.errors import UsageError
from memplan.explanation.course import Course
from memplan.explanation.model import Explanation


def check_installed(option: str) -> None:
    """Check that scalars can be written, before the work for it is done. Raises UsageError: tensorboard is missing."""
    if importlib.util.find_spec("tensorboard") is None:
        raise UsageError(
            f"{option} needs tensorboard, which is not installed",
            expected="tensorboard, which reads what is written",
            do="Install it: pip install tensorboard",
        )


def write_scalars(folder: str | os.PathLike[str], explanation: Explanation) -> None:
    """Write a run: ``memory/allocated``, ``memory/reserved`` and ``memory/CAUSE`` in bytes, over ticks, and the peak.

    Args:
        folder: of the run, made where there is none.
        explanation: of a step; its course is thinned without losing a peak.

    Raises:
        UsageError: tensorboard is missing, or the explanation has no memory over time.
    """
    check_installed("TensorBoard's output")
    course = explanation.course
    if course is None:
        raise UsageError("an explanation without memory over time", expected="one of a step", do="Explain it again")
    from torch.utils.tensorboard import SummaryWriter

    timeline = explanation.timeline
    with SummaryWriter(os.fspath(folder)) as writer:
        # the wall time counts ticks, too: both axes of TensorBoard are the step's order
        for name, column in _columns(course).items():
            for tick, number in zip(course.ticks, column, strict=True):
                writer.add_scalar(f"memory/{name}", number, tick, walltime=float(tick))
        writer.add_scalar("peak/allocated", timeline.peak_allocated, timeline.peak_tick)
        writer.add_scalar("peak/reserved", timeline.peak_reserved, timeline.reserved_tick)


def _columns(course: Course) -> dict[str, tuple[int, ...]]:
    return {"allocated": course.allocated, "reserved": course.reserved, **course.causes}
