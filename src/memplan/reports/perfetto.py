"""Write a step as a Chrome trace for Perfetto: ops nested in layers and phases, and counters of memory.

A tick is shown as a microsecond: the time axis is an order, not durations.

Source of the format: "Trace Event Format", the events B, E, C and M.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from memplan.explanation.model import LABELS, Explanation
from memplan.explanation.over_time import memory_timeline_of
from memplan.trace.records import Op
from memplan.trace.trace import Trace, at_least

_PID, _TID = 1, 1
_EVERY = 1 << 62
"""A limit of moments that no step reaches."""


def dumps(trace: Trace, explanation: Explanation, settings: str | None = None) -> str:
    """Return a step as Chrome trace JSON for ui.perfetto.dev; the same text for the same step. ``settings`` are those
    of the caching allocator that was simulated.

    Example:
        >>> json.loads(dumps(trace, explanation))["traceEvents"][0]["ph"]
        'M'
    """
    events = [*_metadata(explanation), *_slices(trace), *_counters(trace, explanation, settings)]
    rows = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    return f'{{"displayTimeUnit":"ns","traceEvents":[\n{rows}\n]}}\n'


def _metadata(explanation: Explanation) -> Iterator[dict[str, Any]]:
    """Yield the events that name the process, after the step, and its only thread."""
    title = f"{explanation.title} on {explanation.device} (1 us is one allocation or free)"
    yield _event("M", tick=0, name="process_name") | {"args": {"name": title}}
    yield _event("M", tick=0, name="thread_name") | {"args": {"name": "ops"}}


def _slices(trace: Trace) -> Iterator[dict[str, Any]]:
    """Yield begin and end events of steps, and nested in them those of phases, layers and ops."""
    open_slices: list[str] = []
    for op in trace.ops:
        path = _path(op)
        shared_depth = 0
        while shared_depth < min(len(path), len(open_slices)) and path[shared_depth] == open_slices[shared_depth]:
            shared_depth += 1
        yield from (_event("E", op.start, name) for name in reversed(open_slices[shared_depth:]))
        yield from (_event("B", op.start, name) for name in path[shared_depth:])
        open_slices = path
        args = {"layer": op.layer, "at": op.where or "", "op": op.name}
        yield _event("B", op.start, op.name.removeprefix("aten.")) | {"args": args}
        yield _event("E", op.end, op.name.removeprefix("aten."))
    yield from (_event("E", trace.end, name) for name in reversed(open_slices))


_DEEPEST = 32
"""Depth of nested modules; deeper modules share a slice, since a slice has the whole path as its name."""


def _path(op: Op) -> list[str]:
    """Return the names of the slices around an op: step, phase, and the modules down to its layer."""
    step = "build" if op.step < 0 else f"step {op.step + 1}"
    phases = [] if op.step < 0 else [op.phase]
    parts = op.layer.split(".", _DEEPEST) if op.layer else []
    return [step, *phases, *(".".join(parts[: depth + 1]) for depth in range(len(parts)))]


def _counters(trace: Trace, explanation: Explanation, settings: str | None) -> Iterator[dict[str, Any]]:
    """Yield the bytes by category wherever they change, and the reserved bytes."""
    timeline = memory_timeline_of(at_least(trace), explanation.timeline, settings, moments=_EVERY)
    last: dict[str, int] = {}
    for moment, tick in enumerate(timeline.ticks):
        causes = {LABELS[cause]: column[moment] for cause, column in timeline.causes.items()}
        if causes != last:
            yield _event("C", tick, "memory by cause, bytes") | {"args": causes}
            last = causes
        if timeline.reserved != timeline.allocated:
            yield _event("C", tick, "reserved, bytes") | {"args": {"reserved": timeline.reserved[moment]}}


def _event(kind: str, tick: int, name: str) -> dict[str, Any]:
    """Return an event of the trace format; ``kind`` is its letter: B begins and E ends a slice, C is a counter, M names
    a thread."""
    return {"ph": kind, "ts": tick, "pid": _PID, "tid": _TID, "name": name}
