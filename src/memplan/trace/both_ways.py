"""A step with branches that values decide, recorded both ways: what it takes at most."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from textwrap import shorten

from memplan._bytes import format_bytes
from memplan.errors import RecordingError
from memplan.trace.recording.place import format_frame
from memplan.trace.recording.values.largest import Choice, Site
from memplan.trace.records import Assumption
from memplan.trace.trace import Trace

Way = frozenset[Choice]
Again = Callable[[Way], tuple[Trace | RecordingError | None, Sequence[Choice], Collection[Choice]]]
"""Records the step once more, with these choices taken the other way; what comes of it, its choices, and which of those
taken the other way it reached."""

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
    # a program that makes fewer steps another way is not the same but for that, and wins only by what is told
    straight, taken = most_at_once(trace), Way()
    found: dict[Choice, tuple[int, Assumption | None]] = {}
    first = [one for sites in (False, True) for one in [x for x in choices if isinstance(x, Site) == sites][:_MOST]]
    queue: list[tuple[Choice, Way | None, int]] = [(one, None, 0) for one in first]
    seen, more = dict.fromkeys(choices), _MOST
    while queue:
        choice, way, peak = queue.pop(0)
        if way is None:  # a choice of the first way: beside those already taken the other way, then alone
            queue = [(choice, Way(), straight), *queue] if taken else queue
            way, peak = taken, most_at_once(trace)
        other, below, reached = again(way | {choice})
        weight = max(peak, most_at_once(other)) if isinstance(other, Trace) and choice in reached else 0
        if choice not in found or weight >= found[choice][0]:
            found[choice] = weight, _of_choice(choice, peak, other, trace, reached=choice in reached)
        if not isinstance(other, Trace):
            continue
        new = [one for one in below if one not in seen][:more]
        seen, more = seen | dict.fromkeys(below), more - len(new)
        queue = [(one, way | {choice}, most_at_once(other)) for one in new] + queue
        if most_at_once(other) > most_at_once(trace) * (_SAME if len(other.steps) < len(trace.steps) else 1):
            trace, taken = other, way | {choice}
    said = {choice: row for choice, (_, row) in found.items() if row is not None or isinstance(choice, Site)}
    left = {one: _not_tried(one) for one in seen if one not in said}
    rows = dict.fromkeys(row for row in (said | left).values() if row is not None)
    places = {format_frame(one) for one in seen if not isinstance(one, Site)}
    kept = [one for one in trace.assumptions if one.where not in places or not _is_of_branch(one)]
    return replace(
        trace, assumptions=tuple(sorted((*rows, *kept), key=lambda row: row.kind not in ("branch", "bound")))
    )


def _of_choice(
    choice: Choice, peak: int, other: Trace | RecordingError | None, shown: Trace, *, reached: bool
) -> Assumption | None:
    """Return what has to be said of a choice, recorded the other way; None where there is nothing."""
    if isinstance(other, Trace) and not reached:
        return _not_tried(choice)
    if isinstance(choice, Site):
        return _of_ends(choice, peak, other)
    row = _of_branch(format_frame(choice), peak, other)
    return None if row is None else _with_rounds(row, shown)


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


def _not_tried(choice: Choice) -> Assumption:
    if isinstance(choice, Site):
        return Assumption("bound", _UNTRIED.format(end=choice.ends[0]), format_frame(choice.line))
    return Assumption("branch", _ONE_WAY, format_frame(choice))


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
_ONE_WAY = "a value DECIDES A BRANCH, which was recorded one way only: what the other way takes IS NOT BOUNDED"
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
