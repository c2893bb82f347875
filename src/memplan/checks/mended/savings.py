"""What a step would take if some of its storages lived shorter: the same simulation, of a changed trace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from memplan.simulation.simulate import live_at, simulate
from memplan.trace.records import Form, Op, Storage
from memplan.trace.trace import Trace, at_least


def saving(trace: Trace, changed: Mapping[int, Storage | None], added: Iterable[Storage] = ()) -> int:
    """Return bytes less at the peak with storages changed, left out (None) and added; 0 where the peak is elsewhere."""
    storages = [changed.get(storage.id, storage) for storage in trace.storages]
    kept = [*(storage for storage in storages if storage is not None), *added]
    numbered = tuple(replace(storage, id=number) for number, storage in enumerate(kept))
    return max(0, peak_of(trace) - peak_of(replace(trace, storages=numbered)))


def peak_of(trace: Trace) -> int:
    """Return the allocated peak as `memplan.explain` has it: on a card in the allocator's blocks, with the least
    workspace."""
    return simulate(trace, workspace="low").peak_allocated


def matters(trace: Trace, size: int, share: float = 0.02) -> bool:
    """Return whether bytes are a share of the peak that is worth a finding."""
    return size > 0 and size >= share * peak_of(trace)


def live_at_peak(trace: Trace) -> list[Storage]:
    """Return the storages that are allocated at the peak."""
    low = at_least(trace)
    return live_at(low, simulate(low).peak_tick)


def without_saving(trace: Trace, storages: Iterable[Storage]) -> dict[int, Storage | None]:
    """Return the storages as they would be if nothing kept them for the backward pass: each dies after its last forward
    op."""
    return _dying_after(trace, storages, forward_only=True)


def after_last_read(trace: Trace, storages: Iterable[Storage]) -> dict[int, Storage | None]:
    """Return the storages as they would be if each died after the last op that reads or writes it."""
    return _dying_after(trace, storages, forward_only=False)


def _dying_after(trace: Trace, storages: Iterable[Storage], *, forward_only: bool) -> dict[int, Storage | None]:
    wanted = {storage.id: storage for storage in storages}
    last: dict[int, int] = {}
    for op in trace.ops:
        if op.phase == "forward" or not forward_only:
            for number in (*(operand.storage for operand in op.reads), *op.writes):
                if number in wanted:
                    last[number] = op.end
    # the tick after the op's: what it makes is there before what it read is gone
    ends = {number: max(last.get(number, 0), storage.born) + 1 for number, storage in wanted.items()}
    return {
        number: replace(storage, died=ends[number])
        for number, storage in wanted.items()
        if storage.died is None or storage.died > ends[number]
    }


def readers_of(ops: Iterable[Op]) -> dict[int, list[Op]]:
    """Map each storage to the ops among these that read it, in order."""
    found: dict[int, list[Op]] = {}
    for op in ops:
        for storage in {operand.storage for operand in op.reads}:
            found.setdefault(storage, []).append(op)
    return found


def forms_of_all_steps(trace: Trace) -> dict[int, Form]:
    """Return the form of every forward op; of later steps that of the same op in the first, where they run the same
    ops."""
    first = {form.op: form for form in trace.forms}
    found = dict(first)
    by_step: dict[int, list[Op]] = {}
    for op in trace.ops:
        if op.phase == "forward":
            by_step.setdefault(op.step, []).append(op)
    model = by_step.get(0, [])
    for step, ops in by_step.items():
        if step > 0 and [op.name for op in ops] == [op.name for op in model]:
            found |= {op.index: first[one.index] for op, one in zip(ops, model, strict=True) if one.index in first}
    return found


def rows_of(trace: Trace, storages: Iterable[Storage], op_of: Mapping[int, int]) -> list[dict[str, Any]]:
    """Return bytes by layer and line of the first step's storages, the most first; ``op_of`` is the op to blame for
    each."""
    found: dict[tuple[str, str | None], int] = {}
    for storage in storages:
        op = trace.ops[op_of[storage.id]]
        if op.step == 0:
            found[op.layer, op.where] = found.get((op.layer, op.where), 0) + storage.bytes
    ordered = sorted(found.items(), key=lambda item: -item[1])
    return [{"layer": layer, "where": where, "bytes": size} for (layer, where), size in ordered]
