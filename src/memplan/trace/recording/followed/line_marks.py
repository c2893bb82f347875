"""The clock of lines in a real run: marks in the profiler's record, which later say between which events they lie."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from memplan import _torch
from memplan.trace.records import FunctionLines, LineSpan

_LINE = "line"


class LineClock:
    """Counts from 0, and marks each of its ticks in the profiler's record."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self) -> int:
        """Return the next tick."""
        tick = self._next
        self._next += 1
        with _torch.marker(f"{_LINE}{tick}"):
            pass
        return tick


def on_events(
    functions: Iterable[FunctionLines], profile: _torch.Profile, tick: Callable[[int], int]
) -> tuple[FunctionLines, ...]:
    """Return lines on another clock, which is told the time of a mark in ns; runs that are alike there are one."""
    moved: list[FunctionLines] = []
    for one in functions:
        spans: dict[LineSpan, int] = {}
        for span in one.spans:
            start, end = (tick(profile.ranges[f"{_LINE}{mark}"][0]) for mark in (span.start, span.end))
            there = replace(span, start=start, end=end, hits=0)
            spans[there] = spans.get(there, 0) + span.hits
        moved.append(replace(one, spans=tuple(replace(span, hits=hits) for span, hits in spans.items())))
    return tuple(moved)
