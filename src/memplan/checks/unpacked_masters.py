"""Check: float32 master weights that are stored whole beside the bfloat16 weights, which are their high halves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from memplan._bytes import format_bytes
from memplan.checks.finding import Finding, Subject
from memplan.checks.mended.savings import matters, saving
from memplan.checks.op_names import base_name
from memplan.trace.records import Op
from memplan.trace.trace import Trace

ID = "unpacked-masters"
TITLE = "Float32 master weights are stored whole beside bfloat16 weights"

_CAST = "aten._to_copy.default"


def find(subject: Subject) -> list[Finding]:
    """Return at most one finding, about all master weights of a step."""
    trace = subject.trace
    summed = _summed_shapes(trace)
    masters = [trace.storages[number] for number in _masters(trace) if trace.storages[number].shape not in summed]
    size = saving(trace, {master.id: replace(master, bytes=master.bytes // 2) for master in masters})
    if not matters(trace, size):
        return []
    stored = sum(master.bytes for master in masters)
    message = (
        f"{len(masters)} master weights are stored in float32 ({format_bytes(stored)}) beside the bfloat16 weights, "
        f"which are their high halves: stored as low halves, 2 bytes a parameter, they take {format_bytes(size)} less"
    )
    advice = (
        "Give the bfloat16 parameters to memplan.PackedMasters(model.parameters(), torch.optim.AdamW, lr=...), or with "
        "another optimizer of torch.optim that works element by element: weights and states are the same bit for bit "
        "if gradients are cast to float32 for each update alone, and gradients in float32 are not stored either",
    )
    return [Finding(ID, "info", "", None, size, message, advice, {"weights": len(masters), "stored": stored})]


def _masters(trace: Trace) -> list[int]:
    """Return the float32 storages of optimizers that are copied into bfloat16 weights of models, which nothing else
    changes in a step: so each weight is its master weight, rounded."""
    in_layers = {number for layer in trace.layers for number in layer.weights}
    sources: dict[int, set[int | None]] = {}
    casts: dict[int, int] = {}
    for op in trace.ops:
        if op.step < 0:
            continue
        if op.name == _CAST and op.reads and op.writes and trace.storages[op.writes[0]].dtype == "bfloat16":
            casts[op.writes[0]] = op.reads[0].storage
        if not _overload_packet(op).endswith("_"):  # views of a weight are results in its storage
            continue
        copied = dict(_copies(op))
        for number in in_layers.intersection((*op.writes, *copied)):
            source = copied.get(number)
            sources.setdefault(number, set()).add(None if source is None else casts.get(source, source))
    result = list[int]()
    for number, copied_from in sources.items():
        weight, (source, *others) = trace.storages[number], copied_from
        if source is None or others or source in in_layers:
            continue
        master = trace.storages[source]
        held = master.cause in ("weight", "optimizer_state") and master.died is None
        if held and (weight.dtype, master.dtype, master.shape) == ("bfloat16", "float32", weight.shape):
            result.append(source)
    return result


def _copies(op: Op) -> Iterator[tuple[int, int]]:
    """Yield (storage written, storage copied into it) of an op that copies."""
    if base_name(op.name) in ("copy", "_foreach_copy"):
        written, read = ([operand.storage for operand in op.reads if operand.name == name] for name in ("self", "src"))
        if len(written) == len(read):
            yield from zip(written, read, strict=True)


def _overload_packet(op: Op) -> str:
    """Return the name of an op without namespace and overload."""
    return op.name.partition(".")[2].partition(".")[0] or op.name


def _summed_shapes(trace: Trace) -> set[tuple[int, ...]]:
    """Return the shapes of float32 gradients of other tensors than the models' parameters to which something is added:
    the bfloat16 gradients of several backward passes, of which the sum in bfloat16 would not be the same."""
    shapes = set[tuple[int, ...]]()
    for op in trace.ops:
        if op.step < 0 or base_name(op.name) not in ("add", "_foreach_add"):
            continue
        sums, added = ([trace.storages[each.storage] for each in op.reads if each.name == n] for n in ("self", "other"))
        for gradient, other in zip(sums, added, strict=False):  # a number may be added instead
            mine = gradient.cause == "parameter_gradient" and not gradient.name and gradient.dtype == "float32"
            if mine and other.cause not in ("weight", "optimizer_state"):  # added by optimizers
                shapes.add(gradient.shape)
    return shapes
