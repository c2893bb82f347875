"""Attribute memory over time to the source lines of profiled functions."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from memplan.explanation.line_profile import LineProfile, LineRow
from memplan.simulation.timeline import Timeline
from memplan.trace.records import FunctionLines, LineSpan
from memplan.trace.trace import Trace


def line_profiles(trace: Trace, timeline: Timeline) -> tuple[LineProfile, ...]:
    """Return the line profiles of the functions that were followed in a step."""
    if not trace.lines:
        return ()
    levels = [(tick, allocated) for tick, allocated, _ in timeline.events]
    lives = [(storage.born, storage.died) for storage in trace.counted]
    return profiles_of(trace.lines, levels, lives, device=trace.device, origin=trace.origin)


def profiles_of(
    functions: Iterable[FunctionLines],
    levels: Sequence[tuple[int, int]],
    lives: Iterable[tuple[int, int | None]],
    *,
    device: str,
    origin: str,
) -> tuple[LineProfile, ...]:
    """Return the line profiles of functions.

    Args:
        levels: (tick, bytes allocated from then on), in order; at most one storage is allocated at a tick.
        lives: the ticks at which storages are allocated and freed, None if they outlive the run.
    """
    memory = _Memory(levels, lives)
    profiles: list[LineProfile] = []
    for function in functions:
        rows = {
            number: LineRow(number, hits=0, held=0, added=0, freed=0, peak=0, source=text)
            for number, text in function.source
        }
        for span in function.spans:
            not_run = span.cut and span.start == span.end  # cut off as it began, on the first line of the next step
            if span.line in rows and not not_run:
                rows[span.line] = memory.with_span(rows[span.line], span)
        profiles.append(LineProfile(function.name, function.file, device, origin, tuple(rows.values())))
    return tuple(profiles)


class _Memory:
    """Allocated bytes over time, with the net change over spans of ticks."""

    def __init__(self, levels: Sequence[tuple[int, int]], lives: Iterable[tuple[int, int | None]]) -> None:
        """``levels``, ``lives``: as for `profiles_of`."""
        self._ticks = [tick for tick, _ in levels]
        """Ticks of all allocations and frees, in order."""
        self._levels = [level for _, level in levels]
        """Allocated bytes after the event at each of these ticks."""
        freed_at = dict(lives)
        previous_levels = [0, *self._levels[:-1]]
        self._allocations = [
            (level - previous, freed_at[tick]) if tick in freed_at else (0, None)
            for (tick, level), previous in zip(levels, previous_levels, strict=True)
        ]
        """For each event: (bytes allocated, tick of their free or None)."""

    def with_span(self, row: LineRow, span: LineSpan) -> LineRow:
        """Return the row with another run of its line."""
        first, last = bisect_right(self._ticks, span.start), bisect_right(self._ticks, span.end)
        before = self._levels[first - 1] if first else 0
        after = self._levels[last - 1] if last else 0
        peak = max(self._levels[first:last], default=before)
        added = sum(size for size, end in self._allocations[first:last] if end is None or end > span.end)
        freed = before + added - after
        return LineRow(
            row.line, row.hits + span.hits, held=max(row.held, after), added=max(row.added, added),
            freed=max(row.freed, freed), peak=max(row.peak, before, peak), source=row.source,
        )  # fmt: skip
