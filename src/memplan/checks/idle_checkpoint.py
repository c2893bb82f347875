"""Activation checkpoints that do not lower the peak: the backward pass recomputes everything at once."""

from __future__ import annotations

from memplan._bytes import format_bytes
from memplan.checks.finding import Finding, Severity, Subject
from memplan.checks.mended.changed_step import Remaker
from memplan.checks.mended.checkpoint_free import Blockwise, CheckpointFree
from memplan.checks.mended.savings import matters, peak_of
from memplan.trace.trace import Trace

ID = "idle-checkpoint"
TITLE = "Activation checkpoints do not lower the peak"


def find(subject: Subject) -> list[Finding]:
    """Compare a step that recomputes with the same step without checkpoints, and with one for each block."""
    trace, remaker = subject.trace, subject.remaker
    again = [op for op in trace.ops if op.recomputed]
    if not again or remaker is None:
        return []
    free = CheckpointFree()
    plain = remaker.record(around=free.installed())
    if not isinstance(plain, Trace) or not free.all:
        return []
    spared = peak_of(plain) - peak_of(trace)
    if matters(plain, spared):
        return []
    saved, blocks = _blockwise(remaker, trace)
    steps = len(trace.steps)
    one = free.all <= steps
    message = (
        f"{'the checkpoint of a step runs' if one else f'the {free.all // steps} checkpoints of a step run'} "
        f"{len(again) // steps} ops a second time and {'does' if one else 'do'} not lower its peak: "
        f"{format_bytes(peak_of(trace))} with, {format_bytes(peak_of(plain))} without"
    )
    severity: Severity = "warning" if saved else "info"
    advice = (
        f"Checkpoint each of the {blocks} blocks instead of all in one: {format_bytes(saved)} less at the peak"
        if saved
        else "Leave it out: the step is faster without"
    )
    first = again[0]
    details = {"with": peak_of(trace), "without": peak_of(plain), "blocks": blocks}
    return [Finding(ID, severity, first.layer, first.where, saved, message, (advice,), details)]


def _blockwise(remaker: Remaker, trace: Trace) -> tuple[int, int]:
    """Return how much lower the peak is with a checkpoint for each block, and how many blocks there are; 0 where that
    is no matter."""
    blockwise = Blockwise()
    mended = remaker.record(around=blockwise.installed())
    if not isinstance(mended, Trace) or not blockwise.blocks:
        return 0, 0
    saved = peak_of(trace) - peak_of(mended)
    return (saved, len(blockwise.blocks)) if matters(trace, saved) else (0, len(blockwise.blocks))
