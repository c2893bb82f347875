"""Check: frozen weights stored in float32, of which a step reads only copies in half precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memplan._bytes import format_bytes
from memplan.checks.finding import Finding, Severity, Subject
from memplan.checks.mended.savings import matters, readers_of, rows_of, saving
from memplan.trace.records import Op, Storage
from memplan.trace.trace import Trace

ID = "frozen-float32"
TITLE = "Frozen weights are stored in float32 and only read in half precision"

_CAST = "aten._to_copy.default"
_INTO_BUFFER = "aten._foreach_copy_.default"
"""As FSDP packs the shards that it gathers."""
_HALF = ("bfloat16", "float16")


def find(subject: Subject) -> list[Finding]:
    """Return at most one finding, about all frozen weights that each step casts to half precision."""
    trace = subject.trace
    casts = _casts_of_frozen(trace)
    changed: dict[int, Storage | None] = {}
    for number, ops in casts.items():
        weight, copies = trace.storages[number], [trace.storages[op.writes[0]] for op in ops if op.name == _CAST]
        changed[number] = replace(weight, bytes=weight.bytes // 2, dtype=_dtype(trace, ops))
        changed.update((copy.id, None) for copy in copies)
    size = saving(trace, changed)
    if not matters(trace, size):
        return []
    weights = [trace.storages[number] for number in casts]
    rows = rows_of(trace, weights, {number: ops[0].index for number, ops in casts.items()})
    stored = sum(weight.bytes for weight in weights)
    dtype = _dtype(trace, next(iter(casts.values())))
    message = (
        f"{len(casts)} frozen weights are stored in float32 ({format_bytes(stored)}), and a step reads only copies of "
        f"them in {dtype}: stored as these, they take {format_bytes(size)} less at the peak"
    )
    advice = (
        f"Make or load the frozen modules in {dtype} (from_pretrained(..., dtype=torch.{dtype})), and keep those that "
        "train in float32: nothing is cast then, and the products are the same. Converted after loading, "
        "both forms are there for a moment",
    )
    # in inference nothing trains, but the recorded step may be the evaluation of a training run
    severity: Severity = "warning" if trace.passes else "info"
    details = {"weights": len(casts), "stored": stored, "dtype": dtype, "layers": rows}
    return [Finding(ID, severity, rows[0]["layer"], rows[0]["where"], size, message, advice, details)]


def _casts_of_frozen(trace: Trace) -> dict[int, list[Op]]:
    """Map each frozen weight in float32 to the ops of the steps that cast it to half precision. Weights that anything
    else reads or writes are left out."""
    readers = readers_of(  # an op reads what it changes in place
        op for op in trace.ops if op.step >= 0 and not op.name.startswith("aten.view.")
    )
    differentiated = {op.gradient_of for op in trace.ops}
    return {
        storage.id: readers[storage.id]
        for storage in trace.counted
        if storage.cause == "weight" and storage.dtype == "float32" and storage.id not in trace.optimized
        and storage.id in readers
        and all(_is_cast(trace, op) and op.index not in differentiated for op in readers[storage.id])
    }  # fmt: skip


def _is_cast(trace: Trace, op: Op) -> bool:
    """Return whether an op makes a copy in half precision, or writes it into a buffer."""
    if op.name == _INTO_BUFFER:
        return _dtype(trace, [op]) in _HALF
    result = trace.storages[op.writes[0]] if op.name == _CAST and op.writes else None
    return result is not None and result.dtype in _HALF and result.op == op.index


def _dtype(trace: Trace, casts: Sequence[Op]) -> str:
    """Return the dtype that the first of the casts writes."""
    (op, *_) = casts
    number = op.writes[0] if op.name == _CAST else next(read.storage for read in op.reads if read.name == "self")
    return trace.storages[number].dtype
