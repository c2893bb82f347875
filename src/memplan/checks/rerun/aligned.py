"""A trace as it would be with other arguments of its ops: recorded lifetimes, bytes from a replay of the step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from memplan.checks.mended.changed_step import ChangeError, NotRecorded
from memplan.checks.rerun.program import Changes, Program
from memplan.errors import MemplanError
from memplan.trace.record import record_for
from memplan.trace.recording.saved_scalars import LARGEST_SCALAR
from memplan.trace.recording.session import choose_target
from memplan.trace.records import Op, Storage
from memplan.trace.trace import Trace


def replayed_with(trace: Trace, changes: Changes) -> Trace | NotRecorded:
    """Return the trace with the bytes that each storage would have if ops were called with other arguments.

    ``changes`` maps the index of an op to its new arguments. The ops of the first step and their backward pass are
    replayed on fake tensors. Storages of the trace then get the bytes of their counterparts in the replay, the same in
    every step; allocation and free stay where they were.

    `NotRecorded` if the replay has other ops, or if a replay without changes does not allocate the recorded bytes.
    """
    try:
        sizes, workspaces = _replayed_sizes(trace, {})
        recorded = {storage.id: (storage.bytes, storage.low) for storage in trace.storages}
        if workspaces or any(recorded[number] != size for number, size in sizes.items()):
            return NotRecorded("run again from its ops alone, the step does not take what it took")
        sizes, workspaces = _replayed_sizes(trace, changes)
    except (MemplanError, ChangeError) as error:
        return NotRecorded.from_error(error)
    storages = [replace(s, bytes=sizes[s.id][0], low=sizes[s.id][1]) if s.id in sizes else s for s in trace.storages]
    storages += [replace(workspace, id=len(storages) + number) for number, workspace in enumerate(workspaces)]
    return replace(trace, storages=tuple(storages), engines=(), measured=(), expected=())


_CONSTANT = "aten.lift_fresh.default"

Sizes = dict[int, tuple[int, int | None]]
"""Storage -> its bytes, and the lower bound where they are known as an interval."""


def _replayed_sizes(trace: Trace, changes: Changes) -> tuple[Sizes, list[Storage]]:
    """Return the sizes of the trace's storages in a replay with changes, and the workspaces that only the replay has.
    Raises ChangeError if the replay does not have the same ops, and MemplanError if the replay failed."""
    program = Program(trace, changes)
    # cuDNN is asked for workspaces if the trace has its answers
    target = choose_target(trace.device, cudnn=None if trace.engines or trace.expected else False)
    replay = record_for(program.build, target, steps=1)
    if program.grown:  # by this replay: another one begins with data of the new size
        replay = record_for(program.build, target, steps=1)
    replay_ops = _ops(replay, step=0)
    sizes: Sizes = {}
    workspaces: list[Storage] = []
    recorded, replayed = _storages_by_op(trace), _storages_by_op(replay)
    for step in range(len(trace.steps)):
        for op, counterpart in _paired_ops(_ops(trace, step), replay_ops, recorded, is_first_step=step == 0):
            workspaces += _match_storages(op, recorded.get(op.index, []), replayed.get(counterpart.index, []), sizes)
    for view, shape in program.grown.items():
        size = trace.storages[view.storage].bytes
        sizes[view.storage] = (size * math.prod(shape) // math.prod(view.shape), None)
    return sizes, workspaces


def _ops(trace: Trace, step: int) -> list[Op]:
    """Return the ops of a step's forward and backward pass, without those of the optimizer."""
    return [op for op in trace.ops if op.step == step and op.phase in ("forward", "backward")]


def _paired_ops(
    ops: list[Op], replay_ops: list[Op], storages: Mapping[int, list[Storage]], *, is_first_step: bool
) -> Iterator[tuple[Op, Op]]:
    """Yield each op of a step with its counterpart in the replay, which has the ops of the first step.

    A later step may have further ops that only write to existing tensors: gradients are accumulated, or set to zero.
    ``storages`` maps the index of an op to what it allocates. Raises ChangeError if the ops differ in another way."""
    remaining = iter(replay_ops)
    counterpart = next(remaining, None)
    for op in ops:
        if counterpart is not None and op.name == counterpart.name:
            yield op, counterpart
            counterpart = next(remaining, None)
        elif is_first_step:
            raise ChangeError("the step would run other ops")
        elif any(storage.dtype for storage in storages.get(op.index, ())):
            raise ChangeError("its steps do not make the same tensors")
    if counterpart is not None:
        raise ChangeError("the step would run other ops")


def _storages_by_op(trace: Trace) -> dict[int, list[Storage]]:
    """Map the index of each op to the storages that it allocates."""
    by_op: dict[int, list[Storage]] = {}
    for storage in trace.storages:
        if storage.op is not None:
            by_op.setdefault(storage.op, []).append(storage)
    return by_op


def _tensors_and_temporaries(storages: list[Storage]) -> tuple[list[Storage], list[Storage]]:
    """Return the storages of tensors, and those of a kernel's temporaries, which have no dtype. Left out are scalars,
    which autograd keeps as tensors, and workspaces that are never freed: a library allocates them at its first op."""
    tensors = [s for s in storages if s.dtype]
    return tensors, [s for s in storages if not s.dtype and s.died is not None and s.bytes > LARGEST_SCALAR]


def _match_storages(op: Op, recorded: list[Storage], replayed: list[Storage], sizes: Sizes) -> Iterator[Storage]:
    """Enter the replayed bytes of an op's storages into ``sizes``; yield temporaries that only the replay has. Raises
    ChangeError if the replayed op allocates another number of tensors."""
    if op.name == _CONSTANT:
        return  # the replay has it as data from before the step
    recorded_tensors, recorded_temporaries = _tensors_and_temporaries(recorded)
    replayed_tensors, replayed_temporaries = _tensors_and_temporaries(replayed)
    if len(recorded_tensors) != len(replayed_tensors):
        raise ChangeError(f"{op.name} would make other tensors")
    sizes.update((missing.id, (0, None)) for missing in recorded_temporaries[len(replayed_temporaries) :])
    for before, after in (
        *zip(recorded_tensors, replayed_tensors, strict=True),
        *zip(recorded_temporaries, replayed_temporaries, strict=False),
    ):
        sizes[before.id] = (after.bytes, after.low)
    for new in replayed_temporaries[len(recorded_temporaries) :]:
        yield replace(new, op=op.index, born=op.end, died=op.end + 1)
