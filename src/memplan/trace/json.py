"""A trace as JSON text, and back. Reading trusts nothing: a file can come from a stranger."""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from memplan.errors import TraceFormatError
from memplan.trace.model import (
    CALLS,
    CAUSES,
    PHASES,
    SCHEMA,
    Assumption,
    Call,
    Form,
    Layer,
    Op,
    Operand,
    Returned,
    Sharer,
    Storage,
    Trace,
    View,
)

FORMAT = "memplan.trace"


def dumps(trace: Trace) -> str:
    """The trace as JSON, one op or storage a line, the same text for the same trace."""
    head = {
        "format": FORMAT,
        "schema": trace.schema,
        "origin": trace.origin,
        "device": trace.device,
        "torch": trace.torch,
        "steps": trace.steps,
        "end": trace.end,
        "notes": trace.notes,
        "other_kernels": trace.other_kernels,
        "calls": [[c.tick, c.kind] for c in trace.calls],
        "assumptions": [[a.kind, a.text, a.where, a.count] for a in trace.assumptions],
    }
    ops = [
        [
            o.name, o.phase, o.step, o.layer, o.where, o.start, o.end, [[r.name, r.storage] for r in o.reads],
            o.writes, o.needs_grad, o.gradient_of, o.recomputed,
        ]
        for o in trace.ops
    ]  # fmt: skip
    storages = [
        [
            s.bytes, s.cause, s.born, s.died, s.op, s.dtype, s.shape, s.device, s.name,
            [[r.op, r.role, r.read_as] for r in s.sharers], s.low, s.stream, s.used_on,
        ]
        for s in trace.storages
    ]  # fmt: skip
    layers = [[n.name, n.kind, n.weights, n.buffers] for n in trace.layers]
    made = [n.made for n in trace.layers]
    forms = [[f.op, [[n, *_view_row(v)] for n, v in f.reads], [_view_row(v) for v in f.writes], f.options]
             for f in trace.forms]  # fmt: skip
    returned = [[r.layer, r.after, [_view_row(v) for v in r.tensors]] for r in trace.returned]
    text = json.dumps(head, separators=(",", ":"))[:-1]
    sections = {"ops": ops, "storages": storages, "layers": layers, "forms": forms, "returned": returned,
                "made": made}  # fmt: skip
    for name, rows in sections.items():
        lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
        text += f',\n"{name}":[\n{lines}\n]'
    return text + "}\n"


def loads(text: str, source: str = "the text") -> Trace:
    """The trace that `dumps` wrote.

    Raises:
        TraceFormatError: not JSON, not a trace, of another schema version, or inconsistent in itself.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceFormatError(
            f"{source} is not JSON ({error})",
            expected="a trace written by memplan",
            do="Record the step again.",
        ) from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise TraceFormatError(
            f"{source} is JSON, but not a trace",
            expected=f'"format": "{FORMAT}"',
            do="Record the step again.",
        )
    if data.get("schema") != SCHEMA:
        raise TraceFormatError(
            f"{source} has trace schema version {data.get('schema')!r}",
            expected=f"version {SCHEMA}",
            do="Record the step again with this memplan, or read the file with the memplan that wrote it.",
        )
    try:
        trace = _read(data)
        _check(trace)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise TraceFormatError(
            f"{source} is damaged ({type(error).__name__}: {error})",
            expected=f"a complete trace of schema version {SCHEMA}",
            do="Record the step again.",
        ) from None
    return trace


def save_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write the trace to a file; one that is there already is replaced only when the new one is complete."""
    write_whole(path, dumps(trace))


def load_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a trace from a file that `save_trace` wrote. Raises TraceFormatError, OSError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise TraceFormatError(
            f"{path} is not a text file", expected="a trace written by memplan", do="Record the step again."
        ) from None
    return loads(text, str(path))


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file, text as UTF-8, in one move, so that a failed run never leaves half of one."""
    target = Path(path)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)  # mkstemp makes files that only the owner reads
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def _read(data: dict[str, Any]) -> Trace:
    ops = tuple(
        Op(
            i, name, phase, step, layer, where, start, end, tuple(Operand(n, s) for n, s in reads),
            tuple(writes), tuple(needs), gradient_of, recomputed,
        )
        for i, (
            name, phase, step, layer, where, start, end, reads, writes, needs, gradient_of, recomputed,
        ) in enumerate(data["ops"])
    )  # fmt: skip
    storages = tuple(
        Storage(
            i, size, cause, born, died, op, dtype, tuple(shape), device, name,
            tuple(Sharer(*row) for row in sharers), low, stream, tuple(used_on),
        )
        for i, (
            size, cause, born, died, op, dtype, shape, device, name, sharers, low, stream, used_on,
        ) in enumerate(data["storages"])
    )  # fmt: skip
    return Trace(
        data["origin"],
        data["device"],
        data["torch"],
        ops,
        storages,
        tuple(
            Layer(name, kind, tuple(w), tuple(b), made)
            for (name, kind, w, b), made in itertools.zip_longest(data["layers"], data.get("made", ()))
        ),
        tuple(data["steps"]),
        data["end"],
        tuple(Assumption(*row) for row in data["assumptions"]),
        tuple(data["notes"]),
        tuple(Call(*row) for row in data["calls"]),
        tuple(data["other_kernels"]),
        data["schema"],
        tuple(
            Form(op, tuple((name, _view(*row)) for name, *row in reads), tuple(_view(*row) for row in writes),
                 tuple((name, _option(value)) for name, value in options))
            for op, reads, writes, options in data.get("forms", ())
        ),
        tuple(
            Returned(layer, after, tuple(_view(*row) for row in tensors))
            for layer, after, tensors in data.get("returned", ())
        ),
    )  # fmt: skip


def _view_row(view: View) -> list[Any]:
    return [view.storage, view.shape, view.strides, view.offset]


def _view(storage: int, shape: list[int], strides: list[int], offset: int) -> View:
    for number in (storage, offset, *shape, *strides):
        if not isinstance(number, int) or isinstance(number, bool):
            raise ValueError(f"found {number!r} where a whole number was expected")
    if len(shape) != len(strides):
        raise ValueError(f"a view has {len(shape)} sizes and {len(strides)} strides")
    return View(storage, tuple(shape), tuple(strides), offset)


def _option(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_option(item) for item in value)
    if value is not None and not isinstance(value, (int, float, str)):
        raise TypeError(f"found {value!r} where a number, a text or a list of such was expected")
    return value


def _check(trace: Trace) -> None:
    """Every reference points at something, every life has a beginning before its end."""
    for number in (trace.end, *trace.steps):
        if not isinstance(number, int) or not 0 <= number <= trace.end:
            raise ValueError(f"tick {number!r} outside of the trace")
    for text in (trace.origin, trace.device, trace.torch, *trace.notes, *trace.other_kernels):
        _text(text)
    for layer in trace.layers:
        _text(layer.name)
        _text(layer.kind)
        _text(layer.made or "")
    for assumption in trace.assumptions:
        _text(assumption.text)
    for op in trace.ops:
        for text in (op.name, op.layer, op.where or "", *op.needs_grad, *(read.name for read in op.reads)):
            _text(text)
        if op.name.count(".") < 1:
            raise ValueError(f"op {op.index} is called {op.name!r}")
        if op.phase not in PHASES or not 0 <= op.start <= op.end <= trace.end:
            raise ValueError(f"op {op.index} has phase {op.phase!r}, ticks {op.start!r} to {op.end!r}")
        for storage in (*(r.storage for r in op.reads), *op.writes):
            trace.storages[_index(storage)]
        if op.gradient_of is not None:
            trace.ops[_index(op.gradient_of)]
    ticks: set[int] = set()
    for storage in trace.storages:
        for text in (storage.dtype, storage.device, storage.name, *(s.role + s.read_as for s in storage.sharers)):
            _text(text)
        for size in storage.shape:
            _index(size)
        died = trace.end + 1 if storage.died is None else storage.died
        if storage.cause not in CAUSES or _index(storage.bytes) < 0 or not 0 < storage.born < died <= trace.end + 1:
            raise ValueError(f"storage {storage.id} lives from {storage.born!r} to {storage.died!r}")
        for op in (storage.op, *(s.op for s in storage.sharers)):
            if op is not None:
                trace.ops[_index(op)]
        ticks.add(storage.born)
        ticks.update(() if storage.died is None else (died,))
        if storage.low is not None and not 0 <= _index(storage.low) <= storage.bytes:
            raise ValueError(f"storage {storage.id} takes from {storage.low!r} to {storage.bytes} bytes")
        for stream in (storage.stream, *storage.used_on):
            _index(stream)
    for call in trace.calls:
        if call.kind not in CALLS or not 0 < _index(call.tick) <= trace.end:
            raise ValueError(f"a call {call.kind!r} at tick {call.tick!r}")
        ticks.add(call.tick)
    for form in trace.forms:
        trace.ops[_index(form.op)]
        for text in (name for name, _ in (*form.reads, *form.options)):
            _text(text)
    for returned in trace.returned:
        _text(returned.layer)
        _index(returned.after)
    if len(ticks) != sum(1 if s.died is None else 2 for s in trace.storages) + len(trace.calls):
        raise ValueError("two events share a tick")
    for layer in trace.layers:
        for storage in (*layer.weights, *layer.buffers):
            trace.storages[_index(storage)]


def _text(value: object) -> None:
    if not isinstance(value, str):
        raise TypeError(f"found {value!r} where a text was expected")


def _index(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"found {value!r} where a number of 0 or more was expected")
    return value
