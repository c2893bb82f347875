"""The graph of a device: every op is one call of a C kernel, and sizes are the bytes on the device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from memplan.errors import RecordingError
from memplan.planning.graph.editor import Rebuild
from memplan.planning.graph.joint_graph import GraphOp, JointGraph, Ref, Value, map_refs, refs
from memplan.planning.graph.op_schema import is_contiguous, overload, short

COPY = "aten.clone.default"
TO_FLOAT = "memplan.to_float.default"
"""Integers as floats; exact below 2 ** 24."""
FILL = "memplan.fill.default"
WRITE = "memplan.write_output.default"
"""(value, start): copy the value to the caller's `output`, from element `start` on, unless that pointer is null."""
ARENA_INPUT = "memplan.arena_input.default"
"""An input of the caller at its place in the arena."""
INSERT = "memplan.insert_channels.default"
"""(value or None, part, channel): a copy of the value, or zeros, with `part` in its channels from `channel` on."""
WORD = 4
"""Bytes of a float; the size of every buffer is a multiple."""

ALIASES = ("aten.alias.default", "aten.detach.default")
"""Ops whose result is their operand."""
ZEROS = ("aten.new_zeros.default", "aten.zeros_like.default", "aten.new_ones.default", "aten.ones_like.default",
         "aten.new_full.default", "aten.full_like.default", "aten.new_empty_strided.default", "aten.new_empty.default",
         "aten.empty_like.default")  # fmt: skip
"""Ops that fill a tensor like another, of which they read the shape alone."""

ALTERNATIVES: Mapping[str, str] = {
    "rrelu_with_noise_functional": "Use nn.LeakyReLU with the mean of both slopes",
    "avg_pool3d": "Use nn.GroupNorm in place of nn.LocalResponseNorm, and planes in place of volumes",
    "max_pool3d_with_indices": "Use planes: nn.MaxPool2d",
    "_embedding_bag": "Use nn.Embedding, and the mean or sum of its rows",
    "multi_margin_loss_backward": "Use F.cross_entropy",
    "multilabel_margin_loss_forward": "Use F.multilabel_soft_margin_loss",
    "exponential": "Draw the noise before the step, and pass it as an input",
    "im2col": "Use nn.Conv2d: it multiplies the same windows by its weight",
    "sort": "Use amax or amin, or leave it on the host",
    "topk": "Use amax for the largest, or leave it on the host",
    "_fft_r2c": "Multiply by a buffer of cosines and one of sines, or compute the spectrum before the step",
    "grid_sampler_2d": "Use F.interpolate, or resample the data before the step",
    "upsample_bicubic2d": "Use mode='bilinear'",
    "_upsample_bilinear2d_aa": "Leave out antialias=True",
    "upsample_nearest3d": "Use planes: x.flatten(0, 1) and F.interpolate of planes",
    "_adaptive_avg_pool3d": "Use planes: nn.AdaptiveAvgPool2d, and the mean over the depth",
    "scatter_reduce": "Use scatter_add",
    "argmax": "For a mask of its place, use x == x.amax(dim, keepdim=True)",
    "bucketize": "Count the edges below: (x[..., None] > edges).float().sum(-1)",
    "prod": "Where all are positive, use x.log().sum(dim).exp()",
    "logcumsumexp": "Use x.exp().cumsum(dim).log()",
    "hypot": "Use (x * x + y * y).sqrt()",
    "fmod": "Use (x / y).trunc() or .floor(): x - y * (x / y).trunc()",
    "randn_like": "Draw the noise before the step, and pass it as an input",
    "bernoulli": "Use nn.Dropout, or draw the mask before the step, and pass it as an input",
    "_cdist_forward": "Use the squares of differences: (a[:, None] - b).square().sum(-1)",
}
"""By op without a kernel: what to write in its place."""


@dataclass(frozen=True)
class DeviceGraph:
    """A joint graph for a device, and where its values lie."""

    graph: JointGraph
    constants: Mapping[int, np.ndarray]
    """Values that are known at export: they lie in flash."""
    storage_offsets: Mapping[int, int]
    """Storage offset in elements of each view, where it is not 0."""
    fused_gradients: frozenset[int] = frozenset()
    """Gradients that are never stored: the kernel that computes an element applies it to the weight at once."""
    strided_parameter_parts: frozenset[int] = frozenset()
    """Parts of parameters that are not contiguous: their gradients have to be fused."""


def rounded_to_words(size: int) -> int:
    """Round a number of bytes up to whole words."""
    return -(-size // WORD) * WORD


def first_output(op: GraphOp) -> int:
    """Return the first output of an op that has one."""
    assert op.outputs[0] is not None, "somebody reads it"
    return op.outputs[0]


def refusal(op: GraphOp, why: str, near: str = "", do: str = "") -> RecordingError:
    """Return the error to raise for an op that no kernel computes.

    Args:
        op: its layer and source line are in the message.
        why: follows the op's name in the message.
        near: what could be used instead.
        do: what to write in its place; empty: what `ALTERNATIVES` has for the op, or a general advice.
    """
    return RecordingError(
        f"{short(op.target)}{why}",
        expected="operations that memplan has C kernels for" + (f" (near: {near})" if near else ""),
        do=do or ALTERNATIVES.get(short(op.target), "Write this part with other operations, or leave it on the host"),
        layer=op.layer or None,
        where=op.where,
    )


class Lowering(Rebuild):
    """Builds the graph of a device: a rule for each kind of op adds the kernel calls that replace it."""

    def __init__(self, graph: JointGraph, constants: Mapping[int, torch.Tensor]) -> None:
        super().__init__(graph)
        self.constants: dict[int, torch.Tensor] = {}
        """Elements of the values that are known at export."""
        self.storage_offsets: dict[int, int] = {}
        """As for `DeviceGraph`."""
        self.torch_dtypes: dict[int, str] = {value.id: value.dtype for value in graph.values}
        """The dtype that each value has in PyTorch: computed flags and integers are floats on the device."""
        self.normalized_inputs: dict[int, Any] = {}
        """Normalized bytes of inputs: byte_inputs.Affine by value."""
        self.mutations = dict(graph.mutations)
        """By value that the step changes: its value after the step."""
        for value, tensor in constants.items():
            self.make_constant(value, tensor)

    # -- values

    def change(self, number: int, **changes: Any) -> None:
        """Replace fields of a value."""
        self.values[number] = replace(self.values[number], **changes)

    def make_constant(self, number: int, tensor: torch.Tensor) -> None:
        """Make a value a constant with these elements: it takes no memory in the arena."""
        self.constants[number] = tensor.contiguous()
        self.torch_dtypes[number] = str(tensor.dtype).removeprefix("torch.")
        stride = tuple(self.constants[number].stride())
        self.change(number, kind="constant", base=number, bytes=0, op=None, stride=stride)

    def shape(self, ref: Ref) -> tuple[int, ...]:
        """Return the shape of an argument."""
        return self.values[ref.value].shape

    def buffer(
        self, name: str, like: Value, shape: Sequence[int], dtype: str = "float32", size: int | None = None
    ) -> int:
        """Add a contiguous value with its own memory: of `size` bytes, or as many as shape and dtype take."""
        stride = torch.empty(tuple(shape), device="meta").stride()
        own_bytes = math.prod(shape) * getattr(torch, dtype).itemsize if size is None else size
        layout = {"shape": tuple(shape), "stride": tuple(stride), "dtype": dtype, "bytes": rounded_to_words(own_bytes)}
        return self.value(name, like, **layout, base=len(self.values), op=None)

    # -- ops

    def call(
        self, op: GraphOp, target: str, args: Sequence[Any], outputs: Sequence[int | None], **changes: Any
    ) -> None:
        """Add the call of a kernel that replaces an op or a part of it.

        Args:
            op: its layer, source line and phase become those of the call.
            target, args: kernel and arguments.
            outputs: results, also views; None for one that nothing reads.
            changes: other fields of the new `GraphOp`.
        """
        owned = tuple(value for value in outputs if value is not None and self.values[value].base == value)
        fields: dict[str, Any] = {
            "target": target, "args": tuple(args), "kwargs": {}, "outputs": tuple(outputs), "makes": owned,
            "returns_tuple": len(outputs) > 1, "discarded": 0, "scratch": 0, "in_place_scratch": None, "overwrites": (),
            "gradient_of": None, "cheaper_recompute": None, "random": False, "held_values": (),
        }  # fmt: skip
        self.add(op, **{**fields, **changes})

    def alias(self, op: GraphOp, value: int, of: Ref) -> None:
        """Make a value a view of all of `of`, with the same strides."""
        source = self.values[of.value]
        self.change(value, base=source.base, bytes=0)
        if source.id in self.storage_offsets:
            self.storage_offsets[value] = self.storage_offsets[source.id]
        self.call(op, "aten.alias.default", (of,), (value,))

    def as_contiguous(self, op: GraphOp, ref: Ref) -> Ref:
        """Return an argument as it is if contiguous, else a contiguous copy."""
        value = self.values[ref.value]
        if is_contiguous(value):
            return ref
        if value.dtype == "int32":
            ref = self.as_float(op, ref)
            value = self.values[ref.value]
        number = self.buffer(f"{value.name}_dense", value, value.shape, value.dtype)
        self.call(op, COPY, (ref,), (number,), must_run_once=False)
        return Ref(number)

    def set_contiguous(self, number: int) -> int:
        """Give a result contiguous strides, whatever PyTorch's are, since its kernel writes it so. Return it."""
        self.change(number, stride=tuple(torch.empty(self.values[number].shape, device="meta").stride()))
        return number

    def as_float(self, op: GraphOp, ref: Ref) -> Ref:
        """Return an operand of an elementwise op in float32: as it is, or the flags or integers converted."""
        value = self.values[ref.value]
        if value.dtype == "float32":
            return ref
        if value.id in self.constants:
            number = self.value(f"{value.name}_float", value, dtype="float32")
            self.make_constant(number, self.constants[value.id].float())
            return Ref(number)
        if value.dtype != "int32":
            raise refusal(op, f" of {value.dtype}", near="the same in float32")
        number = self.buffer(f"{value.name}_float", value, value.shape)
        if not is_contiguous(value):  # convert its whole base, and return the same view of the result
            base = self.values[value.base]
            float_base = self.buffer(f"{base.name}_float", base, base.shape)
            self.call(op, TO_FLOAT, (Ref(base.id),), (float_base,), must_run_once=False)
            view = self.value(f"{value.name}_float", value, dtype="float32", base=float_base, op=None)
            if value.id in self.storage_offsets:
                self.storage_offsets[view] = self.storage_offsets[value.id]
            self.call(op, "aten.alias.default", (Ref(float_base),), (view,))
            return Ref(view)
        self.call(op, TO_FLOAT, (ref,), (number,), must_run_once=False)
        return Ref(number)

    def set_float32(self, number: int) -> None:
        """Change a computed value of flags or integers to float32, in which kernels compute."""
        value = self.values[number]
        if value.dtype != "float32":
            # views and constants stay at 0 bytes
            size = rounded_to_words(math.prod(value.shape) * WORD) if value.bytes else 0
            self.change(number, dtype="float32", bytes=size)

    def overwritable_storages(self, number: int, *operands: Any) -> tuple[int, ...]:
        """Return the storages of operands that an elementwise op can write its result `number` to."""
        result = self.values[number]
        values = [self.values[operand.value] for operand in operands if isinstance(operand, Ref)]
        reusable = list[int]()
        for value in values:
            base = self.values[value.base]
            same_layout = value.stride == result.stride and value.shape == result.shape
            same_dtype = value.dtype == base.dtype == result.dtype
            is_whole_storage = base.bytes == result.bytes > 0 and not self.storage_offsets.get(value.id)
            if same_layout and same_dtype and is_whole_storage and is_contiguous(value):
                reusable.append(base.id)
        # Another operand that views the storage with other strides would read elements that are overwritten.
        safe = [base for base in reusable if all(v.stride == result.stride for v in values if v.base == base)]
        return tuple(dict.fromkeys(safe))

    # -- views and constants

    def view(self, op: GraphOp) -> None:
        """Add a view op; strides and storage offsets of its outputs come from running it on meta tensors."""

        def meta(number: int) -> torch.Tensor:
            value = self.values[number]
            # large enough for each view: meta tensors have no memory
            storage = torch.empty(1 << 40, dtype=getattr(torch, value.dtype), device="meta")
            return storage.as_strided(value.shape, value.stride, self.storage_offsets.get(number, 0))

        def run() -> Any:
            return overload(op.target)(*map_refs(op.args, meta), **map_refs(op.kwargs, meta))

        try:
            results = run()
        except RuntimeError:  # the view needs PyTorch's strides, which the operand no longer has: view a copy
            op = replace(op, args=(self.as_contiguous(op, op.args[0]), *op.args[1:]))
            results = run()
        results = results if isinstance(results, (tuple, list)) else (results,)
        base = self.values[next(refs((op.args, op.kwargs)))].base
        for number, tensor in zip(op.outputs, results, strict=True):
            if number is not None:
                dtype = self.values[base].dtype
                self.change(number, base=base, bytes=0, stride=tuple(tensor.stride()), dtype=dtype)
                if tensor.storage_offset():
                    self.storage_offsets[number] = int(tensor.storage_offset())
        self.call(op, op.target, op.args, op.outputs, kwargs=op.kwargs)

    def folded(self, op: GraphOp) -> bool:
        """Compute an op at export if all its operands are constants; return whether they are."""
        # once: it has a side effect, or another result in each step
        if op.random or op.must_run_once or not op.outputs:
            return False
        if any(value not in self.constants for value in refs((op.args, op.kwargs))):
            return False
        args, kwargs = map_refs(op.args, self.constants.__getitem__), map_refs(op.kwargs, self.constants.__getitem__)
        results = overload(op.target)(*args, **kwargs)
        for number, tensor in zip(op.outputs, results if op.returns_tuple else (results,), strict=True):
            if number is not None:
                self.make_constant(number, tensor)
        return True
