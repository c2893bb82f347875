"""Write memory over time as TensorBoard scalars, if tensorboard is installed."""

from __future__ import annotations

import importlib.util
import os

from memplan.errors import UsageError
from memplan.explanation.model import Explanation


def check_installed(option: str) -> None:
    """Check early that tensorboard is installed. Raises UsageError if it is not."""
    if importlib.util.find_spec("tensorboard") is None:
        raise UsageError(
            f"{option} needs tensorboard, which is not installed",
            expected="tensorboard, which reads what is written",
            do="Install it: pip install tensorboard",
        )


def write_scalars(folder: str | os.PathLike[str], explanation: Explanation) -> None:
    """Write ``memory/allocated``, ``memory/reserved`` and ``memory/CATEGORY`` in bytes over ticks, and the peaks.

    Args:
        folder: log folder of the run, created if missing.
        explanation: of a step; its timeline is thinned but has every peak.

    Raises:
        UsageError: tensorboard is missing, or the explanation has no memory over time.
    """
    check_installed("TensorBoard's output")
    course = explanation.course
    if course is None:
        raise UsageError("an explanation without memory over time", expected="one of a step", do="Explain it again")
    from torch.utils.tensorboard import SummaryWriter

    timeline = explanation.timeline
    columns = {"allocated": course.allocated, "reserved": course.reserved, **course.causes}
    with SummaryWriter(os.fspath(folder)) as writer:
        # ticks also as wall time, so that each of TensorBoard's time axes shows the order of the step
        for name, column in columns.items():
            for tick, number in zip(course.ticks, column, strict=True):
                writer.add_scalar(f"memory/{name}", number, tick, walltime=float(tick))
        writer.add_scalar("peak/allocated", timeline.peak_allocated, timeline.peak_tick)
        writer.add_scalar("peak/reserved", timeline.peak_reserved, timeline.reserved_tick)
