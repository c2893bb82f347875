"""The clock of followed lines in a real run: marks in the profiler's record, later mapped to allocator events."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from memplan import _torch
from memplan.trace.records import FunctionLines, LineSpan

_LINE = "line"


class LineClock:
    """Counts from 0 and marks each tick in the profiler's record."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self) -> int:
        """Return the next tick, and mark it in the running profiler's record, for `time_of`."""
        tick = self._next
        self._next += 1
        with _torch.marker(f"{_LINE}{tick}"):
            pass
        return tick


def time_of(profile: _torch.Profile, tick: int) -> int:
    """Return the time of a tick of `LineClock`, in ns."""
    return profile.ranges[f"{_LINE}{tick}"][0]


def on_events(functions: Iterable[FunctionLines], tick: Callable[[int], int]) -> tuple[FunctionLines, ...]:
    """Convert spans to another clock by ``tick``, merging spans that become equal."""
    converted: list[FunctionLines] = []
    for function in functions:
        spans: dict[LineSpan, int] = {}
        for span in function.spans:
            key = replace(span, start=tick(span.start), end=tick(span.end), hits=0)
            spans[key] = spans.get(key, 0) + span.hits
        converted.append(replace(function, spans=tuple(replace(span, hits=hits) for span, hits in spans.items())))
    return tuple(converted)
