"""What a recorded step would take with other arguments: its own births and deaths, the bytes of the step run again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from memplan.checks.mended.changed_step import Unmendable, Unmended
from memplan.checks.rerun.program import Changes, Program
from memplan.errors import MemplanError
from memplan.trace.record import record_for
from memplan.trace.recording.held_scalars import LARGEST_SCALAR
from memplan.trace.recording.session import choose_target
from memplan.trace.records import Op, Storage
from memplan.trace.trace import Trace


def changed(trace: Trace, changes: Changes) -> Trace | Unmended:
    """Return the trace with the bytes that each storage would have if ops were called with other arguments.

    The ops of the first step are called again on fake tensors, and their backward pass is run; what an op of the trace
    makes then gets the bytes of its counterpart, in every step alike, and lives as long as it did. Wherever that cannot
    be sure to be right the answer is why: the two runs have to have the same ops, and the step run again unchanged has
    to make the very same storages.
    """
    try:
        if _apart(trace, *_matched(trace, {})):
            return Unmended("run again from its ops alone, the step does not take what it took")
        sizes, added = _matched(trace, changes)
    except (MemplanError, Unmendable) as error:
        return Unmended.by(error)
    known = [replace(s, bytes=sizes[s.id][0], low=sizes[s.id][1]) if s.id in sizes else s for s in trace.storages]
    more = [replace(storage, id=len(known) + number) for number, storage in enumerate(added)]
    return replace(trace, storages=(*known, *more), engines=(), measured=())


_CONSTANT = "aten.lift_fresh.default"

Sizes = dict[int, tuple[int, int | None]]
"""Storage -> its bytes, and the lower bound where they are known as an interval."""


def _apart(trace: Trace, sizes: Sizes, added: list[Storage]) -> bool:
    by_id = {storage.id: (storage.bytes, storage.low) for storage in trace.storages}
    return bool(added) or any(by_id[number] != size for number, size in sizes.items())


def _matched(trace: Trace, changes: Changes) -> tuple[Sizes, list[Storage]]:
    """Return sizes of the trace's storages in a run with changes, and temporaries of kernels that there were none of
    before.

    Raises:
        Unmendable: the runs have not the same ops.
        MemplanError: the run failed.
    """
    program = Program(trace, changes)
    target = choose_target(trace.device, cudnn=None if trace.engines else False)
    again = record_for(program.build, target, steps=1)
    if program.grown:
        again = record_for(program.build, target, steps=1)
    model = _ops(again, 0)
    sizes: Sizes = {}
    added: list[Storage] = []
    own, other = _born_in(trace), _born_in(again)
    for step in range(len(trace.steps)):
        for op, counterpart in _pairs(_ops(trace, step), model, own if step > 0 else None):
            added += _pair(op, own.get(op.index, []), other.get(counterpart.index, []), sizes)
    for view, shape in program.grown.items():
        size = trace.storages[view.storage].bytes
        sizes[view.storage] = (size * math.prod(shape) // math.prod(view.shape), None)
    return sizes, added


def _ops(trace: Trace, step: int) -> list[Op]:
    return [op for op in trace.ops if op.step == step and op.phase in ("forward", "backward")]


def _pairs(ops: list[Op], model: list[Op], made: Mapping[int, list[Storage]] | None) -> Iterator[tuple[Op, Op]]:
    """Yield each op with its counterpart. Later steps have ops besides that make no tensor, and only write: gradients
    that are added to those of the step before, or set to zero; ``made`` maps an op to what it makes, where such are
    allowed."""
    waiting = iter(model)
    counterpart = next(waiting, None)
    for op in ops:
        if counterpart is not None and op.name == counterpart.name:
            yield op, counterpart
            counterpart = next(waiting, None)
        elif made is None or any(storage.dtype for storage in made.get(op.index, ())):
            raise Unmendable(
                "the step would run other ops" if made is None else "its steps do not make the same tensors"
            )
    if counterpart is not None:
        raise Unmendable("the step would run other ops")


def _born_in(trace: Trace) -> dict[int, list[Storage]]:
    found: dict[int, list[Storage]] = {}
    for storage in trace.storages:
        if storage.op is not None:
            found.setdefault(storage.op, []).append(storage)
    return found


def _is_kernels(storage: Storage) -> bool:
    """Return whether a kernel took a storage for itself; the number of a product, which autograd holds, is none."""
    return not storage.dtype and storage.died is not None and storage.bytes > LARGEST_SCALAR


def _pair(op: Op, own: list[Storage], other: list[Storage], sizes: Sizes) -> Iterator[Storage]:
    """Give an op's storages the sizes of their counterparts; yields temporaries of its kernel that are new."""
    if op.name == _CONSTANT:
        return  # run again, it is there before the step
    tensors = [[s for s in storages if s.dtype] for storages in (own, other)]
    # a library's workspace is taken once and held for good: whichever op comes first has it
    hidden = [[s for s in storages if _is_kernels(s)] for storages in (own, other)]
    if len(tensors[0]) != len(tensors[1]):
        raise Unmendable(f"{op.name} would make other tensors")
    for before, after in (*zip(*tensors, strict=True), *zip(*hidden, strict=False)):
        sizes[before.id] = (after.bytes, after.low)
    for gone in hidden[0][len(hidden[1]) :]:
        sizes[gone.id] = (0, None)
    for new in hidden[1][len(hidden[0]) :]:
        yield replace(new, op=op.index, born=op.end, died=op.end + 1)
