"""What a value that is read is taken as, where it is known between what it lies: the most it can be, or a share."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from memplan.trace.recording.place import Line, user_frame
from memplan.trace.recording.values.range_rules import Number, Range

_LARGEST = 1 << 24
"""Beyond it, nothing is said of a value, though it is known what it is at most: a loop so long would not end."""


class Largest:
    """Takes values as the largest that they can be, or the share of it that is assumed for a line.

    Args:
        range_of: between what the elements of a tensor lie; None where nothing is known.
    """

    def __init__(self, range_of: Callable[[torch.Tensor], Range | None]) -> None:
        self._range_of = range_of
        self.share: Callable[[Line | None], float] = lambda line: 1.0
        """Which share of the most that can be is taken at a line."""

    def of(self, tensor: torch.Tensor) -> Range | None:
        """Return the smallest that an element can be, and what it is taken as; None where nothing is known."""
        values = None if tensor.dtype is torch.bool else self._range_of(tensor)
        if values is None or max(map(abs, values)) > _LARGEST:
            return None
        low, high = values
        share = self.share(user_frame())
        taken: Number = high if share == 1.0 else low + share * (high - low)
        return low, math.ceil(taken) if is_whole(tensor) else float(taken)

    def why(self, line: Line | None) -> str:
        """Return why a value that was read at a line is taken as it is."""
        return "the most it can be" if self.share(line) == 1.0 else "as was assumed"


def is_whole(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is of whole numbers."""
    return not tensor.dtype.is_floating_point and not tensor.dtype.is_complex and tensor.dtype is not torch.bool
