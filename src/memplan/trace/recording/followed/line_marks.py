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


def time_of(profile: _torch.Profile, tick: int) -> int:
    """Return when a `LineClock` ticked, in ns."""
    return profile.ranges[f"{_LINE}{tick}"][0]


def on_events(functions: Iterable[FunctionLines], tick: Callable[[int], int]) -> tuple[FunctionLines, ...]:
    """Return lines on another clock, by its tick for each of theirs; runs that are alike there are one."""
    moved: list[FunctionLines] = []
    for one in functions:
        spans: dict[LineSpan, int] = {}
        for span in one.spans:
            there = replace(span, start=tick(span.start), end=tick(span.end), hits=0)
            spans[there] = spans.get(there, 0) + span.hits
        moved.append(replace(one, spans=tuple(replace(span, hits=hits) for span, hits in spans.items())))
    return tuple(moved)
