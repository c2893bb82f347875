"""Results that a cheaper op makes again than the one that made them.

Seven eighths of a training batch norm's time go to the statistics of the batch. Its derivative reads them, so they are
kept anyway, a few bytes a channel; and with them the result is made again by the same kernel in evaluation mode: the
weight times the reciprocal deviation is its weight, the mean its running mean, its running variance is 1 and its eps 0.
In training, too, that kernel multiplies by (weight / deviation) and adds (bias - mean * weight / deviation), so that
the bits are the same: `batch_norm_cpu_collect_linear_and_constant_terms` in aten/src/ATen/native/cpu/
batch_norm_kernel.cpp. Where a tensor is laid out neither in order nor channels last, torch takes another way, which
rounds otherwise; and so does the kernel of float16 alone, without statistics in float32. Such norms are made again as
they were made.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from memplan.planning.graph.joint_graph import GraphOp, JointGraph, Ref, Value
from memplan.planning.graph.op_schema import BATCH_NORM_AGAIN, is_contiguous, itemsize
from memplan.trace.semantics.traced_results import TRAINING_NORM

_TRAINING = {TRAINING_NORM: 5, "aten._native_batch_norm_legit.no_stats": 3}
"""Batch norms, and where among their arguments is said whether they train."""

WORTHWHILE = 32
"""Smallest ratio of a result to its statistics, which must then be saved."""


def with_again(graph: JointGraph) -> JointGraph:
    """Add the CPU's cheaper recompute ops where what they read is saved for the derivative."""
    read = {value for op in graph.backward_ops for value in op.reads}
    return replace(graph, ops=tuple(_with_again(op, graph, read) for op in graph.ops))


def _with_again(op: GraphOp, graph: JointGraph, read: set[int]) -> GraphOp:
    if op.phase == "backward" or op.target not in _TRAINING or op.args[_TRAINING[op.target]] is not True:
        return op
    if op.makes[:3] != op.outputs[:3] or not set(op.makes[1:3]) <= read:
        return op
    x, (made, mean, deviation) = graph.values[op.args[0].value], op.makes[:3]
    small = [graph.values[one.value] for one in op.args[1:3] if one is not None]
    kept = [graph.values[mean], graph.values[deviation]]
    if not _same_bits(x, small, kept) or graph.values[made].bytes < WORTHWHILE * sum(one.bytes for one in kept):
        return op
    args = (*op.args[:3], Ref(mean), Ref(deviation))
    reads = tuple(dict.fromkeys(graph.base(arg.value) for arg in args if arg is not None))
    again = replace(
        op, target=BATCH_NORM_AGAIN, args=args, kwargs={}, outputs=(made,), multiple=False, reads=reads, makes=(made,),
        discarded=0, scratch=_scratch(x, op.args[1:3], kept, graph), overwrites=(), scratch_into=None, holds=(),
    )  # fmt: skip
    return replace(op, again=again)


def _same_bits(x: Value, small: list[Value], kept: list[Value]) -> bool:
    """Return whether the kernel in evaluation mode rounds as that in training does."""
    if x.dtype not in ("float32", "float64", "bfloat16") and (x.dtype, kept[0].dtype) != ("float16", "float32"):
        return False
    return _in_order(x) and all(map(is_contiguous, (*small, *kept)))


def _in_order(x: Value) -> bool:
    """Return whether its elements follow one another, in order or channels last."""
    shown = torch.empty_strided(x.shape, x.stride, device="meta")
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(x.shape), torch.contiguous_format)
    return shown.is_contiguous() or shown.is_contiguous(memory_format=last)


def _scratch(x: Value, given: tuple[Ref | None, ...], kept: list[Value], graph: JointGraph) -> int:
    """Return the bytes that `piecewise.batch_norm_again` holds beyond its result: for every channel a variance of 1 and
    the factor and the term that torch's kernel works with, and what of its operands has to be made or cast for that."""
    wanted = "float64" if x.dtype == "float64" else "float32"
    weight, bias = (None if one is None else graph.values[one.value] for one in given)
    made = [True, True, True, weight is not None or kept[1].dtype != wanted]
    made += [one is not None and one.dtype != wanted for one in (bias, kept[0])]
    return sum(made) * x.shape[1] * itemsize(wanted)
