"""Convolutions that run a few samples at a time, in lossy plans: what their kernel holds beside its result is smaller.

oneDNN reorders a convolution's input and result into layouts of its own; in bfloat16, and with few channels, these
copies take more than the result itself. The result of each sample is its own, but which of oneDNN's kernels runs
depends on the batch, and so may the last bit: exact plans leave it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from memplan.planning.graph.joint_graph import GraphOp, JointGraph, KeptForm, Ref, Value
from memplan.planning.graph.op_schema import CHUNKED
from memplan.planning.graph.precision import Precision
from memplan.planning.levers.lever import Grade, Lever
from memplan.planning.ops.custom_ops import define
from memplan.trace.semantics.cpu.table import transient_bytes

CONVOLUTION = "aten.convolution.default"
LEAST = 1 << 20
"""Bytes of scratch for less of which nothing is taken apart."""


class ChunkConvolutions(Lever):
    """Run convolutions a few samples at a time, where a plan computes in lower precision on the CPU anyway."""

    name = "chunk convolutions"

    def rewrite(self, graph: JointGraph, precision: Precision) -> JointGraph:
        """Return the graph with convolutions in chunks, where the last bit is free to differ."""
        return chunked(graph) if precision.compute and not graph.is_on_card and not precision.whole else graph

    def grade(self, form: KeptForm | None = None) -> Grade:
        """Return ``lossy``: another kernel may run, which adds in another order."""
        return "lossy"


def chunked(graph: JointGraph) -> JointGraph:
    """Take the forward convolutions apart whose scratch is as large as their result."""
    return replace(graph, ops=tuple(_chunked(graph, op) for op in graph.ops))


def _chunked(graph: JointGraph, op: GraphOp) -> GraphOp:
    if op.target != CONVOLUTION or op.phase != "forward" or len(op.makes) != 1 or op.kwargs:
        return op
    made = graph.values[op.makes[0]]
    batch = made.shape[0]
    if op.scratch < max(LEAST, made.bytes):
        return op
    best = op
    for pieces in (2, 4, 8, 16):
        if batch % pieces or best.scratch <= made.bytes // 2:
            break
        scratch = _scratch(graph, op, made, pieces)
        if scratch < best.scratch:
            best = replace(op, target=CHUNKED, args=(*op.args, pieces), scratch=scratch)
    return best


def _scratch(graph: JointGraph, op: GraphOp, made: Value, pieces: int) -> int:
    """Return the bytes of a piece's result, and of what its kernel holds."""
    args = [alike(graph.values[one.value]) if isinstance(one, Ref) else one for one in op.args]
    args[0] = args[0][: args[0].shape[0] // pieces]
    result = alike(made)[: made.shape[0] // pieces]
    return made.bytes // pieces + transient_bytes(CONVOLUTION, tuple(args), {}, result)


def alike(value: Value) -> Tensor:
    """Return a tensor without data that is laid out as a value."""
    return torch.empty_strided(value.shape, value.stride, dtype=getattr(torch, value.dtype), device="meta")


def _convolution_chunks(
    input: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int], dilation: list[int],
    transposed: bool, output_padding: list[int], groups: int, pieces: int,
) -> Tensor:  # fmt: skip
    """Run ``aten::convolution`` with the batch in several pieces."""
    made = list[Tensor]()
    rest: tuple[Any, ...] = (weight, bias, stride, padding, dilation, transposed, output_padding, groups)
    size = input.shape[0] // pieces
    for at in range(pieces):
        part = torch.ops.aten.convolution(input[at * size : (at + 1) * size], *rest)
        if not made:
            made.append(part.new_empty_strided((input.shape[0], *part.shape[1:]), part.stride()))
        made[0][at * size : (at + 1) * size].copy_(part)
        del part  # before the next piece is there
    return made[0]


def _fake(input: Tensor, *rest: Any) -> Tensor:
    return torch.ops.aten.convolution(input, *rest[:-1])


define(
    "convolution_chunks(Tensor input, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] padding,"
    " SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups, int pieces) -> Tensor",
    _fake,
)(_convolution_chunks)
