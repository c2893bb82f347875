"""A step with branches that values decide, recorded both ways: what it takes at most."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from textwrap import shorten

from memplan._bytes import format_bytes
from memplan.errors import RecordingError
from memplan.trace.recording.place import format_frame
from memplan.trace.recording.values.largest import Choice, Site
from memplan.trace.records import Assumption
from memplan.trace.trace import Trace

Again = Callable[[frozenset[Choice]], tuple[Trace | RecordingError | None, Sequence[Choice]]]
"""Records the step once more, with these choices taken the other way; what comes of it, and its choices."""

_MOST = 4
"""Branches at most that are recorded both ways, as many reads of numbers, and as many of both that only another way
shows; of others it is said that they were not."""
_SAME = 1.01
"""Peaks count as the same up to this factor."""


def with_both_ways(trace: Trace, choices: Sequence[Choice], again: Again) -> Trace:
    """Return the trace of the way that takes more, and say of each branch what either way takes.

    Args:
        trace: as recorded.
        choices: lines at which a value decided that the recording does not know, and reads of plain numbers that were
            taken at their largest, in order.
        again: records the step the other way.
    """
    taken = frozenset[Choice]()
    found: dict[str | None, Assumption] = {}
    ends: dict[Site, Assumption | None] = {}
    first = [one for sites in (False, True) for one in [x for x in choices if isinstance(x, Site) == sites][:_MOST]]
    queue: list[tuple[Choice, frozenset[Choice] | None, int]] = [(one, None, 0) for one in first]
    seen, more = set(choices), _MOST
    while queue:
        choice, way, peak = queue.pop(0)
        if way is None:  # a choice of the way that is shown
            way, peak = taken, most_at_once(trace)
        other, below = again(way | {choice})
        if isinstance(choice, Site):
            ends[choice] = _of_ends(choice, peak, other)
        elif (row := _of_branch(format_frame(choice), peak, other)) is not None:
            found[row.where] = _with_rounds(row, trace)
        if not isinstance(other, Trace):
            continue
        new = [one for one in below if one not in seen][:more]
        seen, more = seen.union(below), more - len(new)
        queue = [(one, way | {choice}, most_at_once(other)) for one in new] + queue
        if most_at_once(other) > most_at_once(trace):
            trace, taken = other, way | {choice}
    left = {one: _not_tried(one) for one in seen if isinstance(one, Site) and one not in ends}
    rows = {row: None for row in (ends | left).values() if row is not None}
    kept = [one for one in trace.assumptions if one.where not in found or not _is_of_branch(one)]
    every = [*found.values(), *rows, *kept]
    return replace(trace, assumptions=tuple(sorted(every, key=lambda row: row.kind not in ("branch", "bound"))))


def _of_branch(where: str | None, peak: int, other: Trace | RecordingError | None) -> Assumption | None:
    if isinstance(other, Trace):
        return _compared(where, peak, most_at_once(other))
    if isinstance(other, RecordingError):
        return Assumption("scalar", _ENDS.format(how=shorten(other.found, 120, placeholder=" ...")), where)
    return None


def _with_rounds(row: Assumption, trace: Trace) -> Assumption:
    """Add to what is said of a branch that it is in a loop: some rounds may go one way and others the other."""
    rounds = sum(one.count for one in trace.assumptions if one.where == row.where and _is_of_branch(one))
    times = rounds // max(len(trace.steps), 1)
    return replace(row, text=row.text + _ROUNDS.format(times=times)) if times > 1 else row


def _of_ends(site: Site, peak: int, other: Trace | RecordingError | None) -> Assumption | None:
    """Return what has to be said of a value that was taken both ways."""
    where = format_frame(site.line)
    if isinstance(other, Trace):
        least = most_at_once(other)
        if max(peak, least) <= _SAME * min(peak, least):
            return None
        ends = site.ends[::-1] if least > peak else site.ends
        most, less = format_bytes(max(peak, least)), format_bytes(min(peak, least))
        return Assumption("bound", _END.format(end=ends[0], most=most, less=less, other=ends[1]), where)
    how = shorten(other.found, 120, placeholder=" ...") if isinstance(other, RecordingError) else "was not recorded"
    return Assumption("bound", _NO_SMALLEST.format(end=site.ends[0], other=site.ends[1], how=how), where)


def _not_tried(site: Site) -> Assumption:
    return Assumption("bound", _UNTRIED.format(end=site.ends[0]), format_frame(site.line))


def _compared(where: str | None, one: int, two: int) -> Assumption:
    if max(one, two) <= _SAME * min(one, two):
        return Assumption("scalar", _SAME_PEAK.format(peak=format_bytes(max(one, two))), where)
    most, least = format_bytes(max(one, two)), format_bytes(min(one, two))
    return Assumption("branch", _DIFFER.format(most=most, least=least), where)


_ENDS = "a value decides a branch: the other way {how}"
_SAME_PEAK = "a value decides a branch: the peak is the same either way ({peak})"
_END = "a value that is read DECIDES SIZES: taken {end}, the step takes {most}, {other} {less}"
_NO_SMALLEST = "a value that is read is taken {end}, and what shrinks as it grows IS NOT BOUNDED: {other}, {how}"
_UNTRIED = "a value that is read is taken {end}: what shrinks as it grows IS NOT BOUNDED"
_ROUNDS = "; it is decided {times} times in a step, which are all taken to go the same way"
_DIFFER = "a value DECIDES A BRANCH: one way the step takes {most}, the other way {least}; what takes more is shown"


def _is_of_branch(assumption: Assumption) -> bool:
    return assumption.kind == "branch" or "decided a branch" in assumption.text


def most_at_once(trace: Trace) -> int:
    """Return the most bytes of a trace's storages that are there at once, as they are requested."""
    counted = trace.counted
    changes = [(one.born, one.bytes) for one in counted]
    changes += [(one.died, -one.bytes) for one in counted if one.died is not None]
    level = most = 0
    for _, size in sorted(changes):
        level += size
        most = max(most, level)
    return most
