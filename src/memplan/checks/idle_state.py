"""Check: gradients set to zero instead of freed, models that no step uses, optimizer states that no step updates."""

from __future__ import annotations

from dataclasses import replace

from memplan._bytes import format_bytes
from memplan.checks.finding import Finding, Subject
from memplan.checks.mended.savings import matters, saving
from memplan.checks.op_names import base_name
from memplan.trace.records import Op, Storage
from memplan.trace.trace import Trace

ID = "idle-state"
TITLE = "Gradients are zeroed instead of freed, or models and states are held that no step uses"

_ZEROING = ("zero", "_foreach_zero")


def find(subject: Subject) -> list[Finding]:
    """Return a finding for gradients that are zeroed in place, and one for models and optimizer states without use."""
    return [*_zeroed_gradients(subject.trace), *_unused(subject.trace)]


def _zeroed_gradients(trace: Trace) -> list[Finding]:
    """Return a finding for gradients that are set to zero in place, with the bytes that freeing them would save."""
    zeroing_op: dict[int, int] = {}  # gradient -> index of the first op that zeroes it
    for op in trace.ops:
        if _is_zeroing(op):
            for number in op.writes:
                if trace.storages[number].cause == "parameter_gradient":
                    zeroing_op.setdefault(number, op.index)
    if not zeroing_op:
        return []
    changed: dict[int, Storage | None] = {}  # as `saving` takes it
    added: list[Storage] = []
    for number in zeroing_op:
        changed[number], *others = _freed_instead_of_zeroed(trace, trace.storages[number])
        added += others
    size = saving(trace, changed, added)
    gradient_bytes = sum(trace.storages[number].bytes for number in zeroing_op)
    if not matters(trace, size):
        return []
    op = trace.ops[min(zeroing_op.values())]
    message = (
        f"gradients are set to zero instead of freed: {format_bytes(gradient_bytes)} live through the whole forward "
        f"pass, {format_bytes(size)} of it at the peak"
    )
    advice = ("Leave set_to_none=False out: zero_grad() frees them; in backward the first write makes them anew",)
    details = {"kind": "zeroed gradients", "held": gradient_bytes}
    return [
        Finding(ID, "warning", layer="", where=op.where, bytes=size, message=message, advice=advice, details=details)
    ]


def _is_zeroing(op: Op) -> bool:
    return op.phase != "backward" and base_name(op.name) in _ZEROING


def _freed_instead_of_zeroed(trace: Trace, gradient: Storage) -> list[Storage]:
    """Return the storages that a gradient would have if zeroing freed it and its next use allocated it.

    Each lives from its allocation to the last use before the next zeroing.
    """
    allocations: list[Storage] = []
    born: int | None = gradient.born  # None while it is freed
    last_use = gradient.born
    for op in trace.ops:
        if gradient.id not in op.writes and all(operand.storage != gradient.id for operand in op.reads):
            continue
        if _is_zeroing(op):
            if born is not None:
                allocations.append(replace(gradient, born=born, died=max(last_use, born + 1)))
            born = None
            continue
        if born is None:
            born = op.start + 1
        last_use = op.end
    if born is not None:
        allocations.append(replace(gradient, born=born))
    return allocations or [replace(gradient, died=gradient.born + 1)]


def _unused(trace: Trace) -> list[Finding]:
    """Return a finding for storages from before the first step that no step reads or writes.

    They are the weights and gradients of unused models, and optimizer states: of unused models, or of parameters that
    no longer get a gradient.
    """
    used: set[int] = set()
    for op in trace.ops:
        if op.step >= 0:  # ops before the first step have -1
            used.update((*(operand.storage for operand in op.reads), *op.writes))
    models = _unused_models(trace, used)
    weights = {number for numbers in models.values() for number in numbers}
    prefixes = tuple(f"{model}." for model in models)
    bytes_by_cause = {"weight": 0, "parameter_gradient": 0, "optimizer_state": 0}
    idle: dict[int, Storage | None] = {}  # storage -> None: left out of the trace (see `saving`)
    for storage in trace.counted:
        cause = "weight" if storage.id in weights else storage.cause
        if storage.id in used or storage.died is not None or cause not in bytes_by_cause:
            continue
        if cause == "optimizer_state" or storage.id in weights or storage.name.startswith(prefixes):
            idle[storage.id] = None
            bytes_by_cause[cause] += storage.bytes
    size = saving(trace, idle)
    if not matters(trace, size):
        return []
    states = sum(trace.storages[number].cause == "optimizer_state" for number in idle)
    details = {"kind": "untouched state", "states": states, "models": list(models)}
    if models:
        parts = " + ".join(
            f"{format_bytes(size_of_cause)} of {name}"
            for size_of_cause, name in zip(
                bytes_by_cause.values(), ("weights", "gradients", "optimizer state"), strict=True
            )
            if size_of_cause
        )
        message = f"models that no step uses hold {format_bytes(size)}: {parts} ({', '.join(models)})"
        advice = (
            "Delete such a model and its optimizer before the step, or run each in a process of its own: "
            "torch.cuda.reset_peak_memory_stats() frees nothing",
        )
        details["kind"] = "unused models"
    else:
        message = (
            f"the optimizer holds {format_bytes(size)} of state that no step updates: its parameters get no gradient"
        )
        advice = (
            "Give the optimizer only parameters that require a gradient, or delete the state of those that were frozen "
            "since: optimizer.state.pop(parameter)",
        )
    return [Finding(ID, "warning", layer="", where=None, bytes=size, message=message, advice=advice, details=details)]


def _unused_models(trace: Trace, used: set[int]) -> dict[str, set[int]]:
    """Map each model none of whose weights and buffers a step uses to the storages of these.

    A model is a root module, which is named after its class: ``Net``, and ``Net#2`` for another of the same class.
    ``used`` are the storages that steps read or write.
    """
    roots = [layer.name for layer in trace.layers if layer.name.partition("#")[0] == layer.kind]
    owned: dict[str, set[int]] = {root: set() for root in roots}
    for layer in trace.layers:
        root = layer.name.partition(".")[0]
        if root in owned:
            owned[root].update(layer.weights, layer.buffers)
    return {root: numbers for root, numbers in owned.items() if numbers and not numbers & used}
