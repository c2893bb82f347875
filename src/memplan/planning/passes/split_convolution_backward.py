"""Arguments of which a kernel reads nothing, or only the shape: what they stand for need not be kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from memplan.planning.graph.editor import Rebuild
from memplan.planning.graph.joint_graph import RESIDENT, GraphOp, JointGraph, Ref, Value, map_refs, refs
from memplan.planning.graph.op_schema import NUMBERS, is_contiguous, itemsize
from memplan.planning.levers.encode import reads_bits
from memplan.trace.semantics.cpu.table import transient_bytes

CONVOLUTION_BACKWARD = "aten.convolution_backward.default"
_NORM = "aten.native_batch_norm_backward.default"

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
"""Position of the argument of which the kernel reads only the shape, by op."""


def idle_arguments(target: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments without those that the kernel does not read: a training batch norm's derivative takes the
    batch's statistics, not the running ones."""
    if target == _NORM and args[7]:
        return (*args[:3], None, None, *args[5:])
    return args


def split(graph: JointGraph) -> JointGraph:
    """Return the graph where a convolution's derivative is two ops, the weight's before the input's, and where what is
    read for its shape alone is not read: a view of the gradient stands for it or, where none is large enough, memory
    with nothing in it.

    The kernels compute the two apart anyway: results are the same bit for bit, and the input is free one op earlier.
    """
    wanted = {CONVOLUTION_BACKWARD, *SHAPE_ONLY}
    return _Splitter(graph).run() if any(op.target in wanted for op in graph.ops) else graph


def _frozen(op: GraphOp) -> bool:
    """Return whether a convolution's derivative is not that of its weight: of its input, it takes the shape alone."""
    return op.target == CONVOLUTION_BACKWARD and not op.args[10][1]


class _Splitter(Rebuild):
    def __init__(self, graph: JointGraph) -> None:
        super().__init__(graph)
        self._outputs = {graph.base(value) for value in graph.outputs}
        self._soon: set[int] = set()
        """Bases that the derivative of the op that made them reads as they are."""
        for op in graph.backward_ops:
            at = 1 if _frozen(op) else SHAPE_ONLY.get(op.target, -1)
            args = [arg for position, arg in enumerate(op.args) if position != at]
            for base in {graph.base(value) for value in refs((args, op.kwargs))}:
                made = self.values[base].op
                if made is not None and made == op.gradient_of and reads_bits(graph, op, base) is None:
                    self._soon.add(base)

    def run(self) -> JointGraph:
        for op in self.graph.ops:
            if op.target == CONVOLUTION_BACKWARD:
                self._convolution(op)
            elif op.target in SHAPE_ONLY:
                args, at = list(op.args), SHAPE_ONLY[op.target]
                args[at] = self._stand_in(op, args[0], args[at], dense=False)
                self.add(op, args=tuple(args))
            else:
                self.add(op)
        return self.finished()

    def _convolution(self, op: GraphOp) -> None:
        """Return the weight's and the bias's part, then the input's."""
        mask = op.args[10]
        shown = self._stand_in(op, op.args[0], op.args[1]) if _frozen(op) else op.args[1]
        self._part(op, shown, [False, mask[1], mask[2]])
        if mask[0]:
            view = None if _frozen(op) else self._view(op, op.args[0], op.args[1], dense=True)
            self._part(op, view or shown, [True, False, False])

    def _part(self, op: GraphOp, read: Ref, part: list[bool]) -> None:
        if any(part):
            args = (op.args[0], read, *op.args[2:10], part)
            outputs = tuple(value if wanted else None for value, wanted in zip(op.outputs, part, strict=True))
            makes = tuple(v for v in outputs if v is not None and self.values[v].base == v)
            self.add(op, args=args, outputs=outputs, makes=makes, scratch=self._scratch(op, args))

    def _scratch(self, op: GraphOp, args: tuple[Any, ...]) -> int:
        """Return the workspace of one part: each reorders its own operands, where the whole op did so one after the
        other."""
        tensors = map_refs(args, lambda value: _without_data(self.values[value]))
        return transient_bytes(op.target, tensors, {}, None) + NUMBERS

    # -- stand-ins for arguments

    def _stand_in(self, op: GraphOp, gradient: Ref, argument: Ref, *, dense: bool = True) -> Ref:
        """Return a value for an argument of which only the shape is read: a view of the gradient, else new memory.

        The argument itself where it has to be there anyway, now or as soon as its gradient is made.
        """
        wanted = self.values[argument.value]
        if math.prod(wanted.shape) == 0:
            return argument
        view = self._view(op, gradient, argument, dense=dense)
        if view is not None:
            return view
        if self.values[wanted.base].kind in RESIDENT or wanted.base in self._outputs | self._soon:
            return argument
        size = _reach(wanted.shape, wanted.stride) * itemsize(wanted.dtype)
        number = self.value(f"{wanted.name}_shape", wanted, bytes=size)
        self.add(
            GraphOp(
                -1 - number, "aten.new_empty_strided.default", (gradient, list(wanted.shape), list(wanted.stride)),
                {"dtype": getattr(torch, wanted.dtype)}, op.phase, (number,), False, (), (number,), layer=op.layer,
                where=op.where,
            )
        )  # fmt: skip
        return Ref(number)

    def _view(self, op: GraphOp, gradient: Ref, argument: Ref, *, dense: bool) -> Ref | None:
        """Return a view of the gradient with the argument's shape, and with its strides too where it is to be dense."""
        wanted, base = self.values[argument.value], self.graph.base(gradient.value)
        owner = self.values[base]
        dense = dense or not is_contiguous(wanted)  # the kernel takes the layout, too
        stride = wanted.stride if dense else (0,) * len(wanted.shape)
        fits = _reach(wanted.shape, stride) * itemsize(wanted.dtype) <= owner.bytes
        if {self.values[gradient.value].dtype, owner.dtype} != {wanted.dtype} or not fits:
            return None
        number = self.value(f"{wanted.name}_shape", wanted, base=base, bytes=0, stride=stride)
        self.add(
            GraphOp(
                -1 - number, "aten.as_strided.default", (gradient, list(wanted.shape), list(stride), 0), {}, op.phase,
                (number,), False, (base,), (), layer=op.layer, where=op.where,
            )
        )  # fmt: skip
        return Ref(number)


def _reach(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements of the memory that a tensor looks into, from its first to its last."""
    return 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))


def _without_data(value: Value) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride, dtype=getattr(torch, value.dtype), device="meta")
