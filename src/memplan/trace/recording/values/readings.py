"""Places at which values are read that a recording does not know, and as what they can be taken in another one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from memplan.trace.recording.place import Line
from memplan.trace.recording.values.intervals import Number

FEW = 16
"""Values at most of a number that is recorded at each of them."""


class Use(IntEnum):
    """What becomes of a number that is read: the more, the less is known of what it decides."""

    FOLLOWED = 0
    SIZE = 1
    """A size, whose largest is followed; what is not seen may shrink as it grows."""
    COMPARED = 2
    """It decides a branch, which is recorded both ways; of a chain of branches or of a loop that is not all."""
    KEPT = 3
    """Printed, or kept where nobody sees what reads it."""
    PLAIN = 4
    """A plain number, or the length of a loop: what is computed of it is not followed."""
    CHOOSES = 5
    """A name, a key of a dictionary or an index of a list."""


@dataclass(frozen=True, slots=True)
class Site:
    """Place in the user's code at which a value is read."""

    line: Line
    at: int
    """Offset of the instruction: two reads on one line are told apart."""
    ends: tuple[str, str] | None = None
    """Of sizes that are chosen together, as those of a split: how they are taken, and how they are taken otherwise."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A choice of what is read at a site: one value after the other; none where sizes are taken otherwise together."""

    site: Site
    values: tuple[Number, ...]


@dataclass(frozen=True, slots=True)
class Reading:
    """What a recording has read at a site, and taken at its largest."""

    site: Site
    low: Number
    high: Number
    use: Use = Use.FOLLOWED
    times: int = 0
    """How often, in all steps."""

    @property
    def is_few(self) -> bool:
        """Return whether it can be so few numbers that each is recorded."""
        whole = isinstance(self.low, int) and isinstance(self.high, int) and self.site.ends is None
        return whole and self.high - self.low < FEW

    @property
    def others(self) -> tuple[Taken, ...]:
        """Return what else it is taken as, where nothing shows yet that anything depends on it."""
        if self.site.ends is not None:
            return (Taken(self.site, ()),)
        if self.use >= Use.PLAIN and self.is_few:
            return self.all_others
        values = [self.low]
        if self.use not in (Use.SIZE, Use.PLAIN) and isinstance(self.high, int):
            parts = 4 if self.is_few or self.use is Use.CHOOSES else 2
            values = [self.low + (self.high - self.low) * part // parts for part in range(parts)]
        return self._taken([one for one in dict.fromkeys(values) if one != self.high])

    @property
    def all_others(self) -> tuple[Taken, ...]:
        """Return all that it can be but the largest, if these are few; else the same as `others`."""
        return self._taken(range(int(self.low), int(self.high))) if self.is_few else self.others

    def _taken(self, values: Sequence[Number]) -> tuple[Taken, ...]:
        """Return a choice of each value, and one of all: of tables in a loop, each may be used."""
        each = [Taken(self.site, (one,)) for one in values]
        if self.use is Use.SIZE or not (self.is_few or self.use is Use.CHOOSES):
            return tuple(each)
        return (*each, *self.in_turn((self.high, *reversed(values))))

    def in_turn(self, values: Sequence[Number]) -> tuple[Taken, ...]:
        """Return choices of one value after the other, as many as are read, forwards and backwards.

        Args:
            values: those that matter most first.
        """
        orders = (tuple(values), tuple(values[: self.times])[::-1])
        return tuple(dict.fromkeys(Taken(self.site, one) for one in orders if len(one) > 1))


Choice = Line | Reading
"""What may be otherwise than in a recording: the way that a branch goes, or what is read."""
Way = frozenset[Line | Taken]
"""Lines whose branches are taken the other way, and what is read elsewhere than at its largest."""
