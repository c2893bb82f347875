"""Run convolutions a few samples at a time, in lossy plans, to reduce the workspace of their kernels.

oneDNN reorders a convolution's input and result into its own layouts; in bfloat16, and with few channels, these copies
are larger than the result. Samples are independent, but which of oneDNN's kernels runs depends on the batch, and so may
the last bit: exact plans do not use this.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from memplan.planning.graph.joint_graph import GraphOp, JointGraph, Ref, SavedForm, Value
from memplan.planning.graph.op_schema import CHUNKED
from memplan.planning.graph.precision import Precision
from memplan.planning.levers.lever import Grade, Lever
from memplan.planning.ops.custom_ops import define
from memplan.trace.semantics.cpu.table import transient_bytes

CONVOLUTION = "aten.convolution.default"
MIN_WORKSPACE = 1 << 20
"""Smallest workspace in bytes for which a convolution is split."""


class ChunkConvolutions(Lever):
    """Run convolutions a few samples at a time in plans that compute in lower precision on the CPU."""

    name = "chunk convolutions"

    def rewrite(self, graph: JointGraph, precision: Precision) -> JointGraph:
        """Return the graph with convolutions in chunks if it computes in lower precision on the CPU."""
        is_whole = precision.whole or not precision.compute or graph.is_on_card
        return graph if is_whole else with_chunked_convolutions(graph)

    def grade(self, form: SavedForm | None = None) -> Grade:
        """Return ``lossy``: another kernel may run, which adds in a different order."""
        return "lossy"


def with_chunked_convolutions(graph: JointGraph) -> JointGraph:
    """Return the graph with those forward convolutions in chunks whose workspace is at least as large as their
    result."""
    return replace(graph, ops=tuple(_in_chunks(graph, op) for op in graph.ops))


def _in_chunks(graph: JointGraph, op: GraphOp) -> GraphOp:
    """Return a convolution in as few chunks as bring its workspace down to half of its result; other ops unchanged.

    Convolutions whose workspace is smaller than their result, or than 1 MiB, are unchanged, too.
    """
    if op.target != CONVOLUTION or op.phase != "forward" or len(op.makes) != 1 or op.kwargs:
        return op
    result = graph.values[op.makes[0]]
    batch = result.shape[0]
    if op.scratch < max(MIN_WORKSPACE, result.bytes):
        return op
    smallest = op
    for chunks in (2, 4, 8, 16):
        if batch % chunks or smallest.scratch <= result.bytes // 2:
            break
        args = [meta_tensor(graph.values[arg.value]) if isinstance(arg, Ref) else arg for arg in op.args]
        args[0] = args[0][: batch // chunks]  # the input
        chunk_result = meta_tensor(result)[: batch // chunks]
        kernel_workspace = transient_bytes(CONVOLUTION, tuple(args), {}, chunk_result)
        scratch = result.bytes // chunks + kernel_workspace  # a chunk is computed, then copied into the result
        if scratch < smallest.scratch:
            smallest = replace(op, target=CHUNKED, args=(*op.args, chunks), scratch=scratch)
    return smallest


def meta_tensor(value: Value) -> Tensor:
    """Return a meta tensor with the shape, strides and dtype of a value."""
    return torch.empty_strided(value.shape, value.stride, dtype=getattr(torch, value.dtype), device="meta")


def _convolution_chunks(
    input: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int], dilation: list[int],
    transposed: bool, output_padding: list[int], groups: int, pieces: int,
) -> Tensor:  # fmt: skip
    """Run ``aten::convolution`` on ``pieces`` slices of the batch."""
    result: Tensor | None = None
    samples_per_piece = input.shape[0] // pieces
    for index in range(pieces):
        samples = slice(index * samples_per_piece, (index + 1) * samples_per_piece)
        piece: Tensor = torch.ops.aten.convolution(
            input[samples], weight, bias, stride, padding, dilation, transposed, output_padding, groups
        )
        if result is None:  # in the layout that the kernel chose for its result
            result = piece.new_empty_strided((input.shape[0], *piece.shape[1:]), piece.stride())
        result[samples].copy_(piece)
        del piece  # before the next piece is allocated
    assert result is not None, "there is at least one piece"
    return result


define(
    "convolution_chunks(Tensor input, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] padding,"
    " SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups, int pieces) -> Tensor",
    lambda *args: torch.ops.aten.convolution(*args[:-1]),
)(_convolution_chunks)
