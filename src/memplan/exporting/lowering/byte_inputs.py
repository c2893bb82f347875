"""Normalize inputs of eight bits on the device, where they are read.

What a step computes of such an input first is a cast, and mostly a sum and a product with constants: together a factor
and an addend for each channel. Convolutions and linear layers apply these to each byte as they read it, so that the
input in floats is never stored; for other ops a buffer is normalized, which can be computed again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from memplan.exporting.lowering import convolution_splitting as conv
from memplan.exporting.lowering.device_graph import ARENA_INPUT, Lowering, output_of
from memplan.planning.graph.editor import Rebuild
from memplan.planning.graph.joint_graph import GraphOp, JointGraph, Ref, Value
from memplan.planning.graph.op_schema import arguments_of, short

NORMALIZE = "memplan.normalize.default"
"""``factor[c] * x + addend[c]`` of bytes, with one number for all channels or one for each."""
BYTES = ("uint8", "int8")


@dataclass(frozen=True, slots=True)
class Affine:
    """A value that is a byte input times a factor plus an addend."""

    x: int
    factor: torch.Tensor
    addend: torch.Tensor


def normalization(low: Lowering, op: GraphOp) -> bool:
    """Add the kernel that computes an op from the bytes of an input; return whether the op is a normalization."""
    if not op.target.startswith("aten.") or not op.args or not isinstance(op.args[0], Ref):
        return False
    result = _cast(low, op) or _changed(low, op)
    if result is None:
        return False
    output, constants = output_of(op), list[Ref]()
    for name, tensor in (("factor", result.factor), ("addend", result.addend)):
        flat = tensor.reshape(-1).float()
        constants.append(Ref(low.value(name, low.values[output], shape=tuple(flat.shape), op=None)))
        low.make_constant(constants[-1].value, flat)
    low.affine[output] = result
    low.change(output, stride=conv.contiguous(low.values[output].shape))
    low.call(op, NORMALIZE, (Ref(result.x), *constants), (output,))
    return True


def _cast(low: Lowering, op: GraphOp) -> Affine | None:
    """Return the affine form of the result if the op casts a byte input to float32, else None."""
    x = low.values[op.args[0].value]
    if op.target != "aten._to_copy.default" or low.dtypes[output_of(op)] != "float32":
        return None
    one = torch.ones((), dtype=torch.float64)
    return Affine(x.id, one, 0 * one) if x.kind == "input" and x.dtype in BYTES else None


def _changed(low: Lowering, op: GraphOp) -> Affine | None:
    """Return the affine form of the result if the op adds, subtracts, multiplies or divides by a constant and its first
    operand has an affine form; else None."""
    before, name = low.affine.get(op.args[0].value), short(op.target)
    if before is None or name not in ("add", "sub", "mul", "div"):
        return None
    arguments = arguments_of(op.target, op.args, op.kwargs)
    number = _constant(low, arguments["other"], low.shape(op.args[0]))
    if number is None or arguments.get("rounding_mode") is not None:
        return None
    if name in ("mul", "div"):
        factor = number if name == "mul" else 1 / number
        return Affine(before.x, before.factor * factor, before.addend * factor)
    shift = number * arguments.get("alpha", 1) * (1 if name == "add" else -1)
    return Affine(before.x, before.factor + 0 * shift, before.addend + shift)  # both of the same shape


def _constant(low: Lowering, other: Any, shape: tuple[int, ...]) -> torch.Tensor | None:
    """Return an operand as a tensor in float64, of one number, or of a number for each channel as (C, 1, ...).

    None if the operand is neither a number nor such a constant. `shape` is that of the other operand, (N, C, ...).
    """
    if not isinstance(other, Ref):
        return torch.tensor(float(other), dtype=torch.float64)
    tensor = low.known.get(other.value)
    if tensor is None or len(tensor.shape) > len(shape):
        return None
    if tensor.numel() == 1:
        return tensor.double().reshape(())
    sizes = (1,) * (len(shape) - len(tensor.shape)) + tuple(tensor.shape)
    by_channel = len(shape) > 1 and sizes == (1, shape[1], *[1] * (len(shape) - 2))
    return tensor.double().reshape(sizes[1:]) if by_channel else None


def with_direct_reads(graph: JointGraph, low: Lowering) -> JointGraph:
    """Let kernels that can normalize bytes as they read them read the inputs, in place of normalized buffers."""
    normalized = {output_of(op): op for op in graph.ops if op.target == NORMALIZE}
    if not normalized:
        return graph
    rebuild = Rebuild(graph)
    for op in graph.ops:
        position = _position(op)
        read = None if position is None else graph.values[op.args[position].value]
        source = None if read is None else normalized.get(read.base)
        if position is None or read is None or source is None or not _can_read(graph, op, read, source):
            rebuild.add(op)
            continue
        x, constants = source.args[0], source.args[1:]
        if read.is_view:  # the kernel gets the same view of the bytes
            part = rebuild.value(read.name, read, base=x.value, dtype=graph.values[x.value].dtype, op=None)
            low.offsets.update({part: low.offsets[read.id]} if read.id in low.offsets else {})
            rebuild.add(
                replace(
                    op, index=-1 - len(rebuild.ops), target="aten.alias.default", args=(x,), kwargs={}, outputs=(part,),
                    makes=(), overwrites=(), random=False, gradient_of=None,
                )
            )  # fmt: skip
            x = Ref(part)
        args = (*op.args[:position], x, *op.args[position + 1 :])
        rebuild.add(op, args=args, kwargs={**op.kwargs, "bytes": constants})
    return rebuild.finished()


def _position(op: GraphOp) -> int | None:
    """Return the position of the argument that an op's kernel can read as bytes, with factor and addend in
    ``kwargs["bytes"]``; None if it cannot. Of a weight's gradient it is the second."""
    if op.target == "aten.mm.default":
        return int(op.phase == "backward")
    return {conv.GATHER: 0, conv.WEIGHT_GRADIENT: 1, "aten.addmm.default": 1}.get(op.target)


def _can_read(graph: JointGraph, op: GraphOp, read: Value, source: GraphOp) -> bool:
    """Return whether the kernel knows the channel of each byte: a product takes one number for all channels."""
    if op.target in (conv.GATHER, conv.WEIGHT_GRADIENT):
        return not read.is_view
    return graph.values[source.args[1].value].shape == (1,)


def buffered(graph: JointGraph) -> frozenset[int]:
    """Return the byte inputs of which normalized buffers are computed."""
    in_arena: dict[int, int] = {output_of(op): op.args[0].value for op in graph.ops if op.target == ARENA_INPUT}
    read: list[int] = [op.args[0].value for op in graph.ops if op.target == NORMALIZE]
    return frozenset(in_arena.get(value, value) for value in read)
