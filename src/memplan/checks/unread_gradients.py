"""Check: gradients that no update reads: of parameters without an optimizer, or still allocated after their update."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from memplan._bytes import format_bytes
from memplan.checks.finding import Finding, Subject
from memplan.checks.mended.changed_step import Change, module_at
from memplan.checks.mended.savings import matters, peak_of, readers_of, saving, writers_of_whole_gradients
from memplan.trace.records import Op, Storage
from memplan.trace.trace import Trace

ID = "unread-gradients"
TITLE = "Gradients are held that no update reads"


def find(subject: Subject) -> list[Finding]:
    """Return a finding for gradients of parameters that no optimizer updates, and one for gradients that stay allocated
    after the update that read them."""
    trace = subject.trace
    reduced = writers_of_whole_gradients(trace.ops)  # whose shards the optimizer reads
    gradients = [s for s in trace.counted if s.cause == "parameter_gradient" and s.id not in reduced]
    if not trace.optimized or not gradients:
        return []
    readers = readers_of(op for op in trace.ops if op.phase == "optimizer")
    optimized = {trace.storages[number].name for number in trace.optimized}
    updated = {number for op in trace.ops if op.phase == "optimizer" for number in op.writes}
    weights = {s.name: s.id for s in trace.storages if s.cause == "weight"}
    not_optimized = [
        s for s in gradients
        if s.name in weights and s.name not in optimized and weights[s.name] not in updated and s.id not in readers
    ]  # fmt: skip
    return [
        *_not_optimized(subject, not_optimized),
        *_alive_after_update(trace, [s for s in gradients if s.name in optimized], readers),
    ]


def _not_optimized(subject: Subject, gradients: list[Storage]) -> list[Finding]:
    """Return a finding for parameters that require a gradient and belong to no optimizer."""
    trace = subject.trace
    names = sorted({storage.name for storage in gradients})
    if not names:
        return []
    size = saving(trace, {storage.id: None for storage in gradients})
    if subject.recorder is not None:
        mended = subject.recorder.record(_frozen(names))
        size = peak_of(trace) - peak_of(mended) if isinstance(mended, Trace) else size
    if not matters(trace, size):
        return []
    gradient_bytes = sum({storage.name: storage.bytes for storage in gradients}.values())
    message = (
        f"{len(names)} parameters require a gradient and no optimizer has them: their gradients "
        f"({format_bytes(gradient_bytes)}) and what is kept for these take {format_bytes(size)} at the peak, and "
        "nothing reads them"
    )
    advice = ("Call requires_grad_(False) on what is not trained, or give it to the optimizer",)
    return [_finding(names, size, message, advice, "not in an optimizer", gradient_bytes)]


def _frozen(names: Iterable[str]) -> Change:
    """Return a change that sets ``requires_grad`` of these parameters to False."""

    def change(modules: dict[str, nn.Module]) -> None:
        for name in names:
            path, _, attribute = name.rpartition(".")
            getattr(module_at(modules, path), attribute).requires_grad_(False)

    return change


def _alive_after_update(trace: Trace, gradients: Sequence[Storage], readers: Mapping[int, list[Op]]) -> list[Finding]:
    """Return a finding for gradients that an update has read and that stay allocated after it. ``gradients`` are those
    of optimized parameters; ``readers`` are the optimizers' ops that read each storage."""
    names_read = {storage.name for storage in gradients if storage.id in readers}
    update_end = _update_ends(trace)
    changed: dict[int, Storage | None] = {}
    for storage in gradients:
        ends = [update_end[op.index] for op in readers.get(storage.id, ())]
        if ends and (storage.died is None or storage.died > max(ends) + 1):
            changed[storage.id] = replace(storage, died=max(ends) + 1)
        elif not ends and storage.name in names_read and storage.died is not None:
            changed[storage.id] = None  # computed by the backward pass of another loss, and freed unread
    size = saving(trace, changed)
    if not matters(trace, size):
        return []
    gradient_bytes = sum(trace.storages[number].bytes for number in changed) // max(1, len(trace.steps))
    last_read = {number: max((op.index for op in readers.get(number, ())), default=-1) for number in changed}
    backward_writes = ((op, number) for op in trace.ops if op.phase == "backward" for number in op.writes)
    accumulated = any(number in last_read and op.index > last_read[number] for op, number in backward_writes)
    message = f"gradients live on when the update that read them is over: {format_bytes(size)} of them at the peak" + (
        ", and a later backward pass adds to them what no update reads" if accumulated else ""
    )
    advice = (
        "Call zero_grad() right after step(), before the next forward pass",
        *(["Call requires_grad_(False) on the modules of the other loss while this one is computed"] * accumulated),
    )
    names = sorted({trace.storages[number].name for number in changed})
    return [_finding(names, size, message, advice, "after the update", gradient_bytes)]


def _update_ends(trace: Trace) -> dict[int, int]:
    """Map the index of each op of an optimizer to the tick at which its update ends: when user code runs again. An
    update is a sequence of ops of the optimizer."""
    ends: dict[int, int] = {}
    for op in reversed(trace.ops):
        if op.phase == "optimizer":
            ends[op.index] = ends.get(op.index + 1, op.end)
    return ends


def _finding(
    names: list[str], size: int, message: str, advice: tuple[str, ...], kind: str, gradient_bytes: int
) -> Finding:
    """Return the finding about the gradients of the parameters with these names, at the module of the first. ``size``
    are the bytes that they cost at the peak, ``gradient_bytes`` those of the gradients."""
    details: dict[str, Any] = {"kind": kind, "held": gradient_bytes, "names": names}
    return Finding(
        ID, "warning", layer=names[0].rpartition(".")[0], where=None, bytes=size, message=message, advice=advice,
        details=details,
    )  # fmt: skip
