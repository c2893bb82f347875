"""What a value that is read is taken as, where its range is known: an end of it, or a share."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

from memplan.trace.recording.place import Line, is_users, user_frame
from memplan.trace.recording.values.intervals import Number, Range
from memplan.trace.recording.values.numbers import StandinInt, may_choose

_LARGEST = 1 << 24
"""Beyond it, nothing is said of a value, though it is known what it is at most: a loop so long would not end."""

_NUMBER = ("as the largest it can be", "as the smallest")


@dataclass(frozen=True, slots=True)
class Site:
    """Place in the user's code at which a value is read that is taken one of two ways: as a plain number."""

    line: Line
    at: int
    """Offset of the instruction: two reads on one line are told apart."""
    ends: tuple[str, str] = _NUMBER
    """How the value is taken, and how it is taken the other way."""


Choice = Line | Site
"""What is recorded the other way, too: a branch, or a read that is then taken at its smallest."""


class Largest:
    """Takes values as the largest that they can be, or the share of it that is assumed for a line.

    Args:
        range_of: range of a tensor's elements; None where nothing is known.
        other: reads that are taken at their smallest.
    """

    def __init__(
        self, range_of: Callable[[torch.Tensor], Range | None], other: Collection[Choice] = frozenset()
    ) -> None:
        self._range_of = range_of
        self._other = other
        self._turns: dict[Line | None, int] = {}
        self.sites: dict[Site, None] = {}
        """Reads of plain numbers and splits, in order: what is computed of these is not followed, and may grow as they
        shrink."""
        self._given = list[Any]()
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

    def plain(self, values: Range) -> Number:
        """Return what a value is taken as that is read as a plain number, whose range as of `of` is known."""
        site = _site()
        if site is None or values[0] == values[1] or self.share(site.line) != 1.0:
            return values[1]
        self.sites[site] = None
        return values[0] if site in self._other else values[1]

    def other_way(self, ends: tuple[str, str]) -> bool:
        """Return whether a value is taken the other way of two; ``ends``: what either is called."""
        site = _site(ends)
        if site is None or self.share(site.line) != 1.0:
            return False
        self.sites[site] = None
        return site in self._other

    def in_turn(self, low: Number | None, high: Number) -> Number:
        """Return a value of a range, the next each time at a line; the largest where it is not of whole numbers."""
        if not (isinstance(low, int) and isinstance(high, int)):
            return high
        line = user_frame()
        self._turns[line] = self._turns.get(line, -1) + 1
        return high - self._turns[line] % (high - low + 1)

    def given(self, number: Any) -> Any:
        """Return a number that is handed to the user's code, which `end` looks at again."""
        if isinstance(number, StandinInt):
            self._given.append(number)
        return number

    def end(self) -> None:
        """Note of each number with which nothing was done that shows that it may have chosen something."""
        for number in self._given:
            if not number.seen:
                may_choose(number)

    def why(self, line: Line | None, *, smallest: bool = False) -> str:
        """Return why a value that was read at a line is taken as it is."""
        if self.share(line) != 1.0:
            return "as was assumed"
        return "the smallest it can be" if smallest else "the most it can be"


def _site(ends: tuple[str, str] = _NUMBER) -> Site | None:
    frame = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else Site((frame.f_code.co_filename, frame.f_lineno), frame.f_lasti, ends)


def is_whole(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is of whole numbers."""
    return not tensor.dtype.is_floating_point and not tensor.dtype.is_complex and tensor.dtype is not torch.bool
