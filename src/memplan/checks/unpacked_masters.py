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
    return [
        Finding(
            ID, "info", layer="", where=None, bytes=size, message=message, advice=advice,
            details={"weights": len(masters), "stored": stored},
        )
    ]  # fmt: skip


def _masters(trace: Trace) -> list[int]:
    """Return the float32 storages of optimizers that are copied into bfloat16 weights of models. No other op changes
    these weights in a step: so each weight is its master weight, rounded."""
    in_layers = {number for layer in trace.layers for number in layer.weights}
    masters = list[int]()
    for number, sources in _sources_of_weights(trace, in_layers).items():
        weight, (source, *others) = trace.storages[number], sources
        if source is None or others or source in in_layers:
            continue
        master = trace.storages[source]
        stays = master.cause in ("weight", "optimizer_state") and master.died is None
        if stays and (weight.dtype, master.dtype, master.shape) == ("bfloat16", "float32", weight.shape):
            masters.append(source)
    return masters


def _sources_of_weights(trace: Trace, weights: set[int]) -> dict[int, set[int | None]]:
    """Map each of these storages that steps write to, in place, to the storages that are copied into it. A cast to
    bfloat16 before the copy is passed over. None stands for another op than a copy."""
    sources: dict[int, set[int | None]] = {}
    cast_from: dict[int, int] = {}  # result of a cast to bfloat16 -> its operand
    for op in trace.ops:
        if op.step < 0:
            continue
        if op.name == _CAST and op.reads and op.writes and trace.storages[op.writes[0]].dtype == "bfloat16":
            cast_from[op.writes[0]] = op.reads[0].storage
        if op.name.partition(".")[2].partition(".")[0].endswith("_"):  # in place: views are results in a weight, too
            copied = dict(_copies(op))
            for number in weights.intersection((*op.writes, *copied)):
                source = copied.get(number)
                sources.setdefault(number, set()).add(None if source is None else cast_from.get(source, source))
    return sources


def _copies(op: Op) -> Iterator[tuple[int, int]]:
    """Yield each storage that an op copies another into, and that other storage; none if the op is no copy."""
    if base_name(op.name) in ("copy", "_foreach_copy"):
        targets, sources = _operands(op, "self"), _operands(op, "src")
        if len(targets) == len(sources):
            yield from zip(targets, sources, strict=True)


def _operands(op: Op, argument: str) -> list[int]:
    """Return the storages of an argument, a tensor or a list of them."""
    return [operand.storage for operand in op.reads if operand.name == argument]


def _summed_shapes(trace: Trace) -> set[tuple[int, ...]]:
    """Return the shapes of the float32 gradients of master weights that sum bfloat16 gradients of several backward
    passes. Their sum in bfloat16 would not be the same."""
    shapes = set[tuple[int, ...]]()
    for op in trace.ops:
        if op.step < 0 or base_name(op.name) not in ("add", "_foreach_add"):
            continue
        for sum_number, added in zip(_operands(op, "self"), _operands(op, "other"), strict=False):  # or adds a number
            gradient = trace.storages[sum_number]
            # a gradient without a name is that of another tensor than a model's parameter
            of_master = gradient.cause == "parameter_gradient" and not gradient.name and gradient.dtype == "float32"
            by_optimizer = trace.storages[added].cause in ("weight", "optimizer_state")
            if of_master and not by_optimizer:
                shapes.add(gradient.shape)
    return shapes
