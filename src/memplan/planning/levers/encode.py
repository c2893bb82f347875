"""Encodings in which a forward value can be saved for the backward pass. Exact ones:

* ``bits``: a bool tensor, eight elements a byte.
* ``index``: indices with a known bound, as the smallest sufficient integer type.
* ``sign`` (not <= 0) and ``positive`` (> 0; they differ for nan): if gradients only compare a value with 0, the results
  of the comparison as bits. The value cannot be decoded: each op that reads the bits has a kernel for them.

Bits are in the memory order of the value.

And lossy ones, if ``save`` allows them, of floating-point values that are not only compared with 0:

* ``bfloat16``: every element rounded to eight significant bits.
* ``int8``: eight bits an element, times a scale for each GROUP of elements: see `memplan.planning.ops.int8`. ``uint8``
  for values that are never below 0; elements above 0 stay above 0. For ops that tolerate an error relative to the
  largest element of the group (EIGHT_BITS); bfloat16 for the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from memplan._bytes import format_bytes, round_to_blocks
from memplan._text import format_seconds
from memplan.planning.graph.joint_graph import RESIDENT, GraphOp, JointGraph, Ref, SavedForm, Value, peak_of
from memplan.planning.graph.op_schema import NUMBER_TENSOR_BYTES, arguments_of, is_dense, itemsize
from memplan.planning.graph.precision import Save
from memplan.planning.levers.lever import Called, Grade, Lever, PlannedStep, Reason, Situation
from memplan.planning.ops.pieces import GROUP, most, packed_bytes, quantized_bytes, quantized_elements_per_piece
from memplan.trace.records import HOST

NAME = "encode"
_ID_TO_ASSIGN = -1
"""Placeholder for an id that the registry assigns."""

SMALLEST_ENCODED_BYTES = 4096
"""Smallest value in bytes that is encoded."""

INTEGERS = (("uint8", 1 << 8), ("int16", 1 << 15), ("int32", 1 << 31))
"""Narrow integer types, each with the exclusive upper bound of its values."""


@dataclass(frozen=True, slots=True)
class BitsReader:
    """A backward op that can read bits instead of one of its operands, by another op of memplan."""

    replaced_operand: str
    """Argument that the bits replace."""
    codec: str
    """``bits``, ``sign`` or ``positive``: see this module's docstring."""
    target: str
    """Op with the same arguments, but bits in place of that operand. Its variant with a trailing underscore writes over
    the first argument."""
    same_layout_operand: str = "grad_output"
    """Argument that must have the layout of the replaced operand: the bits are in that order."""
    temporary_pieces: int = 1
    """Number of temporary pieces of the result's dtype."""
    temporary_pieces_on_card: int | None = None
    """The same on a card; None: as many."""
    suits: Callable[[Mapping[str, Any]], bool] = lambda arguments: True
    """Whether the op can read bits with these arguments, by name."""


BITS_READERS: Mapping[str, BitsReader] = {
    "aten.threshold_backward.default": BitsReader(
        "self", "sign", "memplan.threshold_backward_bits", temporary_pieces=0,
        suits=lambda arguments: arguments["threshold"] == 0,  # the bits compare with 0
    ),
    "aten.leaky_relu_backward.default": BitsReader(
        "self", "positive", "memplan.leaky_relu_backward_bits", temporary_pieces_on_card=0
    ),
    "aten.native_dropout_backward.default": BitsReader(
        "mask", "bits", "memplan.native_dropout_backward_bits", temporary_pieces=2, temporary_pieces_on_card=1
    ),
    "aten.masked_fill.Scalar": BitsReader(
        "mask", "bits", "memplan.masked_fill_bits", same_layout_operand="self", temporary_pieces=0,
    ),
}  # fmt: skip
"""Ops that can read bits, by target."""


_IndexBound = Callable[[Mapping[str, Any], tuple[int, ...]], int]
"""Returns, from an op's arguments and its input's shape, the exclusive upper bound of the indices that it returns."""


def _elements_of_last_dims(dims: int) -> _IndexBound:
    """Return the bound of a pooling's indices: the elements of its input's last ``dims`` dimensions."""
    return lambda _, shape: prod(shape[-dims:])


def _size_of_dim(*, default: int | None) -> _IndexBound:
    """Return the bound of indices along the argument ``dim``, which has this default in the op's schema: the size of
    that dimension; the number of all elements for None."""

    def bound(arguments: Mapping[str, Any], shape: tuple[int, ...]) -> int:
        dim = arguments.get("dim", default)
        return prod(shape) if dim is None or not shape else shape[dim]

    return bound


_POOLS = ("adaptive_max_pool{}d", "max_pool{}d_with_indices")
INDEX_RESULTS: Mapping[str, tuple[int, _IndexBound]] = {
    "aten.argmax.default": (0, _size_of_dim(default=None)),
    "aten.argmin.default": (0, _size_of_dim(default=None)),
    **{f"aten.{name.format(dims)}.default": (1, _elements_of_last_dims(dims)) for name in _POOLS for dims in (2, 3)},
    **{
        f"aten.{name}": (1, _size_of_dim(default=-1)) for name in ("max.dim", "min.dim", "sort.default", "topk.default")
    },
}
"""By op that returns indices: (position of the indices among its results, their bound)."""

LOSSY = ("bfloat16", "int8", "uint8")
"""Codecs that do not restore the value bit for bit."""
_TOLERATE_EIGHT_BITS = """
    addmm.default avg_pool2d_backward.default avg_pool3d_backward.default bmm.default convolution_backward.default
    gelu_backward.default hardswish_backward.default hardtanh_backward.default leaky_relu_backward.default
    max_pool2d_with_indices_backward.default max_pool3d_with_indices_backward.default mm.default mul.Tensor
    native_batch_norm_backward.default native_group_norm_backward.default native_layer_norm_backward.default
    sigmoid_backward.default silu_backward.default tanh_backward.default threshold_backward.default
"""
EIGHT_BITS = frozenset(f"aten.{name}" for name in _TOLERATE_EIGHT_BITS.split())
"""Ops of the backward pass that may read a value decoded from eight bits: none divides by it or exponentiates it."""

_AMPLIFY_ERRORS = frozenset(
    f"aten.{name}" for name in ("div.Tensor", "exp.default", "log.default", "log1p.default", "pow.Tensor_Scalar",
    "reciprocal.default", "rsqrt.default", "sqrt.default", "_log_softmax.default", "_softmax.default",
    "logsumexp.default", "_scaled_dot_product_flash_attention_for_cpu.default")
)  # fmt: skip
"""Ops of the forward pass that amplify a small error of their input when they are recomputed."""

_NEVER_BELOW_0 = frozenset(f"aten.{name}.default" for name in ("relu", "sigmoid", "_softmax", "exp"))


class Encode(Lever):
    """Save a value in a smaller encoding: bits of comparisons, narrow integers, or, lossy, fewer bits an element."""

    name = NAME
    verbs = ("encode", "decode")
    comments = ("encodes", "decodes")
    switch = "encodings"

    def why_not(self, graph: JointGraph, value: Value, situation: Situation) -> str:
        """Return the reason why a value has no smaller encoding, empty if it has an encoding."""
        return _Encodings(graph, situation.save).why_not(value)

    def forms(self, graph: JointGraph, situation: Situation) -> Iterator[tuple[SavedForm, Value]]:
        """Yield at most one encoding for each value that the backward pass reads."""
        encodings = _Encodings(graph, situation.save)
        for base in sorted(encodings.readers):
            encoding = encodings.encoding_of(graph.values[base])
            if encoding is not None:
                yield encoding

    def store(self, graph: JointGraph, form: SavedForm) -> Called:
        """Return the call that encodes a value in the codec ``form.codec`` (see this module's docstring)."""
        if form.codec in ("index", "bfloat16"):
            return _cast_call(form.value, graph.values[form.encoded].dtype)
        if form.codec in LOSSY:
            is_signed = form.codec == "int8"
            return "memplan.quantize.default", (Ref(form.value), is_signed), {}
        return "memplan.pack_bits.default", (Ref(form.value), form.codec), {}

    def fetch(self, graph: JointGraph, form: SavedForm) -> Called:
        """Return the call that decodes a value from the codec ``form.codec`` (see this module's docstring)."""
        value = graph.values[form.value]
        if form.codec in ("index", "bfloat16"):
            return _cast_call(form.encoded, value.dtype)
        if form.codec in LOSSY:
            is_signed = form.codec == "int8"
            layout = value.shape, value.stride, getattr(torch, value.dtype)
            return "memplan.dequantize.default", (Ref(form.encoded), *layout, is_signed), {}
        return "memplan.unpack_bits.default", (Ref(form.encoded), value.shape, value.stride), {}

    def read_directly(self, graph: JointGraph, form: SavedForm, op: GraphOp, *, in_place: bool) -> Called:
        """Return the call of a backward op that reads bits; in place, it writes over its first operand."""
        reader = BITS_READERS[op.target]
        arguments = arguments_of(op.target, op.args, op.kwargs) | {reader.replaced_operand: Ref(form.encoded)}
        return f"{reader.target}{'_' if in_place else ''}.default", tuple(arguments.values()), {}

    def lowered(self) -> Mapping[Any, Callable[..., Any]]:
        """Return decompositions of the ops that read bits. Ops that pack bits run as they are."""
        ops: Any = torch.ops.memplan
        return {
            ops.unpack_bits.default: _unpack,
            ops.threshold_backward_bits.default: _threshold_backward,
            ops.leaky_relu_backward_bits.default: _leaky_relu_backward,
            ops.native_dropout_backward_bits.default: lambda x, bits, scale: x * _flags_like(bits, x) * scale,
            ops.masked_fill_bits.default: lambda x, bits, value: torch.where(_flags_like(bits, x), value, x),
        }

    def grade(self, form: SavedForm) -> Grade:
        """Return ``lossy`` for the codecs that round."""
        return "lossy" if form.codec in LOSSY else "exact"

    def counted(self, values: int, host_bytes: int) -> str:
        """Say how many values are encoded."""
        return f"{values} encoded" if values else ""

    def reason(self, planned: PlannedStep, form: SavedForm) -> Reason:
        """Describe how much smaller the encoding is, which ops read it, and how other ops get the value."""
        values = planned.graph.values
        value_bytes, encoded_bytes = values[form.value].bytes, values[form.encoded].bytes
        is_saved_too = planned.is_saved(form.value)
        parts = [f"{format_bytes(encoded_bytes)} instead of {format_bytes(value_bytes)} ({form.codec})"]
        bits_readers = planned.encoding_readers(form)
        if bits_readers:
            parts.append(f"read as it is by {bits_readers}")
        if is_saved_too:
            parts.append("the value itself is kept too")
        value_readers = planned.value_readers(form.value)
        if planned.is_recomputed(form.value):
            seconds = planned.graph.maker[form.value].recompute_op.seconds
            parts.append(f"for the rest recomputed in {format_seconds(seconds)}")
        elif value_readers:
            parts.append(value_readers)
        details = {"codec": form.codec, "encoded_bytes": encoded_bytes}
        freed = 0 if is_saved_too else max(0, value_bytes - encoded_bytes)
        return Reason(freed, "; ".join(parts), details, self.grade(form))


class _Encodings:
    """Chooses the smaller encoding in which each value of a graph may be saved, from the ops that read it."""

    def __init__(self, graph: JointGraph, save: Save) -> None:
        self.graph = graph
        self.save: Save = save
        self.readers: dict[int, list[GraphOp]] = defaultdict(list)
        """Backward ops that read each value."""
        for op in graph.backward_ops:
            for base in op.reads:
                self.readers[base].append(op)
        self.amplified = {base for op in graph.forward_ops if op.target in _AMPLIFY_ERRORS for base in op.reads}
        """Values read by forward ops that amplify an error of their operand."""

    def why_not(self, value: Value) -> str:
        """Return the reason why a value has no encoding, empty if it has one."""
        maker = self.graph.maker.get(value.id)
        if value.kind != "result" or maker is None or maker.phase != "forward":
            return "the forward pass does not make it"
        if value.bytes < SMALLEST_ENCODED_BYTES:
            return f"it is smaller than {format_bytes(SMALLEST_ENCODED_BYTES)}"
        if value.id in self.graph.irreplaceable:
            return "a call holds its very memory"
        if not is_dense(value) or value.bytes != prod(value.shape) * itemsize(value.dtype):
            return "its memory has gaps"
        return "" if self._encoding(value, maker) is not None else "no reader can do with fewer bits"

    def encoding_of(self, value: Value) -> tuple[SavedForm, Value] | None:
        """Return the encoding of a value and the encoded value; None if there is no smaller encoding."""
        return None if self.why_not(value) else self._encoding(value, self.graph.maker[value.id])

    def _encoding(self, value: Value, maker: GraphOp) -> tuple[SavedForm, Value] | None:
        """Return the smaller encoding of a value and the encoded value, lossy before exact; None if neither is smaller.

        ``maker``: the op that computes the value.
        """
        graph, readers = self.graph, self.readers[value.id]
        encoding = _lossy(graph, value, maker, readers, self.save, value.id in self.amplified)
        encoding = encoding or _exact(graph, value, maker, readers)
        return encoding if encoding is not None and encoding[1].bytes < value.bytes else None


def _lossy(
    graph: JointGraph, value: Value, maker: GraphOp, readers: Sequence[GraphOp], save: Save, is_amplified: bool
) -> tuple[SavedForm, Value] | None:
    """Return the lossy encoding of a value, and the encoded value: eight bits an element if all its readers tolerate
    that, else bfloat16.

    None if the plan is exact, if the value is not the floating-point main result of its op, if it is a mere cast, or if
    backward ops only compare it with 0: then bits are smaller, and exact. ``is_amplified``: whether forward ops amplify
    an error of the value, which rules eight bits out; ``readers`` are backward ops.
    """
    if save == "exact" or value.dtype not in ("float64", "float32", "bfloat16", "float16"):
        return None
    if maker.outputs[0] != value.id:  # statistics, not the main result
        return None
    # recomputing the cast of a resident value is exact and needs no saved value
    is_cast = maker.target == "aten._to_copy.default" and all(graph.values[v].kind in RESIDENT for v in maker.reads)
    if is_cast or all(reads_bits(graph, op, value.id) for op in readers):
        return None
    tolerates_8_bits = not is_amplified and all(op.target in EIGHT_BITS for op in readers)
    if save == "int8" and tolerates_8_bits and value.dtype != "float64":
        return _eight_bits(value, is_signed=maker.target not in _NEVER_BELOW_0)
    if itemsize(value.dtype) <= 2:  # bfloat16 takes 2 bytes, too
        return None
    size = 2 * prod(value.shape)
    encoded = replace(value, name=f"{value.name}_bfloat16", kind="encoded", bytes=size, dtype="bfloat16", op=None)
    return SavedForm(NAME, value.id, _ID_TO_ASSIGN, "bfloat16"), encoded


def _eight_bits(value: Value, *, is_signed: bool) -> tuple[SavedForm, Value]:
    """Return the encoding of a value in eight bits, and the encoded value. Its workspaces are those of the kernels in
    `memplan.planning.ops.int8`."""
    elements = prod(value.shape)
    codec = "int8" if is_signed else "uint8"
    # elements that a kernel works on at a time
    piece = min(quantized_elements_per_piece(elements, value.place), elements)
    is_float32 = value.dtype == "float32"
    # bytes: float32 quotients of a piece, its elements cast to float32, and 32 for each group
    piece_bytes = 4 * piece + (0 if is_float32 else 4 * piece) + 32 * (1 + piece // GROUP) + NUMBER_TENSOR_BYTES
    sign_bytes = 0 if is_signed else 4 * piece
    form = SavedForm(
        NAME, value.id, _ID_TO_ASSIGN, codec, store_scratch=piece_bytes + sign_bytes,
        fetch_scratch=NUMBER_TENSOR_BYTES if is_float32 else piece_bytes,
    )  # fmt: skip
    return form, _uint8_vector(value, codec, quantized_bytes(elements))


def _exact(
    graph: JointGraph, value: Value, maker: GraphOp, readers: Iterable[GraphOp]
) -> tuple[SavedForm, Value] | None:
    """Return the exact encoding of a value, and the encoded value; None if it has none.

    Exact: gradients have the same bits as with the value itself. In this order: a bool as bits, indices as a narrower
    integer type, and, where readers only compare the value with 0, the results of that comparison as bits. ``readers``
    are backward ops.
    """
    piece = min(most(value.place), prod(value.shape))  # elements packed or unpacked at a time
    if value.dtype == "bool":  # a bit for each element
        bits_readers = [op for op in readers if reads_bits(graph, op, value.id) == "bits"]
        scratch, requests = max((_bits_reader_workspace(graph, op) for op in bits_readers), default=(0, ()))
        form = SavedForm(
            NAME, value.id, _ID_TO_ASSIGN, "bits",
            store_scratch=0 if value.place == HOST else _flag_bytes(piece, value.place),
            fetch_scratch=_flag_bytes(piece, value.place), direct_readers=tuple(op.index for op in bits_readers),
            direct_reader_scratch=scratch, direct_reader_requests=requests,
        )  # fmt: skip
        return form, _uint8_vector(value, "bits", packed_bytes(prod(value.shape)))
    # indices in the smallest integer type that holds their bound
    position, bound = INDEX_RESULTS.get(maker.target, (0, None))
    dtype = None
    if bound is not None and value.dtype == "int64" and maker.outputs[position] == value.id:
        arguments = arguments_of(maker.target, maker.args, maker.kwargs)
        upper = bound(arguments, graph.values[arguments["self"].value].shape)
        dtype = next((dtype for dtype, limit in INTEGERS if upper <= limit), None)
    if dtype is not None:
        size = value.bytes // itemsize(value.dtype) * itemsize(dtype)
        encoded = replace(value, name=f"{value.name}_index", kind="encoded", bytes=size, dtype=dtype, op=None)
        return SavedForm(NAME, value.id, _ID_TO_ASSIGN, "index"), encoded
    # a comparison with 0 as bits, for the ops that need no more of the value: it cannot be decoded
    readers_by_codec: dict[str, list[GraphOp]] = defaultdict(list)
    for op in readers:
        codec = reads_bits(graph, op, value.id)
        if codec is not None:
            readers_by_codec[codec].append(op)
    if not readers_by_codec:
        return None
    codec, bits_readers = max(readers_by_codec.items(), key=lambda item: len(item[1]))
    scratch, requests = max(_bits_reader_workspace(graph, op) for op in bits_readers)
    form = SavedForm(
        NAME, value.id, _ID_TO_ASSIGN, codec, store_scratch=_flag_bytes(piece, value.place), can_restore_value=False,
        direct_readers=tuple(op.index for op in bits_readers), direct_reader_scratch=scratch,
        direct_reader_requests=requests,
    )  # fmt: skip
    return form, _uint8_vector(value, codec, packed_bytes(prod(value.shape)))


def _flag_bytes(piece: int, place: str) -> int:
    """Return the workspace in bytes of packing a piece into bits, or of unpacking it: a byte for each bit. ``piece``:
    its elements."""
    return 8 * packed_bytes(piece) + (NUMBER_TENSOR_BYTES if place == HOST else 0)


def _uint8_vector(value: Value, codec: str, size: int) -> Value:
    """Return the encoded value: a uint8 vector of ``size`` bytes."""
    name = f"{value.name}_{codec}"
    return Value(
        _ID_TO_ASSIGN, name, "encoded", base=_ID_TO_ASSIGN, bytes=size, shape=(size,), stride=(1,), dtype="uint8",
        place=value.place,
    )  # fmt: skip


def reads_bits(graph: JointGraph, op: GraphOp, value: int) -> str | None:
    """Return the codec whose bits an op can read in place of a value; None if it needs the value.

    ``value``: id of the value, which owns its memory; the op may read it as a view.
    """
    reader = BITS_READERS.get(op.target)
    if reader is None:
        return None
    arguments = arguments_of(op.target, op.args, op.kwargs)
    operand, same_layout = arguments[reader.replaced_operand], arguments[reader.same_layout_operand]
    if not isinstance(operand, Ref) or not isinstance(same_layout, Ref) or not reader.suits(arguments):
        return None
    read, other, base = graph.values[operand.value], graph.values[same_layout.value], graph.values[value]
    if read.base != value or other.base == value:
        return None  # not the operand that bits can replace
    if (read.shape, read.stride) != (other.shape, other.stride):
        return None  # the bits would be in another order
    if not is_dense(read) or read.dtype != base.dtype or prod(read.shape) != prod(base.shape):
        return None  # a view of a part, or of other elements
    if reader.codec != "bits" and read.dtype != other.dtype:
        return None  # the result would have another dtype
    return reader.codec


def _bits_reader_workspace(graph: JointGraph, op: GraphOp) -> tuple[int, tuple[int, ...]]:
    """Return the workspace in bytes of a backward op that reads bits, and on a card its requests (`GraphOp.requests`):
    for each piece the unpacked flags, and temporary pieces in the result's dtype."""
    reader = BITS_READERS[op.target]
    like_result = graph.values[arguments_of(op.target, op.args, op.kwargs)[reader.same_layout_operand].value]
    place, element_bytes = like_result.place, itemsize(like_result.dtype)
    elements, largest_piece = prod(like_result.shape), most(place)
    if place == HOST:
        piece = min(largest_piece, elements)
        return _flag_bytes(piece, place) + piece * reader.temporary_pieces * element_bytes, ()
    temporaries = (
        reader.temporary_pieces if reader.temporary_pieces_on_card is None else reader.temporary_pieces_on_card
    )
    requests = list[int]()
    for start in range(0, elements, largest_piece):
        piece = min(largest_piece, elements - start)
        sizes = [_flag_bytes(piece, place), *[piece * element_bytes] * temporaries]
        first = sum(request > 0 for request in requests)
        frees = [-1 - (first + number) for number in reversed(range(len(sizes)))]  # -1 - n frees allocation n
        requests += [*map(round_to_blocks, sizes), *frees]
    return peak_of(requests), tuple(requests)


def _cast_call(value: int, dtype: str) -> Called:
    """Return the call that casts value ``value`` to a dtype."""
    return "aten._to_copy.default", (Ref(value),), {"dtype": getattr(torch, dtype)}


# -- decompositions for fused kernels


def _unpack(bits: Tensor, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Return the bool tensor of these sizes and strides from its bits, which are in memory order."""
    shifts = torch.arange(8, dtype=torch.int32, device=bits.device)  # as a constant it would stay allocated
    flags = (bits[:, None].to(torch.int32) >> shifts).bitwise_and(1).ne(0).view(-1)[: prod(size)]
    dims_in_memory_order = sorted(range(len(size)), key=lambda dim: (-stride[dim], -size[dim]))
    inverse = [dims_in_memory_order.index(dim) for dim in range(len(size))]
    return flags.view([size[dim] for dim in dims_in_memory_order]).permute(inverse)


def _flags_like(bits: Tensor, tensor: Tensor) -> Tensor:
    """Return the bool tensor with the layout of ``tensor`` from its bits."""
    return _unpack(bits, tensor.shape, tensor.stride())


def _threshold_backward(grad_output: Tensor, bits: Tensor, threshold: float) -> Tensor:
    """`threshold_backward` with the bits of ``not (input <= 0)`` in place of its input."""
    return torch.where(_flags_like(bits, grad_output), grad_output, 0.0)


def _leaky_relu_backward(grad_output: Tensor, bits: Tensor, slope: float, is_result: bool) -> Tensor:
    """`leaky_relu_backward` with the bits of ``input > 0`` in place of its input."""
    return torch.where(_flags_like(bits, grad_output), grad_output, grad_output * slope)
