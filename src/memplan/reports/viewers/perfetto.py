"""A step as Chrome trace JSON, which ui.perfetto.dev and chrome://tracing open: ops within layers within phases, and
memory as counters. A tick of the trace is shown as a microsecond: time on the axis is order, not duration.

Source of the format: "Trace Event Format", the events B, E, C and M.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from memplan.explanation.model import LABELS, Explanation
from memplan.explanation.over_time import course_of
from memplan.trace.records import Op
from memplan.trace.trace import Trace, at_least

_PID, _TID = 1, 1
_EVERY = 1 << 62


def dumps(trace: Trace, explanation: Explanation, settings: str | None = None) -> str:
    """Return a step as Chrome trace JSON; the same text for the same step.

    Args:
        trace: the step.
        explanation: of it.
        settings: of the caching allocator, as they were simulated.

    Example:
        >>> json.loads(dumps(trace, explanation))["traceEvents"][0]["ph"]
        'M'
    """
    events = [*_names(explanation), *_nested(trace), *_counters(trace, explanation, settings)]
    rows = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    return f'{{"displayTimeUnit":"ns","traceEvents":[\n{rows}\n]}}\n'


def _names(explanation: Explanation) -> Iterator[dict[str, Any]]:
    title = f"{explanation.title} on {explanation.device} (1 us is one allocation or free)"
    yield _event("M", 0, "process_name") | {"args": {"name": title}}
    yield _event("M", 0, "thread_name") | {"args": {"name": "ops"}}


def _nested(trace: Trace) -> Iterator[dict[str, Any]]:
    """Yield begins and ends of steps, phases, layers and ops, each within the one before it in this list."""
    opened: list[str] = []
    for op in trace.ops:
        path = _path(op)
        same = 0
        while same < min(len(path), len(opened)) and path[same] == opened[same]:
            same += 1
        yield from (_event("E", op.start, name) for name in reversed(opened[same:]))
        yield from (_event("B", op.start, name) for name in path[same:])
        opened = path
        args = {"layer": op.layer, "at": op.where or "", "op": op.name}
        yield _event("B", op.start, op.name.removeprefix("aten.")) | {"args": args}
        yield _event("E", op.end, op.name.removeprefix("aten."))
    yield from (_event("E", trace.end, name) for name in reversed(opened))


_DEEPEST = 32
"""Modules within each other; deeper ones stay together, since each is named by its whole path."""


def _path(op: Op) -> list[str]:
    """Return what an op lies within: its step, its phase, and the modules on the way to its layer."""
    step = "build" if op.step < 0 else f"step {op.step + 1}"
    phases = [] if op.step < 0 else [op.phase]
    parts = op.layer.split(".", _DEEPEST) if op.layer else []
    return [step, *phases, *(".".join(parts[: depth + 1]) for depth in range(len(parts)))]


def _counters(trace: Trace, explanation: Explanation, settings: str | None) -> Iterator[dict[str, Any]]:
    course = course_of(at_least(trace), explanation.timeline, settings, moments=_EVERY)
    last: dict[str, int] = {}
    for place, tick in enumerate(course.ticks):
        causes = {LABELS[cause]: column[place] for cause, column in course.causes.items()}
        if causes != last:
            yield _event("C", tick, "memory by cause, bytes") | {"args": causes}
            last = causes
        if course.reserved != course.allocated:
            yield _event("C", tick, "reserved, bytes") | {"args": {"reserved": course.reserved[place]}}


def _event(kind: str, tick: int, name: str) -> dict[str, Any]:
    return {"ph": kind, "ts": tick, "pid": _PID, "tid": _TID, "name": name}
