"""What a value that is read is taken as, where its range is known: an end of it, or a share."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch

from memplan.trace.recording.place import Line, instruction, is_users, user_frame
from memplan.trace.recording.values.intervals import Number, Range
from memplan.trace.recording.values.numbers import StandinInt
from memplan.trace.recording.values.readings import Reading, Site, Taken, Use

_LARGEST = 1 << 24
"""Beyond it, nothing is said of a value, though it is known what it is at most: a loop so long would not end."""


class Largest:
    """Takes values as the largest that they can be, or the share of it that is assumed for a line.

    Args:
        range_of: range of a tensor's elements; None where nothing is known.
        other: what is read that is taken as something else.
    """

    def __init__(
        self, range_of: Callable[[torch.Tensor], Range | None], other: Collection[Line | Taken] = frozenset()
    ) -> None:
        self._range_of = range_of
        self._other = {one.site: one for one in other if isinstance(one, Taken)}
        self._turns: dict[Line | None, int] = {}
        self._sites: dict[Site, Reading] = {}
        self._reads = dict[Site, int]()
        self.turned = set[Taken]()
        """What was read and taken as something else."""
        self._given = list[tuple[StandinInt, Use]]()
        self.share: Callable[[Line | None], float] = lambda line: 1.0
        """Which share of the most that can be is taken at a line."""

    @property
    def readings(self) -> tuple[Reading, ...]:
        """Return what was read that may matter in a way which is not followed, in order."""
        return tuple(one for one in self._sites.values() if one.use > Use.FOLLOWED)

    def of(self, tensor: torch.Tensor) -> Range | None:
        """Return the smallest that an element can be, and what it is taken as; None where nothing is known."""
        values = None if tensor.dtype is torch.bool else self._range_of(tensor)
        if values is None or max(map(abs, values)) > _LARGEST:
            return None
        low, high = values
        share = self.share(user_frame())
        taken: Number = high if share == 1.0 else low + share * (high - low)
        return low, math.ceil(taken) if is_whole(tensor) else float(taken)

    def read(self, values: Range | None) -> frozenset[Site]:
        """Return where a value is read, whose range as of `of` is known; nothing where it is taken as is assumed."""
        site = None if values is None or values[0] == values[1] else _site()
        if values is None or site is None or self.share(site.line) != 1.0:
            return frozenset()
        before = self._sites.get(site, Reading(site, *values))
        low, high = min(before.low, values[0]), max(before.high, values[1])
        self._sites[site] = Reading(site, low, high, before.use, before.times + 1)
        return frozenset((site,))

    def uses(self, sites: Collection[Site], use: Use) -> None:
        """Note what becomes of what was read at sites."""
        for site in sites:
            self._sites[site] = replace(self._sites[site], use=max(self._sites[site].use, use))

    def is_taken(self, sites: frozenset[Site]) -> bool:
        """Return whether what is read at a site is taken as something else than its largest."""
        return any(one in self._other and self._other[one].values for one in sites)

    def taken(self, sites: frozenset[Site], values: Range, largest: Number) -> Number:
        """Return what a value is taken as that was read at a site: the largest, if nothing else is chosen."""
        for site in sites if self.is_taken(sites) else ():
            taken = self._other[site]
            self.turned.add(taken)
            self._reads[site] = self._reads.get(site, -1) + 1
            return min(max(taken.values[self._reads[site] % len(taken.values)], values[0]), values[1])
        return largest

    def other_way(self, ends: tuple[str, str]) -> bool:
        """Return whether sizes are taken otherwise; ``ends``: how they are taken, and how otherwise."""
        site = _site(ends)
        if site is None or self.share(site.line) != 1.0:
            return False
        self._sites[site] = Reading(site, 0, 0, Use.PLAIN)
        taken = self._other.get(site)
        self.turned |= set() if taken is None else {taken}
        return taken is not None

    def in_turn(self, low: Number | None, high: Number) -> Number:
        """Return a value of a range, the next each time at a line; the largest where it is not of whole numbers."""
        if not (isinstance(low, int) and isinstance(high, int)):
            return high
        line = user_frame()
        self._turns[line] = self._turns.get(line, -1) + 1
        return high - self._turns[line] % (high - low + 1)

    def given(self, number: Any, use: Use = Use.KEPT) -> Any:
        """Return a number that is handed to the user's code, which `end` looks at again.

        Args:
            number: that stands for one which is not known.
            use: what becomes of it if nothing is done with it that shows.
        """
        if isinstance(number, StandinInt):
            self._given.append((number, use))
        return number

    def end(self) -> None:
        """Note of each number with which nothing was done that shows that it may have chosen something."""
        for number, use in self._given:
            if not number.seen:
                self.uses(number.sites, use)

    def why(self, line: Line | None, *, smallest: bool = False) -> str:
        """Return why a value that was read at a line is taken as it is."""
        if self.share(line) != 1.0:
            return "as was assumed"
        return "the smallest it can be" if smallest else "the most it can be"


def _site(ends: tuple[str, str] | None = None) -> Site | None:
    frame = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else Site((frame.f_code.co_filename, frame.f_lineno), instruction(frame), ends)


def is_whole(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is of whole numbers."""
    return not tensor.dtype.is_floating_point and not tensor.dtype.is_complex and tensor.dtype is not torch.bool
