"""Smaller forms in which a forward value can be kept for the backward pass. Exact ones:

* ``bits``: a bool tensor, eight elements a byte.
* ``index``: indices of which the range is known, as the smallest integers that hold it.
* ``sign`` (not <= 0) and ``positive`` (> 0; nan tells them apart): of a value that a gradient compares with 0, only
  the answers, as bits. The value itself cannot be got back: they serve the ops that read the answer (``direct``),
  each of which has a form that reads bits.

Bits are in the order in which the value lies in memory.

And, where it is allowed to lose something (``save``; grade lossy), of a value of floating point that is more than
compared with 0:

* ``bfloat16``: every element rounded to eight significant bits, of the same range.
* ``int8``: eight bits an element, times a scale for every GROUP of them: see `memplan.planning.ops.int8`. ``uint8``
  for what is never below 0, where whatever is above 0 stays so. For readers to whom an error of so much of the largest
  neighbour is no more than that (EIGHT_BITS); bfloat16 for the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from memplan._bytes import format_bytes
from memplan._text import format_seconds
from memplan.planning.graph.joint_graph import RESIDENT, GraphOp, JointGraph, KeptForm, Ref, Value
from memplan.planning.graph.op_schema import NUMBERS, arguments_of, is_dense, itemsize
from memplan.planning.graph.precision import Save
from memplan.planning.levers.lever import Called, Grade, Lever, PlannedStep, Reason, Situation
from memplan.planning.ops.pieces import GROUP, most, packed, quantized_bytes, quantized_piece
from memplan.trace.records import HOST

NAME = "encode"
_LATER = -1
"""In place of ids that the registry gives."""

WORTHWHILE = 4096
"""Bytes that a value must at least have to be encoded."""

INTEGERS = (("uint8", 1 << 8), ("int16", 1 << 15), ("int32", 1 << 31))
"""Narrow integers, and the numbers below which each holds."""


@dataclass(frozen=True, slots=True)
class Direct:
    """An op that can read bits instead of one of its operands."""

    operand: str
    codec: str
    target: str
    """The form that has the same arguments, bits in place of that operand. With an underscore after its name, it
    works in place of its first argument."""
    same: str = "grad_output"
    """The operand that has to be laid out as the encoded value: the bits are in that order."""
    buffers: int = 1
    """Pieces of the result's dtype that it holds at once."""
    suits: Callable[[Mapping[str, Any]], bool] = lambda arguments: True


DIRECT: Mapping[str, Direct] = {
    "aten.threshold_backward.default": Direct(
        "self", "sign", "memplan.threshold_backward_bits", suits=lambda arguments: arguments["threshold"] == 0
    ),
    "aten.leaky_relu_backward.default": Direct("self", "positive", "memplan.leaky_relu_backward_bits"),
    "aten.native_dropout_backward.default": Direct("mask", "bits", "memplan.native_dropout_backward_bits", buffers=2),
    "aten.masked_fill.Scalar": Direct("mask", "bits", "memplan.masked_fill_bits", same="self", buffers=0),
}
"""Ops that read bits."""


_Bound = Callable[[Mapping[str, Any], tuple[int, ...]], int]


def _places(dims: int) -> _Bound:
    return lambda _, shape: prod(shape[-dims:])


def _along(arguments: Mapping[str, Any], shape: tuple[int, ...]) -> int:
    dim = arguments.get("dim", -1)
    return prod(shape) if dim is None or not shape else shape[dim]


INDICES: Mapping[str, tuple[int, _Bound]] = {
    "aten.adaptive_max_pool2d.default": (1, _places(2)),
    "aten.adaptive_max_pool3d.default": (1, _places(3)),
    "aten.argmax.default": (0, lambda a, shape: _along({"dim": None} | dict(a), shape)),
    "aten.argmin.default": (0, lambda a, shape: _along({"dim": None} | dict(a), shape)),
    "aten.max.dim": (1, _along),
    "aten.max_pool2d_with_indices.default": (1, _places(2)),
    "aten.max_pool3d_with_indices.default": (1, _places(3)),
    "aten.min.dim": (1, _along),
    "aten.sort.default": (1, _along),
    "aten.topk.default": (1, _along),
}
"""Ops with indices among their results: which result, and the number that every index is below."""


LOSSY = ("bfloat16", "int8", "uint8")
"""Codecs that do not give back just what was encoded."""


_GENTLE = """
    addmm.default avg_pool2d_backward.default avg_pool3d_backward.default bmm.default convolution_backward.default
    gelu_backward.default hardswish_backward.default hardtanh_backward.default leaky_relu_backward.default
    max_pool2d_with_indices_backward.default max_pool3d_with_indices_backward.default mm.default mul.Tensor
    native_batch_norm_backward.default native_group_norm_backward.default native_layer_norm_backward.default
    sigmoid_backward.default silu_backward.default tanh_backward.default threshold_backward.default
"""
EIGHT_BITS = frozenset(f"aten.{name}" for name in _GENTLE.split())
"""Ops of the backward pass that can read what eight bits give back. Not what divides by it or takes its exponential."""

_STEEP = frozenset(
    f"aten.{name}" for name in ("div.Tensor", "exp.default", "log.default", "log1p.default", "pow.Tensor_Scalar",
    "reciprocal.default", "rsqrt.default", "sqrt.default", "_log_softmax.default", "_softmax.default",
    "logsumexp.default", "_scaled_dot_product_flash_attention_for_cpu.default")
)  # fmt: skip
"""Ops of the forward pass that make much of a small error, were they run again."""

_NEVER_BELOW_0 = frozenset(f"aten.{name}.default" for name in ("relu", "sigmoid", "_softmax", "exp"))


class Encode(Lever):
    """Keep a value in a smaller form: bits of what is only compared, narrow integers, or, where lossy plans are
    allowed, fewer bits an element."""

    name = NAME
    verbs = ("encode", "decode")
    comments = ("encodes", "decodes")
    switch = "encodings"

    def why_not(self, graph: JointGraph, value: Value, situation: Situation) -> str:
        """Say why a value has no smaller form; empty where it has one."""
        return _Encodings(graph, situation.save).why_not(value)

    def forms(self, graph: JointGraph, situation: Situation) -> Iterator[tuple[KeptForm, Value]]:
        """Yield the encodings that are worth having: one a value at most."""
        found = _Encodings(graph, situation.save)
        for base in sorted(found.readers):
            made = found.of(graph.values[base])
            if made is not None:
                yield made

    def store(self, graph: JointGraph, form: KeptForm) -> Called:
        """Return the call that makes the encoded form of a value."""
        if form.how in ("index", "bfloat16"):
            return _converted(form.value, graph.values[form.kept].dtype)
        if form.how in LOSSY:
            return "memplan.quantize.default", (Ref(form.value), form.how == "int8"), {}
        return "memplan.pack_bits.default", (Ref(form.value), form.how), {}

    def fetch(self, graph: JointGraph, form: KeptForm) -> Called:
        """Return the call that makes the value again, of its encoded form."""
        value = graph.values[form.value]
        if form.how in ("index", "bfloat16"):
            return _converted(form.kept, value.dtype)
        if form.how in LOSSY:
            how = value.shape, value.stride, getattr(torch, value.dtype), form.how == "int8"
            return "memplan.dequantize.default", (Ref(form.kept), *how), {}
        return "memplan.unpack_bits.default", (Ref(form.kept), value.shape, value.stride), {}

    def read_directly(self, graph: JointGraph, form: KeptForm, op: GraphOp, *, in_place: bool) -> Called:
        """Return the call of an op of `DIRECT` that reads bits.

        In place, its result goes over the operand that `DIRECT` names ``same``, its first one.
        """
        direct = DIRECT[op.target]
        arguments = arguments_of(op.target, op.args, op.kwargs) | {direct.operand: Ref(form.kept)}
        return f"{direct.target}{'_' if in_place else ''}.default", tuple(arguments.values()), {}

    def lowered(self) -> Mapping[Any, Callable[..., Any]]:
        """Return what stands for its ops in fused kernels. What packs bits runs as it is."""
        ops: Any = torch.ops.memplan
        return {
            ops.unpack_bits.default: _unpacked,
            ops.threshold_backward_bits.default: _threshold_backward,
            ops.leaky_relu_backward_bits.default: _leaky_relu_backward,
            ops.native_dropout_backward_bits.default: lambda x, bits, scale: x * _like(bits, x) * scale,
            ops.masked_fill_bits.default: lambda x, bits, value: torch.where(_like(bits, x), value, x),
        }

    def grade(self, form: KeptForm) -> Grade:
        """Return ``lossy`` for the codecs that round."""
        return "lossy" if form.how in LOSSY else "exact"

    def counted(self, values: int, host_bytes: int) -> str:
        """Say how many values are encoded."""
        return f"{values} encoded"

    def reason(self, planned: PlannedStep, form: KeptForm) -> Reason:
        """Say how much smaller the form is, who reads it, and how the value is got back for the others."""
        values = planned.graph.values
        size, smaller = values[form.value].bytes, values[form.kept].bytes
        saved = planned.is_saved(form.value)
        parts = [f"{format_bytes(smaller)} instead of {format_bytes(size)} ({form.how})"]
        direct = planned.direct_readers(form)
        if direct:
            parts.append(f"read as it is by {direct}")
        if saved:
            parts.append("the value itself is kept too")
        needed = planned.needed(form.value)
        if planned.is_recomputed(form.value):
            parts.append(f"for the rest made again in {format_seconds(planned.graph.maker[form.value].rerun.seconds)}")
        elif needed:
            parts.append(needed)
        details = {"codec": form.how, "encoded_bytes": smaller}
        return Reason(0 if saved else max(0, size - smaller), "; ".join(parts), details, self.grade(form))


class _Encodings:
    """Finds the encodings of one graph."""

    def __init__(self, graph: JointGraph, save: Save) -> None:
        self.graph = graph
        self.save: Save = save
        self.readers: dict[int, list[GraphOp]] = defaultdict(list)
        """Backward ops that read each value."""
        for op in graph.backward_ops:
            for base in op.reads:
                self.readers[base].append(op)
        self.steep = {base for op in graph.forward_ops if op.target in _STEEP for base in op.reads}

    def why_not(self, value: Value) -> str:
        """Say why a value has no encoding."""
        maker = self.graph.maker.get(value.id)
        if value.kind != "result" or maker is None or maker.phase != "forward":
            return "the forward pass does not make it"
        if value.bytes < WORTHWHILE:
            return f"it is smaller than {format_bytes(WORTHWHILE)}"
        if value.id in self.graph.irreplaceable:
            return "a call holds its very memory"
        if not is_dense(value) or value.bytes != prod(value.shape) * itemsize(value.dtype):
            return "its memory has gaps"
        return "" if self._made(value, maker) is not None else "no reader can do with fewer bits"

    def of(self, value: Value) -> tuple[KeptForm, Value] | None:
        """Return the encoding of a value, if there is one that is smaller."""
        return None if self.why_not(value) else self._made(value, self.graph.maker[value.id])

    def _made(self, value: Value, maker: GraphOp) -> tuple[KeptForm, Value] | None:
        graph, readers = self.graph, self.readers[value.id]
        made = _lossy(graph, value, maker, readers, self.save, value.id in self.steep)
        made = made or _encoding(graph, value, maker, readers)
        return made if made is not None and made[1].bytes < value.bytes else None


def _lossy(
    graph: JointGraph, value: Value, maker: GraphOp, readers: Sequence[GraphOp], save: Save, steep: bool
) -> tuple[KeptForm, Value] | None:
    """The encoding of a value that is not got back as it was, where there may be one. What is only compared with 0 is
    smaller as bits, and exact."""
    if save == "exact" or value.dtype not in ("float64", "float32", "bfloat16", "float16"):
        return None
    if maker.outputs[0] != value.id:  # statistics, beside what they are of
        return None
    if all(reads_bits(graph, op, value.id) for op in readers) or _is_cast(graph, maker):
        return None
    elements = prod(value.shape)
    if save == "int8" and not steep and all(op.target in EIGHT_BITS for op in readers) and value.dtype != "float64":
        codec = "uint8" if maker.target in _NEVER_BELOW_0 and maker.outputs[0] == value.id else "int8"
        size = quantized_bytes(elements)
        form = _flat(value, codec, size)
        held = min(quantized_piece(elements, value.place), elements)
        scratch = 4 * held + 4 * held * (value.dtype != "float32") + 32 * (1 + held // GROUP) + NUMBERS
        above = 4 * held * (codec == "uint8")
        decoding = scratch if value.dtype != "float32" else NUMBERS
        return KeptForm(NAME, value.id, _LATER, codec, store_scratch=scratch + above, fetch_scratch=decoding), form
    if itemsize(value.dtype) <= 2:
        return None
    form = replace(value, name=f"{value.name}_bfloat16", kind="encoded", bytes=2 * elements, dtype="bfloat16", op=None)
    return KeptForm(NAME, value.id, _LATER, "bfloat16"), form


def _is_cast(graph: JointGraph, maker: GraphOp) -> bool:
    """Whether an op only casts what is there anyway: then it is cast again, for nothing lost and no bytes kept."""
    return maker.target == "aten._to_copy.default" and all(graph.values[v].kind in RESIDENT for v in maker.reads)


def _encoding(
    graph: JointGraph, value: Value, maker: GraphOp, readers: Iterable[GraphOp]
) -> tuple[KeptForm, Value] | None:
    """The one encoding of a value, if there is one, and its encoded form."""
    piece = min(most(value.place), prod(value.shape))
    if value.dtype == "bool":
        direct = [op for op in readers if reads_bits(graph, op, value.id) == "bits"]
        scratch = max((_direct_scratch(graph, op) for op in direct), default=0)
        form = KeptForm(
            NAME, value.id, _LATER, "bits", store_scratch=0 if value.place == HOST else piece * _packing(value.place),
            fetch_scratch=piece, direct=tuple(op.index for op in direct), direct_scratch=scratch,
        )  # fmt: skip
        return form, _flat(value, "bits", packed(prod(value.shape)))
    dtype = _narrow(graph, value, maker)
    if dtype is not None:
        size = value.bytes // itemsize(value.dtype) * itemsize(dtype)
        encoded = replace(value, name=f"{value.name}_index", kind="encoded", bytes=size, dtype=dtype, op=None)
        return KeptForm(NAME, value.id, _LATER, "index"), encoded
    kinds: dict[str, list[GraphOp]] = defaultdict(list)
    for op in readers:
        kind = reads_bits(graph, op, value.id)
        if kind is not None:
            kinds[kind].append(op)
    if not kinds:
        return None
    codec, direct = max(kinds.items(), key=lambda item: len(item[1]))
    form = KeptForm(
        NAME, value.id, _LATER, codec, store_scratch=piece * _packing(value.place) + NUMBERS, whole=False,
        direct=tuple(op.index for op in direct), direct_scratch=max(_direct_scratch(graph, op) for op in direct),
    )  # fmt: skip
    return form, _flat(value, codec, packed(prod(value.shape)))


def _packing(place: str) -> int:
    """Tensors of a byte for each element that are there while a piece is packed. On a card, where numpy does not pack,
    these are the flags, themselves once more where the last byte is not full, their weights, and the bits."""
    return 1 if place == HOST else 4


def _flat(value: Value, codec: str, size: int) -> Value:
    """A row of bytes that stands for a value."""
    return Value(_LATER, f"{value.name}_{codec}", "encoded", _LATER, size, (size,), (1,), "uint8", place=value.place)


def _narrow(graph: JointGraph, value: Value, maker: GraphOp) -> str | None:
    """The smallest integers that hold a value that is the indices of an op."""
    position, bound = INDICES.get(maker.target, (0, None))
    if bound is None or value.dtype != "int64" or maker.outputs[position] != value.id:
        return None
    arguments = arguments_of(maker.target, maker.args, maker.kwargs)
    below = bound(arguments, graph.values[arguments["self"].value].shape)
    return next((dtype for dtype, limit in INTEGERS if below <= limit), None)


def reads_bits(graph: JointGraph, op: GraphOp, value: int) -> str | None:
    """Return the codec of bits that an op can read in place of a value, or None."""
    direct = DIRECT.get(op.target)
    if direct is None:
        return None
    arguments = arguments_of(op.target, op.args, op.kwargs)
    given, beside = arguments[direct.operand], arguments[direct.same]
    if not isinstance(given, Ref) or not isinstance(beside, Ref) or not direct.suits(arguments):
        return None
    read, other, base = graph.values[given.value], graph.values[beside.value], graph.values[value]
    if read.base != value or other.base == value or (read.shape, read.stride) != (other.shape, other.stride):
        return None
    if not is_dense(read) or read.dtype != base.dtype or prod(read.shape) != prod(base.shape):
        return None
    if direct.codec != "bits" and read.dtype != other.dtype:
        return None
    return direct.codec


def _direct_scratch(graph: JointGraph, op: GraphOp) -> int:
    direct = DIRECT[op.target]
    like = graph.values[arguments_of(op.target, op.args, op.kwargs)[direct.same].value]
    return min(most(like.place), prod(like.shape)) * (1 + direct.buffers * itemsize(like.dtype)) + NUMBERS


def _converted(value: int, dtype: str) -> Called:
    return "aten._to_copy.default", (Ref(value),), {"dtype": getattr(torch, dtype)}


# -- for fused kernels


def _unpacked(bits: Tensor, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Flags in the order of memory, seen in the order of dimensions."""
    places = torch.arange(
        8, dtype=torch.int32, device=bits.device
    )  # a tensor of constants would be kept by the kernels
    flags = (bits[:, None].to(torch.int32) >> places).bitwise_and(1).ne(0).view(-1)[: prod(size)]
    order = sorted(range(len(size)), key=lambda dim: (-stride[dim], -size[dim]))
    place = [order.index(dim) for dim in range(len(size))]
    return flags.view([size[dim] for dim in order]).permute(place)


def _like(bits: Tensor, tensor: Tensor) -> Tensor:
    return _unpacked(bits, tensor.shape, tensor.stride())


def _threshold_backward(grad_output: Tensor, bits: Tensor, threshold: float) -> Tensor:
    return torch.where(_like(bits, grad_output), grad_output, 0.0)


def _leaky_relu_backward(grad_output: Tensor, bits: Tensor, slope: float, is_result: bool) -> Tensor:
    return torch.where(_like(bits, grad_output), grad_output, grad_output * slope)
