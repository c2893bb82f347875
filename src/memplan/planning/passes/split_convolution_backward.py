"""Free arguments of backward ops whose data the kernel does not read, and split a convolution's derivative in two."""

from __future__ import annotations

import math
from typing import Any

import torch

from memplan.planning.graph.editor import Rebuild
from memplan.planning.graph.joint_graph import RESIDENT, GraphOp, JointGraph, Ref, map_refs, refs
from memplan.planning.graph.op_schema import NUMBER_TENSOR_BYTES, is_contiguous, itemsize
from memplan.planning.graph.tensor_like import spanned_elements
from memplan.planning.levers.chunk_convolutions import meta_tensor
from memplan.planning.levers.encode import reads_bits
from memplan.trace.semantics.cpu.table import transient_bytes

CONVOLUTION_BACKWARD = "aten.convolution_backward.default"
_NORM = "aten.native_batch_norm_backward.default"

SHAPE_ARGUMENT = {
    f"aten.{name}_backward.default": 1 for name in (
        "max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d",
        "_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d", "reflection_pad1d", "reflection_pad2d",
        "reflection_pad3d", "replication_pad1d", "replication_pad2d", "replication_pad3d",
    )
}  # fmt: skip
"""Position of the argument whose shape is all that the kernel reads, by op."""
COPIED_ON_CARD = frozenset({"aten.avg_pool2d_backward.default", "aten.max_pool2d_with_indices_backward.default"})
"""Of these, ops that copy this argument on a card if it is not contiguous (AveragePool2d.cu, DilatedMaxPool2d.cu)."""


def without_unread_tensors(target: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return an op's arguments with None for tensors that its kernel does not read: a training batch norm's derivative
    reads the statistics of the batch, not the running statistics."""
    if target != _NORM:
        return args
    grad_out, input_, weight, _, _, save_mean, save_invstd, train, *others = args
    return (grad_out, input_, weight, None, None, save_mean, save_invstd, train, *others) if train else args


def split(graph: JointGraph) -> JointGraph:
    """Return the graph with each convolution's derivative as two ops, the weight's before the input's.

    The kernels compute the two parts separately anyway: results are the same bit for bit, and the input is freed an op
    earlier. An argument that is read for its shape alone is replaced by a view of the gradient or, if that is too
    small, by uninitialized memory, which a pooling's derivative overwrites.
    """
    targets = {CONVOLUTION_BACKWARD, *SHAPE_ARGUMENT}
    return _Splitter(graph).run() if any(op.target in targets for op in graph.ops) else graph


def _is_weight_frozen(op: GraphOp) -> bool:
    """Return whether a convolution's derivative computes no gradient of the weight: it reads only the input's shape."""
    if op.target != CONVOLUTION_BACKWARD:
        return False
    _, computes_weight_gradient, _ = op.args[10]  # output_mask
    return not computes_weight_gradient


class _Splitter(Rebuild):
    """Rebuilds a graph as `split` describes."""

    def __init__(self, graph: JointGraph) -> None:
        super().__init__(graph)
        self._outputs = {graph.base(value) for value in graph.outputs}
        """Values that own the memory of the step's outputs."""
        self._read_by_own_gradient: set[int] = set()
        """Bases that the derivative of the op that computed them reads: they are alive until then."""
        for op in graph.backward_ops:
            # position of the argument whose shape alone is read
            shape_argument = 1 if _is_weight_frozen(op) else SHAPE_ARGUMENT.get(op.target, -1)
            args = [arg for position, arg in enumerate(op.args) if position != shape_argument]
            for base in {graph.base(value) for value in refs((args, op.kwargs))}:
                maker = self.values[base].op
                if maker is not None and maker == op.gradient_of and reads_bits(graph, op, base) is None:
                    self._read_by_own_gradient.add(base)

    def run(self) -> JointGraph:
        """Add every op, with convolutions' derivatives split and arguments replaced that are read for their shape."""
        for op in self.graph.ops:
            if op.target == CONVOLUTION_BACKWARD:
                gradient, input_, (of_input, of_weight, of_bias) = op.args[0], op.args[1], op.args[10]  # output_mask
                frozen = _is_weight_frozen(op)
                if frozen:
                    input_ = self._shape_argument(op, gradient, input_)
                self._add_part(op, input_, [False, of_weight, of_bias])  # first: it frees the input
                if of_input:
                    dense = not self._takes_sizes_alone(op)
                    view = None if frozen else self._view_of_gradient(op, gradient, input_, dense=dense)
                    self._add_part(op, view or input_, [True, False, False])
            elif op.target in SHAPE_ARGUMENT:
                args, position = list(op.args), SHAPE_ARGUMENT[op.target]
                dense = self.graph.is_on_card and op.target in COPIED_ON_CARD
                args[position] = self._shape_argument(op, args[0], args[position], dense=dense)
                self.add(op, args=tuple(args))
            else:
                self.add(op)
        return self.finished()

    def _add_part(self, op: GraphOp, input_: Ref, mask: list[bool]) -> None:
        """Add the part of a convolution's derivative with the gradients in ``mask`` (input, weight, bias), if any."""
        if not any(mask):
            return
        args = (op.args[0], input_, *op.args[2:10], mask)
        outputs = tuple(value if computed else None for value, computed in zip(op.outputs, mask, strict=True))
        makes = tuple(value for value in outputs if value is not None and self.values[value].base == value)
        tensors = map_refs(args, lambda value: meta_tensor(self.values[value]))
        # each part reorders its own operands
        scratch = transient_bytes(op.target, tensors, {}, result=None) + NUMBER_TENSOR_BYTES
        self.add(op, args=args, outputs=outputs, makes=makes, scratch=scratch)

    def _takes_sizes_alone(self, op: GraphOp) -> bool:
        """Return whether the input's derivative takes nothing but the sizes of the input, which may then have strides
        of 0, as torch.nn.grad.conv2d_input has it: on a card, where cuDNN's convolutions make the input contiguous for
        the weight's derivative only (ConvBackend::Cudnn in aten/src/ATen/native/Convolution.cpp).

        Not for convolutions with groups, some of which kernels of torch's own compute. Strides of 0 are read as
        contiguous ones, so those of the input must not look like channels last (those of a single channel may).
        """
        input_, groups = self.values[op.args[1].value], op.args[9]
        return self.graph.is_on_card and groups == 1 and is_contiguous(input_)

    # -- replacements of arguments

    def _shape_argument(self, op: GraphOp, gradient: Ref, argument: Ref, *, dense: bool = True) -> Ref:
        """Return a replacement for an argument of a backward op whose shape is all that is read.

        This is a view of the gradient if it fits (see `_view_of_gradient`). Otherwise it is the argument itself if it
        is alive anyway, at this op or until its own derivative, and new memory if not.

        ``dense``: whether a view has the argument's strides, see there.
        """
        original = self.values[argument.value]
        if math.prod(original.shape) == 0:
            return argument
        view = self._view_of_gradient(op, gradient, argument, dense=dense)
        if view is not None:
            return view
        if self.values[original.base].kind in RESIDENT or original.base in self._outputs | self._read_by_own_gradient:
            return argument
        size = spanned_elements(original.shape, original.stride) * itemsize(original.dtype)
        memory = self.value(f"{original.name}_shape", original, bytes=size)
        self.add(GraphOp(
            index=-1 - memory, target="aten.new_empty_strided.default",
            args=(gradient, list(original.shape), list(original.stride)),
            kwargs={"dtype": getattr(torch, original.dtype)}, phase=op.phase, outputs=(memory,), returns_tuple=False,
            reads=(), makes=(memory,), layer=op.layer, where=op.where,
        ))  # fmt: skip
        return Ref(memory)

    def _view_of_gradient(self, op: GraphOp, gradient: Ref, argument: Ref, *, dense: bool) -> Ref | None:
        """Return a view of the gradient with the argument's shape; None if the gradient's memory is too small or of
        another dtype. ``dense``: the view has the argument's strides, else all of its elements are the same."""
        original, base = self.values[argument.value], self.graph.base(gradient.value)
        owner = self.values[base]
        dense = dense or not is_contiguous(original)  # the kernel reads its layout, too
        stride = original.stride if dense else (0,) * len(original.shape)
        fits = spanned_elements(original.shape, stride) * itemsize(original.dtype) <= owner.bytes
        if {self.values[gradient.value].dtype, owner.dtype} != {original.dtype} or not fits:
            return None
        view = self.value(f"{original.name}_shape", original, base=base, bytes=0, stride=stride)
        self.add(GraphOp(
            index=-1 - view, target="aten.as_strided.default",
            args=(gradient, list(original.shape), list(stride), 0), kwargs={}, phase=op.phase, outputs=(view,),
            returns_tuple=False, reads=(base,), makes=(), layer=op.layer, where=op.where,
        ))  # fmt: skip
        return Ref(view)
