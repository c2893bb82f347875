"""Normalize inputs of eight bits on the device, where they are read.

What a step computes of such an input first is a cast, and mostly a sum and a product with constants: together a factor
and an addend for each channel. Convolutions and linear layers apply these to each byte as they read it, so that the
input in floats is never stored; for other ops a buffer is normalized, which can be computed again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from memplan.exporting.lowering import convolution_splitting as conv
from memplan.exporting.lowering.device_graph import ARENA_INPUT, Lowering, first_output
from memplan.planning.graph.editor import Rebuild
from memplan.planning.graph.joint_graph import GraphOp, JointGraph, Ref, Value
from memplan.planning.graph.op_schema import arguments_of, short

NORMALIZE = "memplan.normalize.default"
"""``factor[c] * x + addend[c]`` of bytes, with one number for all channels or one for each.

An op that normalizes the bytes of its operand as it reads them has both constants in ``kwargs["bytes"]``.
"""
BYTES = ("uint8", "int8")


@dataclass(frozen=True, slots=True)
class Affine:
    """A value that is a byte input times a factor plus an addend."""

    x: int
    """Id of the byte input."""
    factor: torch.Tensor
    addend: torch.Tensor
    """Like the factor of shape (), or (C, 1, ...): a number for each channel."""


def normalization(low: Lowering, op: GraphOp) -> bool:
    """Add a kernel for an op whose result is a byte input times a factor plus an addend: it computes the result from
    the bytes. Return False, with nothing added, for another op."""
    if not op.target.startswith("aten.") or not op.args or not isinstance(op.args[0], Ref):
        return False
    result = _cast(low, op) or _scaled_or_shifted(low, op)
    if result is None:
        return False
    output, constants = first_output(op), list[Ref]()
    for name, tensor in (("factor", result.factor), ("addend", result.addend)):
        by_channel = tensor.reshape(-1).float()
        constant = low.value(name, low.values[output], shape=tuple(by_channel.shape), op=None)
        low.make_constant(constant, by_channel)
        constants.append(Ref(constant))
    low.normalized_inputs[output] = result
    low.change(output, stride=conv.contiguous_strides(low.values[output].shape))
    low.call(op, NORMALIZE, (Ref(result.x), *constants), (output,))
    return True


def _cast(low: Lowering, op: GraphOp) -> Affine | None:
    """Return the affine form of the result if the op casts a byte input to float32, else None."""
    x = low.values[op.args[0].value]
    if op.target != "aten._to_copy.default" or low.torch_dtypes[first_output(op)] != "float32":
        return None
    if x.kind != "input" or x.dtype not in BYTES:
        return None
    one = torch.ones((), dtype=torch.float64)
    return Affine(x.id, factor=one, addend=torch.zeros_like(one))


def _scaled_or_shifted(low: Lowering, op: GraphOp) -> Affine | None:
    """Return the affine form of the result if the op adds, subtracts, multiplies or divides by a constant and its first
    operand has an affine form; else None."""
    operand, name = low.normalized_inputs.get(op.args[0].value), short(op.target)
    if operand is None or name not in ("add", "sub", "mul", "div"):
        return None
    arguments = arguments_of(op.target, op.args, op.kwargs)
    number = _constant(low, arguments["other"], low.shape(op.args[0]))
    if number is None or arguments.get("rounding_mode") is not None:
        return None
    if name in ("mul", "div"):
        factor = number if name == "mul" else 1 / number
        return Affine(operand.x, operand.factor * factor, operand.addend * factor)
    shift = number * arguments.get("alpha", 1) * (1 if name == "add" else -1)
    # a number for each channel in both
    factor, addend = torch.broadcast_tensors(operand.factor, operand.addend + shift)
    return Affine(operand.x, factor, addend)


def _constant(low: Lowering, other: Any, shape: tuple[int, ...]) -> torch.Tensor | None:
    """Return an operand as a tensor in float64, of one number, or of a number for each channel as (C, 1, ...).

    None if the operand is neither a number nor such a constant. `shape` is that of the other operand, (N, C, ...).
    """
    if not isinstance(other, Ref):
        return torch.tensor(float(other), dtype=torch.float64)
    tensor = low.constants.get(other.value)
    if tensor is None or len(tensor.shape) > len(shape):
        return None
    if tensor.numel() == 1:
        return tensor.double().reshape(())
    sizes = (1,) * (len(shape) - len(tensor.shape)) + tuple(tensor.shape)
    by_channel = len(shape) > 1 and sizes == (1, shape[1], *[1] * (len(shape) - 2))
    return tensor.double().reshape(sizes[1:]) if by_channel else None


def with_direct_reads(graph: JointGraph, low: Lowering) -> JointGraph:
    """Let kernels that can normalize bytes as they read them read the inputs, in place of normalized buffers."""
    normalize_ops = {first_output(op): op for op in graph.ops if op.target == NORMALIZE}
    if not normalize_ops:
        return graph
    rebuild = Rebuild(graph)
    for op in graph.ops:
        normalized_read = _normalized_read(graph, op, normalize_ops)
        if normalized_read is None:
            rebuild.add(op)
            continue
        position, operand, normalize_op = normalized_read
        x, factor_and_addend = normalize_op.args[0], normalize_op.args[1:]
        if operand.is_view:  # the kernel gets the same view of the bytes
            view = rebuild.value(operand.name, operand, base=x.value, dtype=graph.values[x.value].dtype, op=None)
            if operand.id in low.storage_offsets:
                low.storage_offsets[view] = low.storage_offsets[operand.id]
            rebuild.add(
                replace(
                    op, index=-1 - len(rebuild.ops), target="aten.alias.default", args=(x,), kwargs={}, outputs=(view,),
                    makes=(), overwrites=(), random=False, gradient_of=None,
                )
            )  # fmt: skip
            x = Ref(view)
        args = (*op.args[:position], x, *op.args[position + 1 :])
        rebuild.add(op, args=args, kwargs={**op.kwargs, "bytes": factor_and_addend})
    return rebuild.finished()


def _normalized_read(
    graph: JointGraph, op: GraphOp, normalize_ops: Mapping[int, GraphOp]
) -> tuple[int, Value, GraphOp] | None:
    """Return the position and value of an operand that the kernel of `op` can read as bytes, and the op that normalizes
    these; None if there is none."""
    position = _byte_operand_position(op)
    if position is None:
        return None
    operand = graph.values[op.args[position].value]
    normalize_op = normalize_ops.get(operand.base)
    if normalize_op is None or not _knows_channels(graph, op, operand, normalize_op):
        return None
    return position, operand, normalize_op


def _byte_operand_position(op: GraphOp) -> int | None:
    """Return the position of the argument that an op's kernel can read as bytes and normalize (see `NORMALIZE`): the
    input of a convolution or linear layer, in the forward pass or for its weight's gradient. None if it cannot."""
    if op.target == "aten.mm.default":  # (input, weight) or, for the weight's gradient, (output's gradient, input)
        return 1 if op.phase == "backward" else 0
    # the weight's gradient reads (output's gradient, input); addmm has the bias first
    return {conv.GATHER: 0, conv.WEIGHT_GRADIENT: 1, "aten.addmm.default": 1}.get(op.target)


def _knows_channels(graph: JointGraph, op: GraphOp, operand: Value, normalize_op: GraphOp) -> bool:
    """Return whether the kernel of `op` knows which factor and addend each byte has. Kernels of convolutions know the
    channel, except of a view; matrix products take one number for all channels."""
    if op.target in (conv.GATHER, conv.WEIGHT_GRADIENT):
        return not operand.is_view
    factor = normalize_op.args[1]
    return graph.values[factor.value].shape == (1,)


def inputs_with_normalized_buffer(graph: JointGraph) -> frozenset[int]:
    """Return the byte inputs of which normalized buffers are computed."""
    input_of: dict[int, int] = {first_output(op): op.args[0].value for op in graph.ops if op.target == ARENA_INPUT}
    normalized: list[int] = [op.args[0].value for op in graph.ops if op.target == NORMALIZE]
    return frozenset(input_of.get(value, value) for value in normalized)
