"""Check: parameters of an optimizer that the step uses and that never get a gradient."""

from __future__ import annotations

from memplan._bytes import format_bytes
from memplan.checks.finding import Finding, Subject
from memplan.checks.mended.checkpoint_free import CheckpointFree
from memplan.checks.mended.savings import peak_of
from memplan.trace.records import Op
from memplan.trace.trace import Trace

ID = "untrained-parameters"
TITLE = "Parameters of an optimizer never get a gradient"


def find(subject: Subject) -> list[Finding]:
    """Return at most one finding: parameters that the forward pass reads and no backward pass gives a gradient."""
    trace = subject.trace
    ungraded = set(trace.ungraded)  # parameters of optimizers that never get a gradient
    readers: dict[int, Op] = {}  # such a parameter -> the first op with a gradient that reads it
    for op in trace.ops:
        if op.phase == "forward":
            for operand in op.reads:
                if operand.storage in ungraded and operand.name in op.needs_grad:
                    readers.setdefault(operand.storage, op)
    if not readers or not trace.passes:
        return []
    size = sum(trace.storages[number].bytes for number in readers)
    first = min(readers.values(), key=lambda op: op.index)
    message = (
        f"of the optimizer's {len(trace.optimized)} parameters, {len(readers)} ({format_bytes(size)}) get no gradient "
        "though the step uses them: they are not trained"
    )
    cause, advice = _cause(subject)
    names = sorted(name for number in readers if (name := trace.storages[number].name))
    details = {"parameters": len(readers), "size": size, "names": names, "of": len(trace.optimized)}
    return [
        Finding(
            ID, "warning", layer=first.layer, where=first.where, bytes=0, message=message + cause, advice=advice,
            details=details,
        )
    ]  # fmt: skip


def _cause(subject: Subject) -> tuple[str, tuple[str, ...]]:
    """Return the end of the message and the advice. If a recording without checkpoints has more gradients, they are
    about reentrant checkpoints, which cut gradients off. Else the end of the message is "", and the advice general."""
    unknown = ("Look for no_grad, detach or item between them and the loss; or take them out of the optimizer",)
    if subject.recorder is None:
        return "", unknown
    checkpoints = CheckpointFree()
    without = subject.recorder.record(around=checkpoints.installed())  # checkpoints
    if not isinstance(without, Trace) or not checkpoints.reentrant:
        return "", unknown
    if len(without.ungraded) >= len(subject.trace.ungraded):  # parameters without a gradient
        return "", unknown
    saved = peak_of(without) - peak_of(subject.trace)
    remark = f", and the {format_bytes(saved)} less at the peak are no win" if saved > 0 else ""
    return (
        f"; a reentrant checkpoint whose inputs need no gradient cuts it off{remark}",
        ("Call checkpoint(..., use_reentrant=False), or give it an input that requires a gradient",),
    )
