"""A step with branches that values decide, recorded both ways: what it takes at most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from textwrap import shorten

from memplan._bytes import format_bytes
from memplan.errors import RecordingError
from memplan.trace.each_value import SAME, Again, EachValue, Tried, sampled
from memplan.trace.live_bytes import peak_live_bytes
from memplan.trace.recording.place import Line, format_frame
from memplan.trace.recording.values.readings import Choice, Reading, Site, Use, Way
from memplan.trace.records import Assumption
from memplan.trace.trace import Trace

_MOST = 4
"""Branches at most that are recorded both ways, as many readings, and as many of both that only another way shows; of
others it is said that they were not."""


def with_both_ways(trace: Trace, choices: Sequence[Choice], again: Again) -> Trace:
    """Return the trace of the way that takes more, and say of each branch and of each reading what its ways take.

    Args:
        trace: as recorded.
        choices: lines at which a value decided that the recording does not know, and what was read and taken at its
            largest, in order.
        again: records the step otherwise.
    """
    search = _Search(trace, choices, again)
    search.run()
    return search.result()


class _Search:
    """Takes one choice after the other otherwise, beside those that made the step take more."""

    def __init__(self, trace: Trace, choices: Sequence[Choice], again: Again) -> None:
        self._trace, self._again, self._straight = trace, again, peak_live_bytes(trace.counted)
        self._taken = Way()
        self._branches: dict[Line, tuple[int, Assumption | None]] = {}
        self._readings = dict[Reading, Tried | None]()
        """None: nothing depends on it."""
        self._each = EachValue(again)
        self._seen, self._more = {_key(one): one for one in choices}, _MOST

    def run(self) -> None:
        """Record what is to be recorded."""
        first = list(self._seen.values())
        self._each_of([one for one in first if not isinstance(one, Reading)])
        readings = [one for one in first if isinstance(one, Reading)]
        matter = self._each.that_matter(readings, self._taken, peak_live_bytes(self._trace.counted))
        self._readings |= dict.fromkeys(readings if not matter else ())
        self._each_of(matter)

    def _each_of(self, choices: Sequence[Choice]) -> None:
        queue: list[_Next] = [(one, None, 0) for one in choices[:_MOST]]
        while queue:
            choice, way, peak = queue.pop(0)
            if way is None:
                if self._taken and not isinstance(choice, Reading):  # beside what is taken otherwise, then alone
                    queue.insert(0, (choice, Way(), self._straight))
                way, peak = self._taken, peak_live_bytes(self._trace.counted)
            queue[:0] = (
                self._of_reading(choice, way, peak) if isinstance(choice, Reading) else self._of_line(choice, way, peak)
            )

    def _of_reading(self, reading: Reading, way: Way, peak: int) -> list[_Next]:
        tried = self._readings[reading] = self._each.of(reading, way, peak)
        found = [(other, one) for one, other in tried.found.items() if isinstance(other, Trace)]
        return [new for other, one in found for new in self._found(other, way | {one}, tried.below[one])]

    def _of_line(self, line: Line, way: Way, peak: int) -> list[_Next]:
        other, below, reached = self._again(way | {line})
        weight = max(peak, peak_live_bytes(other.counted)) if isinstance(other, Trace) and line in reached else 0
        if line not in self._branches or weight >= self._branches[line][0]:
            self._branches[line] = weight, _of_line(line, peak, other, self._trace, reached=line in reached)
        return self._found(other, way | {line}, below) if isinstance(other, Trace) else []

    def _found(self, other: Trace, way: Way, below: Sequence[Choice]) -> list[_Next]:
        """Note what another way takes; return the choices that only it shows, as many as are followed."""
        new = [one for one in below if _key(one) not in self._seen]
        self._seen |= {_key(one): one for one in new}
        # where peaks are the same, a program that makes more steps is what is shown
        more = len(other.steps) - len(self._trace.steps)
        theirs, ours = peak_live_bytes(other.counted), peak_live_bytes(self._trace.counted)
        if theirs * (SAME if more > 0 else 1) > ours * (SAME if more < 0 else 1):
            self._trace, self._taken = other, way
        followed, self._more = new[: self._more], self._more - len(new[: self._more])
        return [(one, way, peak_live_bytes(other.counted)) for one in followed]

    def result(self) -> Trace:
        """Return the trace of the way that takes most, with what is to be said."""
        said = [self._said(one) for one in self._seen.values()]
        rows = dict.fromkeys(row for row in said if row is not None)
        places = {format_frame(one) for one in self._seen.values() if not isinstance(one, Reading)}
        kept = [one for one in self._trace.assumptions if one.where not in places or not _is_of_branch(one)]
        ordered = sorted((*rows, *kept), key=lambda row: row.kind not in ("branch", "bound"))
        return replace(self._trace, assumptions=tuple(ordered))

    def _said(self, choice: Choice) -> Assumption | None:
        if not isinstance(choice, Reading):
            return self._branches.get(choice, (0, None))[1] or _not_tried(choice)
        tried = self._readings.get(choice, Tried(choice, Way(), 0))
        return sampled(choice) if tried is None else tried.row(self._taken, len(self._trace.steps))


_Next = tuple[Choice, Way | None, int]
"""A choice that is to be taken otherwise, beside which others (None: those that made the step take more), and the peak
of these alone."""


def _key(choice: Choice) -> Line | tuple[Site, Use]:
    return (choice.site, choice.use) if isinstance(choice, Reading) else choice


def _of_line(
    line: Line, peak: int, other: Trace | RecordingError | None, shown: Trace, *, reached: bool
) -> Assumption | None:
    """Return what has to be said of a branch, recorded the other way; None where there is nothing."""
    if isinstance(other, Trace) and not reached:
        return _not_tried(line)
    row = _of_branch(format_frame(line), peak, other)
    return None if row is None else _with_rounds(row, shown)


def _of_branch(where: str | None, peak: int, other: Trace | RecordingError | None) -> Assumption | None:
    if isinstance(other, Trace):
        return _compared(where, peak, peak_live_bytes(other.counted))
    if isinstance(other, RecordingError):
        return Assumption("scalar", _ENDS.format(how=shorten(other.found, 120, placeholder=" ...")), where)
    return None


def _with_rounds(row: Assumption, trace: Trace) -> Assumption:
    """Add to what is said of a branch that it is in a loop: some rounds may go one way and others the other."""
    rounds = sum(one.count for one in trace.assumptions if one.where == row.where and _is_of_branch(one))
    times = rounds // max(len(trace.steps), 1)
    if times <= 1:
        return row
    kind = "scalar" if row.kind == "scalar" else "branch"  # what some one way and some the other take was not recorded
    return replace(row, kind=kind, text=row.text + _ROUNDS.format(times=times))


def _not_tried(line: Line) -> Assumption:
    return Assumption("branch", _ONE_WAY, format_frame(line))


def _compared(where: str | None, one: int, two: int) -> Assumption:
    if max(one, two) <= SAME * min(one, two):
        return Assumption("scalar", _SAME_PEAK.format(peak=format_bytes(max(one, two))), where)
    most, least = format_bytes(max(one, two)), format_bytes(min(one, two))
    return Assumption("bound", _DIFFER.format(most=most, least=least), where)


_ENDS = "a value decides a branch: the other way {how}"
_SAME_PEAK = "a value decides a branch: the peak is the same either way ({peak})"
_ONE_WAY = "a value DECIDES A BRANCH, which was recorded one way only: what the other way takes IS NOT BOUNDED"
_ROUNDS = "; it is decided {times} times in a step, which are all taken to go the same way"
_DIFFER = "a value decides a branch: one way the step takes {most}, the other way {least}; what takes more is shown"


def _is_of_branch(assumption: Assumption) -> bool:
    return assumption.kind == "branch" or "decided a branch" in assumption.text
