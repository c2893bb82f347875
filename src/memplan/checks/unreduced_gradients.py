"""Check: gradients of whole weights that stay on a rank between micro-batches, where weights are sharded."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

from memplan import _torch
from memplan._bytes import format_bytes
from memplan.checks.finding import Finding, Subject
from memplan.checks.mended.savings import matters, peak_of, saving, writers_of_whole_gradients
from memplan.trace.records import Storage
from memplan.trace.trace import Trace

ID = "unreduced-gradients"
TITLE = "Gradients of whole weights are kept between micro-batches, where weights are sharded"


def find(subject: Subject) -> list[Finding]:
    """Return at most one finding, about gradients that are reduced to shards only after a later forward pass."""
    trace = subject.trace
    shards = _number_of_shards(trace)
    unreduced = _unreduced_over_a_forward_pass(trace) if shards > 1 else {}
    if not unreduced:
        return []
    changed: dict[int, Storage | None] = {s.id: replace(s, died=reduced) for s, reduced in unreduced.items()}
    added = [replace(s, bytes=math.ceil(s.bytes / shards), born=reduced) for s, reduced in unreduced.items()]
    size = saving(trace, changed, added)
    if subject.recorder is not None:
        mended = subject.recorder.record(around=_reduced_each_time())
        size = peak_of(trace) - peak_of(mended) if isinstance(mended, Trace) else size
    if not matters(trace, size):
        return []
    step = max(trace.ops[storage.op or 0].step for storage in unreduced)
    gradients = sum(storage.bytes for storage in unreduced if trace.ops[storage.op or 0].step == step)
    message = (
        f"gradients of whole weights ({format_bytes(gradients)}) are kept on each rank from one micro-batch to the "
        f"next, however many ranks there are; reduced to shards after each, they take {format_bytes(size)} less at the "
        "peak"
    )
    advice = (
        "Leave set_requires_gradient_sync(False), or no_sync(), away: each micro-batch then sends its gradients, which "
        "costs time where links are slow",
    )
    dtypes = sorted({storage.dtype for storage in unreduced})
    details = {"held": gradients, "shards": shards, "dtypes": dtypes}
    return [Finding(ID, "warning", layer="", where=None, bytes=size, message=message, advice=advice, details=details)]


def _number_of_shards(trace: Trace) -> int:
    """Return how many shards the backward pass reduces gradients to; 1 if it reduces none."""
    for op in trace.ops:
        if "reduce_scatter" in op.name and op.phase == "backward" and op.writes:
            whole = max(trace.storages[operand.storage].bytes for operand in op.reads)
            return whole // max(1, min(trace.storages[number].bytes for number in op.writes))
    return 1


@contextmanager
def _reduced_each_time() -> Iterator[None]:
    """Within this context, FSDP reduces gradients in each backward pass."""
    from torch.distributed import fsdp

    with (
        _torch.patched(fsdp.FSDPModule, set_requires_gradient_sync=lambda *_, **__: None),
        _torch.patched(fsdp.FullyShardedDataParallel, no_sync=lambda _: nullcontext()),
    ):
        yield


def _unreduced_over_a_forward_pass(trace: Trace) -> dict[Storage, int]:
    """Map gradients that are reduced to shards only after a further micro-batch to the tick at which they would be
    freed if the first backward pass reduced them.

    They would live from their computation as long as they now live from the last addition.
    """
    forward_ticks = [op.start for op in trace.ops if op.phase == "forward"]
    writes = writers_of_whole_gradients(trace.ops)
    unreduced: dict[Storage, int] = {}
    for storage in trace.counted:
        if storage.cause != "parameter_gradient" or storage.died is None or storage.id not in writes:
            continue
        last_addition = max((tick for tick in writes[storage.id] if tick > storage.born), default=storage.born)
        if any(storage.born < tick < last_addition for tick in forward_ticks):
            unreduced[storage] = storage.born + storage.died - last_addition
    return unreduced
