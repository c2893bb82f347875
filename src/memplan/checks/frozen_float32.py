"""Check: frozen weights stored in float32, of which a step reads only copies in half precision."""

from __future__ import annotations

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
        weight = trace.storages[number]
        changed[number] = replace(weight, bytes=weight.bytes // 2, dtype=_dtype(trace, ops[0]))
        changed.update((op.writes[0], None) for op in ops if op.name == _CAST)
    size = saving(trace, changed)
    if not matters(trace, size):
        return []
    weights = [trace.storages[number] for number in casts]
    rows = rows_of(trace, weights, {number: ops[0].index for number, ops in casts.items()})
    stored = sum(weight.bytes for weight in weights)
    dtype = _dtype(trace, next(iter(casts.values()))[0])
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
    """Map the storage of each frozen weight in float32 to the ops of the steps that cast it to half precision. Weights
    that any other op reads or writes are left out."""
    readers = readers_of(  # an op reads what it changes in place
        op for op in trace.ops if op.step >= 0 and not op.name.startswith("aten.view.")
    )
    differentiated = {op.gradient_of for op in trace.ops}  # forward ops with a gradient
    casts: dict[int, list[Op]] = {}
    for storage in trace.counted:
        if storage.cause != "weight" or storage.dtype != "float32" or storage.id in trace.optimized:
            continue
        ops = readers.get(storage.id, [])
        if ops and all(_is_cast(trace, op) and op.index not in differentiated for op in ops):
            casts[storage.id] = ops
    return casts


def _is_cast(trace: Trace, op: Op) -> bool:
    """Return whether an op allocates a copy in half precision, or writes a copy into a buffer."""
    if op.name == _INTO_BUFFER:
        return _dtype(trace, op) in _HALF
    if op.name != _CAST or not op.writes:
        return False
    result = trace.storages[op.writes[0]]
    return result.dtype in _HALF and result.op == op.index


def _dtype(trace: Trace, cast: Op) -> str:
    """Return the dtype that a cast writes."""
    if cast.name == _CAST:
        return trace.storages[cast.writes[0]].dtype
    buffer = next(read.storage for read in cast.reads if read.name == "self")
    return trace.storages[buffer].dtype
