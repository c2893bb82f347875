"""A step with branches that values decide, recorded both ways: what it takes at most."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from textwrap import shorten

from memplan._bytes import format_bytes
from memplan.errors import RecordingError
from memplan.trace.recording.place import Line, format_frame
from memplan.trace.records import Assumption
from memplan.trace.trace import Trace

Again = Callable[[frozenset[Line]], tuple[Trace | RecordingError | None, Sequence[Line]]]
"""Records the step once more, with these branches taken the other way; what comes of it, and its branches."""

_MOST = 4
"""Branches at most that are recorded both ways, and as many that only another way shows; of others it is said that
they were not."""
_SAME = 1.01
"""Peaks count as the same up to this factor."""


def with_both_ways(trace: Trace, branches: Sequence[Line], again: Again) -> Trace:
    """Return the trace of the way that takes more, and say of each branch what either way takes.

    Args:
        trace: as recorded.
        branches: lines at which a value decided that the recording does not know, in order.
        again: records the step the other way.
    """
    taken = frozenset[Line]()
    found: dict[str | None, Assumption] = {}
    queue: list[tuple[Line, frozenset[Line] | None, int]] = [(line, None, 0) for line in branches[:_MOST]]
    seen, more = set(branches), _MOST
    while queue:
        line, way, peak = queue.pop(0)
        if way is None:  # a branch of the way that is shown
            way, peak = taken, most_at_once(trace)
        where, (other, below) = format_frame(line), again(way | {line})
        if not isinstance(other, Trace):
            if isinstance(other, RecordingError):
                found[where] = Assumption(
                    "scalar", _ENDS.format(how=shorten(other.found, 120, placeholder=" ...")), where
                )
            continue
        found[where] = _compared(where, peak, most_at_once(other))
        new = [one for one in below if one not in seen][:more]
        seen, more = seen | set(new), more - len(new)
        queue = [(one, way | {line}, most_at_once(other)) for one in new] + queue
        if most_at_once(other) > most_at_once(trace):
            trace, taken = other, way | {line}
    kept = [one for one in trace.assumptions if one.where not in found or not _is_of_branch(one)]
    rows = [*found.values(), *kept]
    return replace(trace, assumptions=tuple(sorted(rows, key=lambda row: row.kind not in ("branch", "bound"))))


def _compared(where: str | None, one: int, two: int) -> Assumption:
    if max(one, two) <= _SAME * min(one, two):
        return Assumption("scalar", _SAME_PEAK.format(peak=format_bytes(max(one, two))), where)
    most, least = format_bytes(max(one, two)), format_bytes(min(one, two))
    return Assumption("branch", _DIFFER.format(most=most, least=least), where)


_ENDS = "a value decides a branch: the other way {how}"
_SAME_PEAK = "a value decides a branch: the peak is the same either way ({peak})"
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
