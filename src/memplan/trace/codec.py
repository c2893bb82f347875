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
    """Return the fields of a Trace from its sections: the inverse of `sections_of`. Raises KeyError, TypeError,
    ValueError if ``data`` has no sections of a trace."""
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
    _check_ops(trace)
    _check_storages(trace)
    _check_events(trace)
    _check_storage_ids(trace)
    _check_workspaces(trace)
    _check_ticks(trace)
    _check_forms(trace)


def _check_ops(trace: Any) -> None:
    """Raise Unreadable if an op refers to ticks, steps, storages or ops that the trace does not have."""
    _within("steps", trace.steps, trace.end + 1)
    _within("steps of ops", (op.step for op in trace.ops), len(trace.steps))
    for op in trace.ops:
        if "." not in op.name or not op.start <= op.end <= trace.end:
            raise Unreadable(f"has op {op.index}, {op.name!r:.40}, over the ticks {op.start} to {op.end}")
        storages = (*(read.storage for read in op.reads), *op.writes)
        _within(f"storages of op {op.index}", storages, len(trace.storages))
        _within(f"gradient_of op {op.index}", () if op.gradient_of is None else (op.gradient_of,), len(trace.ops))


def _check_storages(trace: Any) -> None:
    """Check lifetimes, bytes and ops of the storages."""
    for storage in trace.storages:
        died = trace.end + 1 if storage.died is None else storage.died
        if not storage.born < died <= trace.end + 1 or (storage.low or 0) > storage.bytes:
            raise Unreadable(
                f"has storage {storage.id}, which lives from {storage.born} to {storage.died} and takes "
                f"{storage.low} to {storage.bytes} bytes"
            )
        allocating_op = () if storage.op is None else (storage.op,)
        ops = (*allocating_op, *(sharer.op for sharer in storage.sharers))
        _within(f"ops of storage {storage.id}", ops, len(trace.ops))
    if sum(storage.bytes for storage in trace.storages) > MOST_BYTES:
        raise Unreadable(f"has storages of more than {MOST_BYTES} bytes, more than can be counted")


def _check_events(trace: Any) -> None:
    """Check that calls, allocations and frees have distinct ticks from 1 on."""
    events = [call.tick for call in trace.calls]
    _within("ticks of calls", events, trace.end + 1)
    for storage in trace.storages:
        events += (storage.born,) if storage.died is None else (storage.born, storage.died)
    if 0 in events or len(set(events)) < len(events):
        raise Unreadable("has two events that share a tick, or one at 0")


def _check_storage_ids(trace: Any) -> None:
    """Check that the storages of layers, workspaces, the host and optimizers exist."""
    end = len(trace.storages)
    for layer in trace.layers:
        _within(f"storages of layer {layer.name!r:.40}", (*layer.weights, *layer.buffers), end)
    _within("storages of engines", (engines.storage for engines in trace.engines), end)
    _within("measured storages", trace.measured, end)
    _within("storages of expected workspaces", (size.storage for size in trace.expected), end)
    _within("storages on the host", (entry.storage for entry in trace.host), end)
    _within("storages of data sets", (storage for use in trace.loaders for storage in use.tensors), end)
    _within("optimized storages", (*trace.optimized, *trace.ungraded), end)


def _check_workspaces(trace: Any) -> None:
    """Raise Unreadable if sizes of workspaces contradict each other."""
    if not all(0 <= size.low <= trace.storages[size.storage].bytes <= size.high for size in trace.expected):
        raise Unreadable("has an expected workspace outside of its band")
    if not all(engines.plans for engines in trace.engines):
        raise Unreadable("has a workspace without the name of its engine")


def _check_ticks(trace: Any) -> None:
    """Check that the ticks of lines, backward passes, the collector and loaders are within the trace."""
    end = trace.end + 1
    _within(
        "ticks of lines",
        (tick for lines in trace.lines for span in lines.spans for tick in (span.start, span.end)),
        end,
    )
    _within(
        "ticks of backward passes", (tick for backward in trace.passes for tick in (backward.start, backward.end)), end
    )
    _within("ticks of the collector", trace.collected, end)
    for use in trace.loaders:
        loads = (tick for load in use.loads for tick in load)
        _within("ticks of loaders", (use.start, use.end or 0, *use.exhausted, *loads), end)


def _check_forms(trace: Any) -> None:
    """Check the ops of forms, and the views of forms and of what modules returned."""
    _within("ops of forms", (form.op for form in trace.forms), len(trace.ops))
    views = (view for form in trace.forms for view in (*(view for _, view in form.reads), *form.writes))
    for view in itertools.chain(views, *(returned.tensors for returned in trace.returned)):
        if view.storage >= len(trace.storages) or len(view.shape) != len(view.strides):
            sizes, strides = len(view.shape), len(view.strides)
            raise Unreadable(f"has a view with {sizes} sizes, {strides} strides, storage {view.storage}")


def _within(what: str, numbers: Iterable[int], end: int) -> None:
    """Raise Unreadable for a number that is not below ``end``; ``what`` names the numbers."""
    for number in numbers:
        if number >= end:
            raise Unreadable(f"has {number} among the {what}, which is not below {end}")
