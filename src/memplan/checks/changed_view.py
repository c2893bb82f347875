"""Check: an in-place op on a view that a module wrapped by `fully_shard` returned, which drops the module's hook."""

from __future__ import annotations

from memplan import _torch
from memplan.checks.finding import Finding, Subject
from memplan.trace.records import Op
from memplan.trace.trace import Trace

ID = "changed-view"
TITLE = "A view that a sharded module returned is changed in place: its backward pass finds no weights"


def find(subject: Subject) -> list[Finding]:
    """Return at most one finding, about modules whose returned views are changed in place, if their weights are freed
    after the forward pass (reshard_after_forward)."""
    recorder = subject.recorder
    if recorder is None or not any(op.name.startswith("fsdp.") for op in subject.trace.ops):
        return []
    with _torch.sharded_views_observed() as views:
        trace = recorder.record()
    modules = {view.modules[0] for view in views if view.is_changed and view.modules}
    if not isinstance(trace, Trace) or not modules:
        return []
    op = _changing_op(subject.trace)
    kinds = sorted({type(module).__name__.removeprefix("FSDP") for module in modules})
    message = (
        f"{len(modules)} modules wrapped by fully_shard ({', '.join(kinds)}) return a view that an op changes in "
        "place: autograd then drops the hook that gathers their weights for the backward pass, which fails "
        "(setStorage: ... out of bounds for storage of size 0) or gives wrong gradients"
    )
    advice = "Write y = y + x instead of y += x, or let the module return y.clone()"
    details = {"modules": len(modules), "classes": kinds}
    layer, where = ("", None) if op is None else (op.layer, op.where)
    return [
        Finding(ID, "warning", layer=layer, where=where, bytes=0, message=message, advice=(advice,), details=details)
    ]


def _changing_op(trace: Trace) -> Op | None:
    """Return the first in-place op of a forward pass on a tensor that a submodule of the op's module computed."""
    roots = {"", *(layer.kind for layer in trace.layers)}  # a root is named by its class
    for op in trace.ops:
        if op.phase != "forward" or not op.name.split(".")[1].endswith("_"):
            continue
        for number in op.writes:
            creator = trace.storages[number].op
            inner = "" if creator is None else trace.ops[creator].layer
            if inner not in roots and (op.layer in roots or inner.startswith(f"{op.layer}.")):
                return op
    return None
