"""Explores both directions of branches that values decide, to find the trace with the largest peak."""

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

_MAX_CHOICES = 4
"""Branches explored at most, scalar reads at most, and further choices of both at most that only appear in other
recordings. The assumptions say which were not explored."""


def with_both_ways(trace: Trace, choices: Sequence[Choice], again: Again) -> Trace:
    """Return the trace with the largest peak, with assumptions that compare the outcomes of each choice.

    Args:
        trace: of the first recording.
        choices: its lines at which an unknown value decided a branch, and its scalar reads, in order.
        again: records the step with overrides.
    """
    search = _Search(trace, choices, again)
    search.run()
    return search.result()


class _Search:
    """Overrides the choices of a recording in turn, on top of the overrides with the largest peak so far."""

    def __init__(self, trace: Trace, choices: Sequence[Choice], again: Again) -> None:
        self._trace, self._again, self._first_peak = trace, again, peak_live_bytes(trace.counted)
        self._overrides = Way()
        """Of the trace with the largest peak so far, `_trace`."""
        self._branches: dict[Line, tuple[int, Assumption | None]] = {}
        """Line -> larger peak of its two directions in bytes, and what to report."""
        self._reads = dict[Reading, Tried | None]()
        """None: the peak does not depend on it."""
        self._values = EachValue(again)
        self._seen, self._left = {_key(choice): choice for choice in choices}, _MAX_CHOICES

    def run(self) -> None:
        """Record the step with each choice overridden, branches first."""
        choices = list(self._seen.values())
        self._explore([choice for choice in choices if not isinstance(choice, Reading)])
        reads = [choice for choice in choices if isinstance(choice, Reading)]
        matter = self._values.that_matter(reads, self._overrides, peak_live_bytes(self._trace.counted))
        self._reads |= dict.fromkeys(reads if not matter else ())
        self._explore(matter)

    def _explore(self, choices: Sequence[Choice]) -> None:
        queue: list[_Pending] = [(choice, None, 0) for choice in choices[:_MAX_CHOICES]]
        while queue:
            choice, base, peak = queue.pop(0)
            if base is None:
                if self._overrides and not isinstance(choice, Reading):  # on top of the overrides, then without them
                    queue.insert(0, (choice, Way(), self._first_peak))
                base, peak = self._overrides, peak_live_bytes(self._trace.counted)
            if isinstance(choice, Reading):
                queue[:0] = self._explore_read(choice, base, peak)
            else:
                queue[:0] = self._explore_branch(choice, base, peak)

    def _explore_read(self, read: Reading, base: Way, peak: int) -> list[_Pending]:
        tried = self._reads[read] = self._values.of(read, base, peak)
        traces = [(value, trace) for value, trace in tried.outcomes.items() if isinstance(trace, Trace)]
        return [new for value, trace in traces for new in self._add(trace, base | {value}, tried.choices[value])]

    def _explore_branch(self, line: Line, base: Way, peak: int) -> list[_Pending]:
        other, choices, effective = self._again(base | {line})
        larger = max(peak, peak_live_bytes(other.counted)) if isinstance(other, Trace) and line in effective else 0
        if line not in self._branches or larger >= self._branches[line][0]:
            self._branches[line] = larger, _branch_row(line, peak, other, self._trace, reached=line in effective)
        return self._add(other, base | {line}, choices) if isinstance(other, Trace) else []

    def _add(self, trace: Trace, overrides: Way, choices: Sequence[Choice]) -> list[_Pending]:
        """Keep a trace if its peak is the largest so far, and return its new choices, as many as are explored."""
        new = [choice for choice in choices if _key(choice) not in self._seen]
        self._seen |= {_key(choice): choice for choice in new}
        peak, largest = peak_live_bytes(trace.counted), peak_live_bytes(self._trace.counted)
        # at equal peaks, the trace of a program that runs more steps is the one to show
        more_steps = len(trace.steps) - len(self._trace.steps)
        if peak * (SAME if more_steps > 0 else 1) > largest * (SAME if more_steps < 0 else 1):
            self._trace, self._overrides = trace, overrides
        explored = new[: self._left]
        self._left -= len(explored)
        return [(choice, overrides, peak) for choice in explored]

    def result(self) -> Trace:
        """Return the trace with the largest peak, with the assumptions about all choices."""
        rows = [self._row(choice) for choice in self._seen.values()]
        branches = {format_frame(choice) for choice in self._seen.values() if not isinstance(choice, Reading)}
        others = [row for row in self._trace.assumptions if row.where not in branches or not _is_of_branch(row)]
        assumptions = dict.fromkeys(row for row in rows if row is not None)
        ordered = sorted((*assumptions, *others), key=lambda row: row.kind not in ("branch", "bound"))
        return replace(self._trace, assumptions=tuple(ordered))

    def _row(self, choice: Choice) -> Assumption | None:
        if not isinstance(choice, Reading):
            return self._branches.get(choice, (0, None))[1] or _unexplored(choice)
        tried = self._reads.get(choice, Tried(choice, Way(), 0))
        return sampled(choice) if tried is None else tried.row(self._overrides, len(self._trace.steps))


_Pending = tuple[Choice, Way | None, int]
"""A choice to explore, the overrides to add it to (None: those with the largest peak), and their peak in bytes."""


def _key(choice: Choice) -> Line | tuple[Site, Use]:
    return (choice.site, choice.use) if isinstance(choice, Reading) else choice


def _branch_row(
    line: Line, peak: int, other: Trace | RecordingError | None, shown: Trace, *, reached: bool
) -> Assumption | None:
    """Return the Assumption that compares ``peak`` with the recording in the other direction, or None."""
    where = format_frame(line)
    if isinstance(other, Trace) and not reached:
        return _unexplored(line)
    if isinstance(other, Trace):
        least, most = sorted((peak, peak_live_bytes(other.counted)))
        if most <= SAME * least:
            row = Assumption("scalar", _SAME_PEAK.format(peak=format_bytes(most)), where)
        else:
            row = Assumption("bound", _DIFFER.format(most=format_bytes(most), least=format_bytes(least)), where)
    elif isinstance(other, RecordingError):
        row = Assumption("scalar", _ENDS.format(how=shorten(other.found, 120, placeholder=" ...")), where)
    else:
        return None
    counts = [known.count for known in shown.assumptions if known.where == where and _is_of_branch(known)]
    times = sum(counts) // max(len(shown.steps), 1)
    if times <= 1:
        return row
    # in a loop: iterations that go different directions in the same step were not recorded
    kind = "scalar" if row.kind == "scalar" else "branch"
    return replace(row, kind=kind, text=row.text + _ROUNDS.format(times=times))


def _unexplored(line: Line) -> Assumption:
    return Assumption("branch", _ONE_WAY, format_frame(line))


_ENDS = "a value decides a branch: the other way {how}"
_SAME_PEAK = "a value decides a branch: the peak is the same either way ({peak})"
_ONE_WAY = "a value DECIDES A BRANCH, which was recorded one way only: what the other way takes IS NOT BOUNDED"
_ROUNDS = "; it is decided {times} times in a step, which are all taken to go the same way"
_DIFFER = "a value decides a branch: one way the step takes {most}, the other way {least}; what takes more is shown"


def _is_of_branch(assumption: Assumption) -> bool:
    return assumption.kind == "branch" or "decided a branch" in assumption.text
