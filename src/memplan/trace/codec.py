"""Writes a trace as JSON text, one op or storage a line, and reads it back with full validation."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, TypeVar, get_type_hints

from memplan._json import MOST_BYTES, Unreadable, compact, from_plain, parse, row_of, shown
from memplan.errors import TraceFormatError
from memplan.trace.records import SCHEMA

FORMAT = "memplan.trace"
_HEAD = (
    "schema", "origin", "device", "torch", "steps", "end", "notes", "other_kernels", "calls", "assumptions",
)  # fmt: skip
_OPTIONAL = ("counters", "engines", "measured", "lines", "passes", "collected", "optimized", "ungraded")
"""Sections that are omitted when empty."""
_Trace = TypeVar("_Trace")


def dumps(trace: Any) -> str:
    """Write a Trace as JSON, one op or storage a line; equal traces give equal texts."""
    sections = {
        "ops": (row_of(op)[1:] for op in trace.ops),
        "storages": (row_of(storage)[1:] for storage in trace.storages),
        "layers": (row_of(layer)[:-1] for layer in trace.layers),
        "forms": (
            [form.op, [[name, *row_of(view)] for name, view in form.reads], form.writes, form.options]
            for form in trace.forms
        ),
        "returned": trace.returned,
        "made": (layer.made for layer in trace.layers),
    }
    head = {"format": FORMAT} | {name: getattr(trace, name) for name in _HEAD}
    text = compact(head | {name: value for name in _OPTIONAL if (value := getattr(trace, name))})[:-1]
    for name, rows in sections.items():
        text += f',\n"{name}":[\n' + ",\n".join(map(compact, rows)) + "\n]"
    return text + "}\n"


def loads(text: str, kind: type[_Trace], source: str) -> _Trace:
    """Read a value of type ``kind`` (a Trace) from the text that `dumps` wrote; ``source`` names it in an error.

    Raises:
        TraceFormatError: not JSON, not a trace, of another schema version, or inconsistent in itself.
    """
    try:
        data = parse(text)
    except Unreadable as error:
        raise TraceFormatError(
            f"{source} cannot be read: {error}", expected="a trace written by memplan", do="Record the step again."
        ) from None
    if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
        raise TraceFormatError(
            f"{source} is JSON, but not a trace",
            expected=f'a trace, which begins with "format": "{FORMAT}"',
            do="Name one: memplan explain TARGET --trace FILE writes it, as memplan.save_trace does",
        )
    if data.get("schema") != SCHEMA:
        raise TraceFormatError(
            f"{source} has trace schema version {shown(data.get('schema'))}",
            expected=f"version {SCHEMA}",
            do="Record the step again with this memplan, or read the file with the memplan that wrote it.",
        )
    try:
        hints = get_type_hints(kind, include_extras=True)
        rows = _complete_rows(data)
        if unknown := rows.keys() - hints.keys():
            raise Unreadable(f"it has an unknown {min(unknown)!r:.40}")
        trace = kind(**{name: from_plain(hints[name], part, name, rows=True) for name, part in rows.items()})
        _check(trace)
    except (KeyError, TypeError, ValueError) as error:
        raise TraceFormatError(
            f"{source} is damaged ({type(error).__name__}: {error})",
            expected=f"a complete trace of schema version {SCHEMA}",
            do="Record the step again.",
        ) from None
    return trace


def _complete_rows(data: dict[str, Any]) -> dict[str, Any]:
    """Return the sections with a value for every field of each record: adds indices, and nests the fields of views."""
    lines = data.pop("made", ())
    return data | {
        "ops": [[index, *row] for index, row in enumerate(data["ops"])],
        "storages": [[index, *row] for index, row in enumerate(data["storages"])],
        "layers": [[*row, where] for row, where in itertools.zip_longest(data["layers"], lines)],
        "forms": [
            [op, [[name, view] for name, *view in reads], writes, options]
            for op, reads, writes, options in data.get("forms", ())
        ],
    }


def _check(trace: Any) -> None:
    """Raise Unreadable for a reference without a target, or a storage that is not allocated before it is freed."""
    ops, storages, end = len(trace.ops), len(trace.storages), trace.end
    _within("steps", trace.steps, end + 1)
    _within("steps of ops", (op.step for op in trace.ops), len(trace.steps))
    for op in trace.ops:
        if "." not in op.name or not op.start <= op.end <= end:
            raise Unreadable(f"op {op.index}, {op.name!r:.40}, spans the ticks {op.start} to {op.end}")
        _within(f"storages of op {op.index}", (*(r.storage for r in op.reads), *op.writes), storages)
        _within(f"gradient_of op {op.index}", () if op.gradient_of is None else (op.gradient_of,), ops)
    events = [call.tick for call in trace.calls]
    _within("ticks of calls", events, end + 1)
    for storage in trace.storages:
        died = end + 1 if storage.died is None else storage.died
        if not storage.born < died <= end + 1 or (storage.low or 0) > storage.bytes:
            raise Unreadable(
                f"storage {storage.id} lives from {storage.born} to {storage.died}, "
                f"and takes {storage.low} to {storage.bytes} bytes"
            )
        makers = () if storage.op is None else (storage.op,)
        _within(f"ops of storage {storage.id}", (*makers, *(s.op for s in storage.sharers)), ops)
        events += (storage.born,) if storage.died is None else (storage.born, storage.died)
    if sum(storage.bytes for storage in trace.storages) > MOST_BYTES:
        raise Unreadable(f"its storages take more than {MOST_BYTES} bytes, more than can be counted")
    if 0 in events or len(set(events)) < len(events):
        raise Unreadable("two events share a tick, or one is at 0")
    for layer in trace.layers:
        _within(f"storages of layer {layer.name!r:.40}", (*layer.weights, *layer.buffers), storages)
    _within("storages of engines", (engines.storage for engines in trace.engines), storages)
    _within("measured storages", trace.measured, storages)
    if not all(engines.plans for engines in trace.engines):
        raise Unreadable("a workspace has engines, and none is named")
    _within(
        "ticks of lines",
        (tick for lines in trace.lines for span in lines.spans for tick in (span.start, span.end)),
        end + 1,
    )
    _within(
        "ticks of backward passes",
        (tick for backward in trace.passes for tick in (backward.start, backward.end)),
        end + 1,
    )
    _within("ticks of the collector", trace.collected, end + 1)
    _within("optimized storages", (*trace.optimized, *trace.ungraded), storages)
    _within("ops of forms", (form.op for form in trace.forms), ops)
    views = (view for form in trace.forms for view in (*(view for _, view in form.reads), *form.writes))
    for view in itertools.chain(views, *(returned.tensors for returned in trace.returned)):
        if view.storage >= storages or len(view.shape) != len(view.strides):
            raise Unreadable(f"a view has {len(view.shape)} sizes, {len(view.strides)} strides, storage {view.storage}")


def _within(what: str, numbers: Iterable[int], end: int) -> None:
    for number in numbers:
        if number >= end:
            raise Unreadable(f"{what}: {number} is not below {end}")
