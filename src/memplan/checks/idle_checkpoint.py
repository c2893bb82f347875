"""Check: activation checkpoints that do not lower the peak, since backward recomputes everything at once."""

from __future__ import annotations

from memplan._bytes import format_bytes
from memplan.checks.finding import Finding, Severity, Subject
from memplan.checks.mended.changed_step import StepRecorder
from memplan.checks.mended.checkpoint_free import Blockwise, CheckpointFree
from memplan.checks.mended.savings import matters, peak_of
from memplan.trace.trace import Trace

ID = "idle-checkpoint"
TITLE = "Activation checkpoints do not lower the peak"


def find(subject: Subject) -> list[Finding]:
    """Return at most one finding, from recordings without checkpoints and with a checkpoint for each block."""
    trace, recorder = subject.trace, subject.recorder
    recomputed = [op for op in trace.ops if op.recomputed]
    if not recomputed or recorder is None:
        return []
    checkpoints = CheckpointFree()
    without = recorder.record(around=checkpoints.installed())
    if not isinstance(without, Trace) or not checkpoints.total:
        return []
    if matters(without, peak_of(without) - peak_of(trace)):  # the checkpoints lower the peak
        return []
    saved, blocks = _blockwise_saving(recorder, trace)
    steps = len(trace.steps)
    per_step = checkpoints.total // steps
    single = per_step <= 1
    message = (
        f"{'the checkpoint of a step runs' if single else f'the {per_step} checkpoints of a step run'} "
        f"{len(recomputed) // steps} ops a second time and {'does' if single else 'do'} not lower its peak: "
        f"{format_bytes(peak_of(trace))} with, {format_bytes(peak_of(without))} without"
    )
    severity: Severity = "warning" if saved else "info"
    advice = (
        f"Checkpoint each of the {blocks} blocks instead of all in one: {format_bytes(saved)} less at the peak"
        if saved
        else "Leave it out: the step is faster without"
    )
    first = recomputed[0]
    details = {"with": peak_of(trace), "without": peak_of(without), "blocks": blocks}
    return [Finding(ID, severity, first.layer, first.where, saved, message, (advice,), details)]


def _blockwise_saving(recorder: StepRecorder, trace: Trace) -> tuple[int, int]:
    """Return the bytes that a checkpoint for each block saves at the peak, and the number of blocks. The bytes are 0 if
    they do not matter. Both are 0 if the model has no blocks."""
    blockwise = Blockwise()
    mended = recorder.record(around=blockwise.installed())
    if not isinstance(mended, Trace) or not blockwise.blocks:
        return 0, 0
    saved = peak_of(trace) - peak_of(mended)
    return saved if matters(trace, saved) else 0, len(blockwise.blocks)
