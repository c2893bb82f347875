"""Gradients that are kept as zeros, and states of an optimizer that nothing updates."""

from __future__ import annotations

from dataclasses import replace

from memplan._bytes import format_bytes
from memplan.checks.finding import Finding, Subject
from memplan.checks.mended.savings import matters, saving
from memplan.checks.op_names import base_name
from memplan.trace.records import Storage
from memplan.trace.trace import Trace

ID = "idle-state"
TITLE = "Gradients are zeroed instead of freed, or states are held that nothing updates"

_ZEROING = ("zero", "_foreach_zero", "zeros_like", "fill")


def find(subject: Subject) -> list[Finding]:
    """Find gradients that are zeroed in place between steps, and optimizer states that no step touches."""
    return [*_zeroed(subject.trace), *_untouched(subject.trace)]


def _zeroed(trace: Trace) -> list[Finding]:
    zeroed: dict[int, int] = {}
    for op in trace.ops:
        if op.phase != "backward" and base_name(op.name) in _ZEROING[:2]:
            for number in op.writes:
                if trace.storages[number].cause == "parameter_gradient":
                    zeroed.setdefault(number, op.index)
    if not zeroed:
        return []
    changed: dict[int, Storage | None] = {}
    added: list[Storage] = []
    for number in zeroed:
        parts = _freed_between(trace, trace.storages[number])
        changed[number], added = parts[0], [*added, *parts[1:]]
    size = saving(trace, changed, added)
    held = sum(trace.storages[number].bytes for number in zeroed)
    if not matters(trace, size):
        return []
    op = trace.ops[min(zeroed.values())]
    message = (
        f"gradients are set to zero instead of freed: {format_bytes(held)} live through the whole forward pass, "
        f"{format_bytes(size)} of it at the peak"
    )
    advice = ("Leave set_to_none=False out: zero_grad() frees them; in backward the first write makes them anew",)
    return [Finding(ID, "warning", "", op.where, size, message, advice, {"kind": "zeroed gradients", "held": held})]


def _freed_between(trace: Trace, storage: Storage) -> list[Storage]:
    """Return the lives of a gradient that is freed where it was zeroed, and born again where backward writes it."""
    lives: list[Storage] = []
    born: int | None = storage.born
    last = storage.born
    for op in trace.ops:
        if storage.id not in op.writes and all(operand.storage != storage.id for operand in op.reads):
            continue
        if op.phase != "backward" and base_name(op.name) in _ZEROING[:2]:
            if born is not None:
                lives.append(replace(storage, born=born, died=max(last, born + 1)))
            born = None
            continue
        if born is None:
            born = op.start + 1
        last = op.end
    if born is not None:
        lives.append(replace(storage, born=born))
    return lives or [replace(storage, died=storage.born + 1)]


def _untouched(trace: Trace) -> list[Finding]:
    """Find states that no op of any step reads or writes: of parameters that get no gradient any more."""
    touched: set[int] = set()
    for op in trace.ops:
        if op.step >= 0:
            touched.update((*(operand.storage for operand in op.reads), *op.writes))
    idle = [s for s in trace.counted if s.cause == "optimizer_state" and s.id not in touched and s.died is None]
    size = saving(trace, {storage.id: None for storage in idle})
    if not matters(trace, size):
        return []
    message = f"the optimizer holds {format_bytes(size)} of state that no step updates: its parameters get no gradient"
    advice = (
        "Give the optimizer only parameters that require a gradient, or delete the state of those that were frozen "
        "since: optimizer.state.pop(parameter)",
    )
    return [Finding(ID, "warning", "", None, size, message, advice, {"kind": "untouched state", "states": len(idle)})]
