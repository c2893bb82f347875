"""Arguments of which a kernel reads nothing, or only the shape: what they stand for need not be kept."""

from __future__ import annotations

import math
from typing import Any

import torch

from memplan.planning.graph import GraphOp, JointGraph, Ref, Value, map_refs
from memplan.planning.rebuild import Rebuild
from memplan.trace.semantics.cpu import transient_bytes

_CONVOLUTION = "aten.convolution_backward.default"
_NORM = "aten.native_batch_norm_backward.default"

NUMBERS = 128
"""Bytes for the scalars that a kernel makes of Python's numbers while it runs, a few at a time."""

SHAPE_ONLY = {
    "aten.max_pool2d_with_indices_backward.default": 1,
    "aten.max_pool3d_with_indices_backward.default": 1,
    "aten.avg_pool2d_backward.default": 1,
    "aten.avg_pool3d_backward.default": 1,
    "aten._adaptive_avg_pool2d_backward.default": 1,
    "aten._adaptive_avg_pool3d_backward.default": 1,
    "aten.adaptive_max_pool2d_backward.default": 1,
    "aten.adaptive_max_pool3d_backward.default": 1,
    "aten.reflection_pad1d_backward.default": 1,
    "aten.reflection_pad2d_backward.default": 1,
    "aten.reflection_pad3d_backward.default": 1,
    "aten.replication_pad1d_backward.default": 1,
    "aten.replication_pad2d_backward.default": 1,
    "aten.replication_pad3d_backward.default": 1,
}
"""By op: position of the argument of which the kernel takes the shape alone."""


def idle_arguments(target: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments without those that the kernel does not read: a training batch norm's derivative takes the batch's
    statistics, not the running ones."""
    if target == _NORM and args[7]:
        return (*args[:3], None, None, *args[5:])
    return args


def split(graph: JointGraph) -> JointGraph:
    """The same graph where a convolution's derivative is two ops, the weight's before the input's, and where what is
    read for its shape alone is not read: a view of the gradient stands for it, where that is large enough.

    The kernels compute the two apart anyway: results are the same bit for bit, and the input is free one op earlier.
    """
    wanted = {_CONVOLUTION, *SHAPE_ONLY}
    return _Splitter(graph).run() if any(op.target in wanted for op in graph.ops) else graph


class _Splitter(Rebuild):
    def run(self) -> JointGraph:
        for op in self.graph.ops:
            if op.target == _CONVOLUTION:
                self._convolution(op)
            elif op.target in SHAPE_ONLY:
                self._shape_only(op)
            else:
                self.add(op)
        return self.finished()

    def _convolution(self, op: GraphOp) -> None:
        mask = list(op.args[10])
        of_input, of_weight, of_bias = op.outputs
        parts = [(False, mask[1], mask[2]), (mask[0], False, False)]
        for part in parts:
            if not any(part):
                continue
            args = [*op.args[:10], list(part)]
            if part[0]:
                args[1] = self._stand_in(op, args[0], args[1])
            outputs = tuple(
                v if wanted else None for v, wanted in zip((of_input, of_weight, of_bias), part, strict=True)
            )
            makes = tuple(v for v in outputs if v is not None and self.values[v].base == v)
            self.add(op, args=tuple(args), outputs=outputs, makes=makes, scratch=self._scratch(op, args))

    def _scratch(self, op: GraphOp, args: list[Any]) -> int:
        """Of one part: each reorders for itself what it reads, where the whole did so one after the other."""
        tensors = map_refs(tuple(args), lambda value: _without_data(self.values[value]))
        return transient_bytes(op.target, tensors, {}, None) + NUMBERS

    def _shape_only(self, op: GraphOp) -> None:
        at = SHAPE_ONLY[op.target]
        args = list(op.args)
        args[at] = self._stand_in(op, args[0], args[at], dense=False)
        self.add(op, args=tuple(args))

    def _stand_in(self, op: GraphOp, gradient: Ref, argument: Ref, *, dense: bool = True) -> Ref:
        """A view of the gradient with the argument's shape; the argument itself where it has no such view."""
        of, wanted = self.values[gradient.value], self.values[argument.value]
        owner = self.values[of.base]
        if not dense and not _is_contiguous(wanted):
            dense = True  # the kernel takes the layout, too
        stride = wanted.stride if dense else (0,) * len(wanted.shape)
        reach = 1 + sum((n - 1) * s for n, s in zip(wanted.shape, stride, strict=True)) if wanted.shape else 1
        size = owner.bytes // getattr(torch, owner.dtype).itemsize
        if of.dtype != wanted.dtype or owner.dtype != wanted.dtype or reach > size or math.prod(wanted.shape) == 0:
            return argument
        number = self.value(f"{wanted.name}_shape", wanted, base=of.base, bytes=0, stride=stride)
        self.add(
            GraphOp(
                -1 - number, "aten.as_strided.default", (Ref(gradient.value), list(wanted.shape), list(stride), 0), {},
                op.phase, (number,), False, (of.base,), (), layer=op.layer, where=op.where,
            )
        )  # fmt: skip
        return Ref(number)


def _without_data(value: Value) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride, dtype=getattr(torch, value.dtype), device="meta")


def _is_contiguous(value: Value) -> bool:
    expected = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride), strict=True):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
