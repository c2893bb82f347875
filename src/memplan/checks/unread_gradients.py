"""Gradients that no update reads: of parameters that no optimizer has, or of a module whose update is over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from memplan._bytes import format_bytes
from memplan.checks.finding import Finding, Subject
from memplan.checks.mended.changed_step import Change, module_at
from memplan.checks.mended.savings import matters, peak_of, saving
from memplan.trace.records import Op, Storage
from memplan.trace.trace import Trace

ID = "unread-gradients"
TITLE = "Gradients are held that no update reads"


def find(subject: Subject) -> list[Finding]:
    """Find gradients of parameters that nothing updates, and those that live on after the update that read them."""
    trace = subject.trace
    gradients = [s for s in trace.counted if s.cause == "parameter_gradient"]
    if not trace.optimized or not gradients:
        return []
    readers = _updates_of(trace, gradients)
    optimized = {trace.storages[number].name for number in trace.optimized}
    written = {number for op in trace.ops if op.phase == "optimizer" for number in op.writes}
    named = {s.name: s for s in trace.storages if s.cause == "weight"}
    left_out = [
        s for s in gradients
        if s.name in named and s.name not in optimized and named[s.name].id not in written and not readers.get(s.id)
    ]  # fmt: skip
    return [*_left_out(subject, left_out), *_held(trace, [s for s in gradients if s.name in optimized], readers)]


def _updates_of(trace: Trace, gradients: Iterable[Storage]) -> Mapping[int, list[Op]]:
    """Map each gradient to the ops of optimizers that read it."""
    ours = {storage.id for storage in gradients}
    found: dict[int, list[Op]] = {}
    for op in trace.ops:
        if op.phase == "optimizer":
            for number in {operand.storage for operand in op.reads} & ours:
                found.setdefault(number, []).append(op)
    return found


def _left_out(subject: Subject, gradients: list[Storage]) -> list[Finding]:
    """Report parameters that require a gradient and that no optimizer has."""
    trace = subject.trace
    names = sorted({storage.name for storage in gradients})
    if not names:
        return []
    size = saving(trace, {storage.id: None for storage in gradients})
    if subject.remaker is not None:
        mended = subject.remaker.record(_frozen(names))
        size = peak_of(trace) - peak_of(mended) if isinstance(mended, Trace) else size
    if not matters(trace, size):
        return []
    held = sum(named.bytes for named in {storage.name: storage for storage in gradients}.values())
    message = (
        f"{len(names)} parameters require a gradient and no optimizer has them: their gradients ({format_bytes(held)}) "
        f"and what is kept for these take {format_bytes(size)} at the peak, and nothing reads them"
    )
    advice = ("Call requires_grad_(False) on what is not trained, or give it to the optimizer",)
    return [_finding(names, size, message, advice, "not in an optimizer", held)]


def _frozen(names: Iterable[str]) -> Change:
    """Return a change after which parameters need no gradient."""

    def change(modules: dict[str, nn.Module]) -> None:
        for name in names:
            path, _, own = name.rpartition(".")
            getattr(module_at(modules, path), own).requires_grad_(False)

    return change


def _held(trace: Trace, gradients: Iterable[Storage], readers: Mapping[int, list[Op]]) -> list[Finding]:
    """Report gradients that an update has read, and that are there while others are made."""
    updated = {trace.storages[number].name for number in readers}
    over = _ends_of_updates(trace)
    changed: dict[int, Storage | None] = {}
    for storage in gradients:
        ends = [over[op.index] for op in readers.get(storage.id, ())]
        if ends and (storage.died is None or storage.died > max(ends) + 1):
            changed[storage.id] = replace(storage, died=max(ends) + 1)
        elif not ends and storage.name in updated and storage.died is not None:
            changed[storage.id] = None  # made by the backward pass of another loss, and freed unread
    size = saving(trace, changed)
    if not matters(trace, size):
        return []
    held = sum(trace.storages[number].bytes for number in changed) // max(1, len(trace.steps))
    again = _written_later(trace, changed, readers)
    message = f"gradients live on when the update that read them is over: {format_bytes(size)} of them at the peak" + (
        ", and a later backward pass adds to them what no update reads" if again else ""
    )
    advice = (
        "Call zero_grad() right after step(), before the next forward pass",
        *(["Call requires_grad_(False) on the modules of the other loss while this one is computed"] * again),
    )
    names = sorted({trace.storages[number].name for number in changed})
    return [_finding(names, size, message, advice, "after the update", held)]


def _ends_of_updates(trace: Trace) -> dict[int, int]:
    """Map each op of an optimizer to the tick at which its update is over: what the user frees, goes after that."""
    found: dict[int, int] = {}
    end: int | None = None
    for op in reversed(trace.ops):
        end = None if op.phase != "optimizer" else op.end if end is None else end
        if end is not None:
            found[op.index] = end
    return found


def _written_later(trace: Trace, changed: Mapping[int, Storage | None], readers: Mapping[int, list[Op]]) -> bool:
    last = {number: max((op.index for op in readers.get(number, ())), default=-1) for number in changed}
    return any(
        op.phase == "backward" and any(number in last and op.index > last[number] for number in op.writes)
        for op in trace.ops
    )


def _finding(names: list[str], size: int, message: str, advice: tuple[str, ...], kind: str, held: int) -> Finding:
    details: dict[str, Any] = {"kind": kind, "held": held, "names": names}
    return Finding(ID, "warning", names[0].rpartition(".")[0], None, size, message, advice, details)
