"""Encoding of a trace as sections in JSON with a row for each op or storage, and checks of their consistency."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from memplan._json import MOST_BYTES, Unreadable, row_of

_HEAD = ("origin", "device", "torch", "steps", "end", "notes", "other_kernels", "calls", "assumptions")
_OPTIONAL = (
    "counters", "engines", "measured", "expected", "lines", "passes", "collected", "optimized", "ungraded", "loaders",
    "host", "groups", "alike",
)  # fmt: skip
"""Sections that are omitted when empty."""


def sections_of(trace: Any) -> dict[str, Any]:
    """Return the sections of a saved Trace: name -> value, with a row for each op or storage.

    A row lists the values of a record's fields. Those of ops and storages omit the first, the index, which is the row's
    number; those of layers omit the last, which is in the section "made". A view that an op reads is a list that begins
    with the name of the argument.
    """
    return {
        **{name: getattr(trace, name) for name in _HEAD},
        **{name: value for name in _OPTIONAL if (value := getattr(trace, name))},
        "ops": [row_of(op)[1:] for op in trace.ops],
        "storages": [row_of(storage)[1:] for storage in trace.storages],
        "layers": [row_of(layer)[:-1] for layer in trace.layers],
        "forms": [
            [form.op, [[name, *row_of(view)] for name, view in form.reads], form.writes, form.options]
            for form in trace.forms
        ],
        "returned": trace.returned,
        "made": [layer.made for layer in trace.layers],
    }


def fields_of(data: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a Trace from its sections: the inverse of `sections_of`.

    Raises:
        KeyError, TypeError, ValueError: ``data`` has no sections of a trace.
    """
    created_at = data.pop("made", ())  # files of earlier versions lack it
    return data | {
        "ops": [[index, *row] for index, row in enumerate(data["ops"])],
        "storages": [[index, *row] for index, row in enumerate(data["storages"])],
        "layers": [[*row, where] for row, where in itertools.zip_longest(data["layers"], created_at)],
        "forms": [
            [op, [[name, view] for name, *view in reads], writes, options]
            for op, reads, writes, options in data.get("forms", ())
        ],
    }


def check(trace: Any) -> None:
    """Raise Unreadable for an inconsistent Trace: an index out of range, a storage freed before its allocation, two
    events at the same tick."""
    ops, storages, end = len(trace.ops), len(trace.storages), trace.end
    _within("steps", trace.steps, end + 1)
    _within("steps of ops", (op.step for op in trace.ops), len(trace.steps))
    for op in trace.ops:
        if "." not in op.name or not op.start <= op.end <= end:
            raise Unreadable(f"has op {op.index}, {op.name!r:.40}, over the ticks {op.start} to {op.end}")
        _within(f"storages of op {op.index}", (*(read.storage for read in op.reads), *op.writes), storages)
        _within(f"gradient_of op {op.index}", () if op.gradient_of is None else (op.gradient_of,), ops)
    events = [call.tick for call in trace.calls]
    _within("ticks of calls", events, end + 1)
    for storage in trace.storages:
        died = end + 1 if storage.died is None else storage.died
        if not storage.born < died <= end + 1 or (storage.low or 0) > storage.bytes:
            raise Unreadable(
                f"has storage {storage.id}, which lives from {storage.born} to {storage.died} and takes "
                f"{storage.low} to {storage.bytes} bytes"
            )
        allocating_op = () if storage.op is None else (storage.op,)
        _within(f"ops of storage {storage.id}", (*allocating_op, *(sharer.op for sharer in storage.sharers)), ops)
        events += (storage.born,) if storage.died is None else (storage.born, storage.died)
    if sum(storage.bytes for storage in trace.storages) > MOST_BYTES:
        raise Unreadable(f"has storages of more than {MOST_BYTES} bytes, more than can be counted")
    if 0 in events or len(set(events)) < len(events):
        raise Unreadable("has two events that share a tick, or one at 0")
    for layer in trace.layers:
        _within(f"storages of layer {layer.name!r:.40}", (*layer.weights, *layer.buffers), storages)
    _within("storages of engines", (engines.storage for engines in trace.engines), storages)
    _within("measured storages", trace.measured, storages)
    _within("storages of expected workspaces", (size.storage for size in trace.expected), storages)
    if not all(0 <= size.low <= trace.storages[size.storage].bytes <= size.high for size in trace.expected):
        raise Unreadable("has an expected workspace outside of its band")
    if not all(engines.plans for engines in trace.engines):
        raise Unreadable("has a workspace without the name of its engine")
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
    _within(
        "ticks of loaders",
        (
            tick
            for use in trace.loaders
            for tick in (use.start, use.end or 0, *use.exhausted, *(tick for load in use.loads for tick in load))
        ),
        end + 1,
    )
    _within("storages on the host", (entry.storage for entry in trace.host), storages)
    _within("storages of data sets", (storage for use in trace.loaders for storage in use.tensors), storages)
    _within("optimized storages", (*trace.optimized, *trace.ungraded), storages)
    _within("ops of forms", (form.op for form in trace.forms), ops)
    views = (view for form in trace.forms for view in (*(view for _, view in form.reads), *form.writes))
    for view in itertools.chain(views, *(returned.tensors for returned in trace.returned)):
        if view.storage >= storages or len(view.shape) != len(view.strides):
            sizes, strides = len(view.shape), len(view.strides)
            raise Unreadable(f"has a view with {sizes} sizes, {strides} strides, storage {view.storage}")


def _within(what: str, numbers: Iterable[int], end: int) -> None:
    """Raise Unreadable for a number that is not below ``end``; ``what`` names the numbers."""
    for number in numbers:
        if number >= end:
            raise Unreadable(f"has {number} among the {what}, which is not below {end}")
