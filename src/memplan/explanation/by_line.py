"""What was followed line by line, and bytes over time -> memory line by line."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from memplan.explanation.line_profile import LineProfile, LineRow
from memplan.simulation.timeline import Timeline
from memplan.trace.records import FunctionLines, LineSpan
from memplan.trace.trace import Trace


def line_profiles(trace: Trace, timeline: Timeline) -> tuple[LineProfile, ...]:
    """Return the functions of a step that were followed, line by line.

    Args:
        trace: the step.
        timeline: of it; on a card bytes are those of the allocator's blocks, as everywhere.
    """
    if not trace.lines:
        return ()
    levels = [(tick, allocated) for tick, allocated, _ in timeline.events]
    lives = [(one.born, one.died) for one in trace.counted]
    return profiles_of(trace.lines, levels, lives, device=trace.device, origin=trace.origin)


def profiles_of(
    functions: Iterable[FunctionLines],
    levels: Sequence[tuple[int, int]],
    lives: Iterable[tuple[int, int | None]],
    *,
    device: str,
    origin: str,
) -> tuple[LineProfile, ...]:
    """Return functions line by line.

    Args:
        functions: with the ticks between which their lines ran.
        levels: (tick, bytes allocated from then on), in order; at most one storage is born at a tick.
        lives: ticks at which storages are born and die, None where they outlive the run.
        device: that the bytes are on.
        origin: of the Trace that they come from.
    """
    memory = _Memory(levels, lives)
    profiles: list[LineProfile] = []
    for function in functions:
        rows = {number: LineRow(number, 0, 0, 0, 0, 0, text) for number, text in function.source}
        for span in function.spans:
            only_begun = span.cut and span.start == span.end  # the next step's first line, on which the last one ends
            if span.line in rows and not only_begun:
                rows[span.line] = memory.with_span(rows[span.line], span)
        profiles.append(LineProfile(function.name, function.file, device, origin, tuple(rows.values())))
    return tuple(profiles)


class _Memory:
    """Bytes over time, asked for spans of it."""

    def __init__(self, levels: Sequence[tuple[int, int]], lives: Iterable[tuple[int, int | None]]) -> None:
        self._ticks = [tick for tick, _ in levels]
        self._levels = [level for _, level in levels]
        died = dict(lives)
        before = [0, *self._levels[:-1]]
        self._births = [
            (level - old, died[tick]) if tick in died else (0, None)
            for (tick, level), old in zip(levels, before, strict=True)
        ]
        """By the place of an event: what is born with it in bytes, and when that dies."""

    def with_span(self, row: LineRow, span: LineSpan) -> LineRow:
        """Return a row with one more run of its line."""
        first, last = bisect_right(self._ticks, span.start), bisect_right(self._ticks, span.end)
        before = self._levels[first - 1] if first else 0
        held = self._levels[last - 1] if last else 0
        peak = max(self._levels[first:last], default=before)
        added = sum(size for size, died in self._births[first:last] if died is None or died > span.end)
        freed = before + added - held
        return LineRow(
            row.line, row.hits + span.hits, max(row.held, held), max(row.added, added), max(row.freed, freed),
            max(row.peak, before, peak), row.source,
        )  # fmt: skip
