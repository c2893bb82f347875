"""Check: in-place activations whose input autograd clones first, so that they save nothing."""

from __future__ import annotations

from memplan.checks.finding import Finding, Subject
from memplan.checks.mended.savings import rows_of
from memplan.trace.trace import Trace

ID = "in-place-clone"
TITLE = "An activation in place clones its input first"

_CLONING = ("silu_", "hardswish_", "hardtanh_", "relu6_", "mish_", "gelu_", "softplus_", "log_sigmoid_")
"""In-place ops whose gradient formulas read the input, which the op overwrites (derivatives.yaml)."""


def find(subject: Subject) -> list[Finding]:
    """Return at most one finding, about all in-place activations of a step whose input autograd clones."""
    trace = subject.trace
    clones = [storage for storage in trace.counted if storage.op is not None and _is_clone(trace, storage.op)]
    if not clones:
        return []
    rows = rows_of(trace, clones)
    names = sorted({trace.ops[(storage.op or 0) + 1].name.split(".")[1] for storage in clones})
    message = (
        f"{', '.join(names)} in place: the gradient needs the input, so autograd clones it first, and nothing is saved "
        "here"
    )
    advice = (
        "Leave inplace=True out, or take an activation that reads its result: ReLU, LeakyReLU and ELU do in place",
    )
    layer, where = (rows[0]["layer"], rows[0]["where"]) if rows else ("", None)
    return [
        Finding(ID, "info", layer=layer, where=where, bytes=0, message=message, advice=advice, details={"layers": rows})
    ]


def _is_clone(trace: Trace, index: int) -> bool:
    """Return whether the op with this index is autograd's clone for the in-place op that follows it in its layer."""
    op = trace.ops[index]
    if op.phase != "forward" or not op.name.startswith("aten.clone") or index + 1 >= len(trace.ops):
        return False
    following = trace.ops[index + 1]
    if following.name.split(".")[1] not in _CLONING or following.layer != op.layer or not following.needs_grad:
        return False
    cloned = {operand.storage for operand in op.reads}
    return any(operand.storage in cloned for operand in following.reads)
