"""What the steps of a subject do with `DistributedDataParallel`, for the checks that look at it."""

from __future__ import annotations

from memplan import _torch
from memplan.checks.finding import Subject
from memplan.trace.recording.place import format_frame, user_frame
from memplan.trace.trace import Trace


def observed(subject: Subject) -> list[_torch.DataParallelUse]:
    """Record the step again and return how it uses each `DistributedDataParallel`. [] without such a module. A step
    whose backward passes reduce nothing across ranks is not recorded again."""
    recorder = subject.recorder
    all_reduces = any(op.phase == "backward" and "allreduce" in op.name for op in subject.trace.ops)
    if recorder is None or not subject.trace.groups or not all_reduces:
        return []
    with _torch.data_parallel_observed(lambda: format_frame(user_frame())) as uses:
        trace = recorder.record()
    return uses if isinstance(trace, Trace) else []
