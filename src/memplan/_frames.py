"""The functions that are running."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType


def callers() -> Iterator[FrameType]:
    """Yield the frames of the callers of the function that iterates over this generator, innermost first."""
    frame = sys._getframe(1).f_back  # frame 0 is this generator, frame 1 the function that iterates
    while frame is not None:
        yield frame
        frame = frame.f_back
