"""The peak of a step with some of its storages freed earlier, by simulation of a changed trace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from memplan.simulation.simulate import live_at, simulate
from memplan.trace.records import Form, Op, Storage
from memplan.trace.trace import Trace, at_least


def saving(trace: Trace, changed: Mapping[int, Storage | None], added: Iterable[Storage] = ()) -> int:
    """Return the bytes by which the peak of a step falls if its storages change; 0 if it rises. ``changed`` maps the id
    of a storage to its replacement, None to leave it out; ``added`` are further storages."""
    storages = [changed.get(storage.id, storage) for storage in trace.storages]
    remaining = [*(storage for storage in storages if storage is not None), *added]
    numbered = tuple(replace(storage, id=number) for number, storage in enumerate(remaining))
    # without ``expected``, whose storages have other numbers now; their bytes are those expected
    return max(0, peak_of(trace) - peak_of(replace(trace, storages=numbered, expected=())))


def peak_of(trace: Trace) -> int:
    """Return the peak of allocated bytes, as `memplan.explain` computes it. On a card it is in the allocator's blocks,
    with workspaces: a size known only as an interval counts with its least."""
    return simulate(at_least(trace)).peak_allocated


def matters(trace: Trace, size: int, share: float = 0.02) -> bool:
    """Return whether bytes are at least this share of the peak, so that they are worth a finding."""
    return size > 0 and size >= share * peak_of(trace)


def live_at_peak(trace: Trace) -> list[Storage]:
    """Return the storages that are live at the peak."""
    low = at_least(trace)
    return live_at(low, simulate(low).peak_tick)


def without_saving(trace: Trace, storages: Iterable[Storage]) -> dict[int, Storage | None]:
    """Map the ids of storages to replacements that are not saved for backward: freed after their last forward op.
    Storages that are freed then in any case are left out."""
    return after_last_use(trace, storages, forward_only=True)


def after_last_use(
    trace: Trace, storages: Iterable[Storage], *, forward_only: bool = False
) -> dict[int, Storage | None]:
    """Map the ids of storages to replacements that are freed after the last op that reads or writes them. With
    ``forward_only``, only forward ops count. Storages that are freed then in any case are left out."""
    by_id = {storage.id: storage for storage in storages}
    last_use = {storage.id: storage.born for storage in by_id.values()}
    for op in trace.ops:
        if op.phase == "forward" or not forward_only:
            for number in (*(operand.storage for operand in op.reads), *op.writes):
                if number in last_use:
                    last_use[number] = max(last_use[number], op.end)
    changed: dict[int, Storage | None] = {}
    for number, end in last_use.items():
        died = by_id[number].died
        if died is None or died > end + 1:  # a tick later: an op's results are allocated before its inputs can be freed
            changed[number] = replace(by_id[number], died=end + 1)
    return changed


def readers_of(ops: Iterable[Op]) -> dict[int, list[Op]]:
    """Map the id of each storage to those of the ops that read it, in order."""
    readers: dict[int, list[Op]] = {}
    for op in ops:
        for storage in {operand.storage for operand in op.reads}:
            readers.setdefault(storage, []).append(op)
    return readers


def forms_of_all_steps(trace: Trace) -> dict[int, Form]:
    """Map the index of each forward op to the form of its call: its arguments and results. Only the first step has
    forms: a later step with the same ops gets those of their counterparts."""
    recorded = {form.op: form for form in trace.forms}
    forms = dict(recorded)
    by_step: dict[int, list[Op]] = {}
    for op in trace.ops:
        if op.phase == "forward":
            by_step.setdefault(op.step, []).append(op)
    first_step = by_step.get(0, [])
    for ops in by_step.values():
        if [op.name for op in ops] == [op.name for op in first_step]:
            pairs = zip(ops, first_step, strict=True)
            forms |= {op.index: recorded[first.index] for op, first in pairs if first.index in recorded}
    return forms


def rows_of(trace: Trace, storages: Iterable[Storage], op_of: Mapping[int, int] | None = None) -> list[dict[str, Any]]:
    """Return the bytes of the first step's storages by layer and line, the largest first, as rows for a finding.

    A storage counts for the layer and line of the op that allocated it, or of the op whose index ``op_of`` has for its
    id.
    """
    sizes: dict[tuple[str, str | None], int] = {}
    for storage in storages:
        op = trace.ops[(storage.op or 0) if op_of is None else op_of[storage.id]]
        if op.step == 0:
            sizes[op.layer, op.where] = sizes.get((op.layer, op.where), 0) + storage.bytes
    ordered = sorted(sizes.items(), key=lambda item: -item[1])
    return [{"layer": layer, "where": where, "bytes": size} for (layer, where), size in ordered]


_COPIES = ("aten._to_copy.", "aten.copy_.", "aten.clone.", "aten.div.")


def writers_of_whole_gradients(ops: Sequence[Op]) -> dict[int, list[int]]:
    """Map gradients of whole weights to the ticks at which ops of the backward pass write to them. They are the
    storages that are reduced to shards of the ranks, themselves or as copies."""
    sources: dict[int, set[int]] = {}  # copy -> what it is copied from
    reduced = set[int]()
    for op in ops:
        reads, writes = {operand.storage for operand in op.reads}, set(op.writes)
        if op.name.startswith("fsdp.chunk_cat") or "reduce_scatter" in op.name:
            whole = reads - writes
            reduced |= whole.union(*(sources.get(number, set()) for number in whole))
        elif op.phase == "backward" and op.name.startswith(_COPIES):
            for number in writes:
                sources.setdefault(number, set()).update(reads - writes)
    changes: dict[int, list[int]] = {number: [] for number in reduced}
    for op in ops:
        if op.phase == "backward":
            for number in reduced.intersection(op.writes):
                changes[number].append(op.start)
    return changes
