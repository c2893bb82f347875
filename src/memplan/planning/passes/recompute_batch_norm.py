"""Recompute training batch norms from their saved statistics, by a cheaper op than the original.

Seven eighths of a training batch norm's time are the statistics of the batch. They are saved anyway for its derivative,
a few bytes a channel. From them the same kernel in evaluation mode recomputes the result: its weight is the weight
times the reciprocal deviation, its running mean the mean, its running variance 1 and its eps 0. In training the kernel
also multiplies by (weight / deviation) and adds (bias - mean * weight / deviation), so that the bits are the same:
`batch_norm_cpu_collect_linear_and_constant_terms` in aten/src/ATen/native/cpu/batch_norm_kernel.cpp. For tensors that
are neither contiguous nor channels last, torch has another implementation, which rounds differently; so does the
float16 kernel with statistics in float16. Such norms are recomputed by the original op.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from memplan.planning.graph.joint_graph import GraphOp, JointGraph, Ref, Value
from memplan.planning.graph.op_schema import BATCH_NORM_AGAIN, is_contiguous, itemsize
from memplan.trace.semantics.traced_results import TRAINING_NORM

_TRAINING = {TRAINING_NORM: 5, "aten._native_batch_norm_legit.no_stats": 3}
"""Position of the argument ``training``, by batch norm op."""

SMALLEST_RATIO_TO_STATISTICS = 32
"""Smallest ratio of the bytes of a result to those of its statistics, which must then be saved."""


def with_cheaper_recompute(graph: JointGraph) -> JointGraph:
    """Add the cheaper recompute ops of the CPU to batch norms whose derivative reads the statistics."""
    read_in_backward = {value for op in graph.backward_ops for value in op.reads}
    return replace(graph, ops=tuple(_with_cheaper_recompute(op, graph, read_in_backward) for op in graph.ops))


def _with_cheaper_recompute(op: GraphOp, graph: JointGraph, read_in_backward: set[int]) -> GraphOp:
    """Return a training batch norm of the forward pass with its cheaper recompute op; other ops unchanged.

    The norm must have its statistics saved anyway, since the backward pass reads them, and the recompute op must give
    the same bits. ``read_in_backward``: the values that the backward pass reads.
    """
    if op.phase == "backward" or op.target not in _TRAINING or op.args[_TRAINING[op.target]] is not True:
        return op
    allocates_results = op.makes[:3] == op.outputs[:3]  # none is a view
    if not allocates_results or not set(op.makes[1:3]) <= read_in_backward:
        return op
    x, (result, mean, invstd) = graph.values[op.args[0].value], op.makes[:3]
    parameters = [graph.values[arg.value] for arg in op.args[1:3] if arg is not None]
    statistics = [graph.values[mean], graph.values[invstd]]
    statistics_bytes = sum(value.bytes for value in statistics)
    is_worthwhile = graph.values[result].bytes >= SMALLEST_RATIO_TO_STATISTICS * statistics_bytes
    if not is_worthwhile or not _has_same_bits_in_evaluation(x, parameters, statistics):
        return op
    args = (*op.args[:3], Ref(mean), Ref(invstd))
    reads = tuple(dict.fromkeys(graph.base(arg.value) for arg in args if arg is not None))
    cheaper = replace(
        op, target=BATCH_NORM_AGAIN, args=args, kwargs={}, outputs=(result,), returns_tuple=False, reads=reads,
        makes=(result,), discarded=0, scratch=_workspace_bytes(x, op.args[1:3], statistics, graph), overwrites=(),
        in_place_scratch=None, held_values=(),
    )  # fmt: skip
    return replace(op, cheaper_recompute=cheaper)


def _has_same_bits_in_evaluation(x: Value, parameters: list[Value], statistics: list[Value]) -> bool:
    """Return whether the kernel rounds in evaluation mode as in training: see this module's docstring.

    ``parameters``: weight and bias, if any; ``statistics``: saved mean and reciprocal deviation.
    """
    is_half_with_float32_statistics = (x.dtype, statistics[0].dtype) == ("float16", "float32")
    if x.dtype not in ("float32", "float64", "bfloat16") and not is_half_with_float32_statistics:
        return False
    tensor = torch.empty_strided(x.shape, x.stride, device="meta")
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(x.shape), torch.contiguous_format)
    has_memory_format = tensor.is_contiguous() or tensor.is_contiguous(memory_format=channels_last)
    return has_memory_format and all(map(is_contiguous, (*parameters, *statistics)))


def _workspace_bytes(x: Value, parameters: tuple[Ref | None, ...], statistics: list[Value], graph: JointGraph) -> int:
    """Return the workspace of `piecewise.batch_norm_again` in bytes: vectors with a number for each channel.

    These are a variance of 1, the factor and the offset of torch's kernel, the scaled weight unless it equals
    ``invstd``, and casts of bias and mean to the kernel's dtype. ``parameters``: weight and bias; ``statistics``: saved
    mean and reciprocal deviation.
    """
    kernel_dtype = "float64" if x.dtype == "float64" else "float32"
    weight, bias = (None if parameter is None else graph.values[parameter.value] for parameter in parameters)
    mean, invstd = statistics
    has_scaled_weight = weight is not None or invstd.dtype != kernel_dtype
    casts = sum(value is not None and value.dtype != kernel_dtype for value in (bias, mean))
    vectors = 3 + has_scaled_weight + casts
    return vectors * x.shape[1] * itemsize(kernel_dtype)
