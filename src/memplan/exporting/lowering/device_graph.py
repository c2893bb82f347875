"""The joint graph of a device: each op is one call of a C kernel, and the bytes are those that it takes there."""

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
FILL = "memplan.fill.default"
INSERT = "memplan.insert_channels.default"
"""A value with other channels from one on; those of nothing are 0."""
WORD = 4
"""Bytes of a float, and to a multiple of which every buffer is rounded."""

ZEROS = ("aten.new_zeros.default", "aten.zeros_like.default", "aten.new_ones.default", "aten.ones_like.default",
         "aten.new_full.default", "aten.full_like.default", "aten.new_empty_strided.default")  # fmt: skip
"""Ops that read nothing of a tensor but its shape."""


@dataclass(frozen=True)
class DeviceGraph:
    """A joint graph for a device, and what its values are there."""

    graph: JointGraph
    constants: Mapping[int, np.ndarray]
    """Values that are known when the code is written: they lie in flash."""
    offsets: Mapping[int, int]
    """Elements from the beginning of the memory that a view looks into, where these are not 0."""
    fused: frozenset[int] = frozenset()
    """Gradients that exist one element at a time: the kernel that computes an element applies it at once."""
    strided: frozenset[int] = frozenset()
    """Parts of parameters that are not together in memory: their gradients can exist in no other way."""


def words(size: int) -> int:
    """Return bytes rounded up to whole words."""
    return -(-size // WORD) * WORD


def refusal(op: GraphOp, why: str, near: str = "") -> RecordingError:
    """Return the error of an op that no kernel computes."""
    return RecordingError(
        f"{short(op.target)}{why}",
        expected="operations that memplan has C kernels for" + (f" (near: {near})" if near else ""),
        do="Write this part with other operations, or leave it on the host",
        layer=op.layer or None,
        where=op.where,
    )


class Lowering(Rebuild):
    """A graph for a device in the making: rules add its ops one by one."""

    def __init__(self, graph: JointGraph, constants: Mapping[int, torch.Tensor]) -> None:
        super().__init__(graph)
        self.known: dict[int, torch.Tensor] = {}
        """Values whose elements are known."""
        self.offsets: dict[int, int] = {}
        self.mutations = dict(graph.mutations)
        for value, tensor in constants.items():
            self.know(value, tensor)

    # -- values

    def change(self, number: int, **changes: Any) -> None:
        """Change what is known of a value."""
        self.values[number] = replace(self.values[number], **changes)

    def know(self, number: int, tensor: torch.Tensor) -> None:
        """Take a value for a constant."""
        self.known[number] = tensor.contiguous()
        stride = tuple(self.known[number].stride())
        self.change(number, kind="constant", base=number, bytes=0, op=None, stride=stride)

    def shape(self, ref: Ref) -> tuple[int, ...]:
        """Return the shape of an argument."""
        return self.values[ref.value].shape

    def buffer(
        self, name: str, like: Value, shape: Sequence[int], dtype: str = "float32", size: int | None = None
    ) -> int:
        """Add a contiguous value with memory of its own; ``size``: its bytes, where these do not follow from that."""
        stride = torch.empty(tuple(shape), device="meta").stride()
        taken = words(math.prod(shape) * getattr(torch, dtype).itemsize if size is None else size)
        return self.value(
            name,
            like,
            shape=tuple(shape),
            stride=tuple(stride),
            dtype=dtype,
            bytes=taken,
            base=len(self.values),
            op=None,
        )

    # -- ops

    def call(self, op: GraphOp, target: str, args: Sequence[Any], makes: Sequence[int | None], **changes: Any) -> None:
        """Add a call of a kernel in the place of an op."""
        owned = tuple(value for value in makes if value is not None and self.values[value].base == value)
        given: dict[str, Any] = {
            "target": target, "args": tuple(args), "kwargs": {}, "outputs": tuple(makes), "makes": owned,
            "multiple": len(makes) > 1, "discarded": 0, "scratch": 0, "scratch_into": None, "overwrites": (),
            "gradient_of": None, "again": None, "random": False, "holds": (),
        }  # fmt: skip
        self.add(op, **{**given, **changes})

    def alias(self, op: GraphOp, value: int, of: Ref) -> None:
        """Let a value look into another one instead of being computed: all of it, in the same order."""
        source = self.values[of.value]
        self.change(value, base=source.base, bytes=0)
        if source.id in self.offsets:
            self.offsets[value] = self.offsets[source.id]
        self.call(op, "aten.alias.default", (of,), (value,))

    def dense(self, op: GraphOp, ref: Ref) -> Ref:
        """Return the argument, or a copy of it where its elements do not follow one another."""
        found = self.values[ref.value]
        if is_contiguous(found):
            return ref
        number = self.buffer(f"{found.name}_dense", found, found.shape, found.dtype)
        self.call(op, COPY, (ref,), (number,), once=False)
        return Ref(number)

    def over(self, number: int, *operands: Any) -> tuple[int, ...]:
        """Return the bases among operands whose memory a result can take over, element by element."""
        wanted, found = self.values[number], list[int]()
        for operand in operands:
            if not isinstance(operand, Ref):
                continue
            given = self.values[operand.value]
            base = self.values[given.base]
            same = given.stride == wanted.stride and given.shape == wanted.shape
            whole = base.bytes == wanted.bytes > 0 and (given.dtype, base.dtype) == (wanted.dtype, wanted.dtype)
            if same and whole and not self.offsets.get(operand.value) and is_contiguous(given):
                found.append(base.id)
        others = [self.values[one.value] for one in operands if isinstance(one, Ref)]
        alone = [b for b in found if all(one.stride == wanted.stride for one in others if one.base == b)]
        return tuple(dict.fromkeys(alone))

    # -- views and constants

    def view(self, op: GraphOp) -> None:
        """Add an op that only looks into memory, and note where its results begin."""

        def meta(value: int) -> torch.Tensor:
            found = self.values[value]
            reach = self.offsets.get(value, 0)
            whole = torch.empty(1 << 40, dtype=getattr(torch, found.dtype), device="meta")
            return whole.as_strided(found.shape, found.stride, reach)

        args, kwargs = map_refs(op.args, meta), map_refs(op.kwargs, meta)
        made = overload(op.target)(*args, **kwargs)
        made = made if isinstance(made, (tuple, list)) else (made,)
        base = self.values[next(refs((op.args, op.kwargs)))].base
        for number, tensor in zip(op.outputs, made, strict=True):
            if number is not None:
                self.change(number, base=base, bytes=0, stride=tuple(tensor.stride()))
                if tensor.storage_offset():
                    self.offsets[number] = int(tensor.storage_offset())
        self.call(op, op.target, op.args, op.outputs, kwargs=op.kwargs)

    def folded(self, op: GraphOp) -> bool:
        """Compute an op now whose operands are all known; return whether it was."""
        if (
            op.random
            or op.once
            or not op.outputs
            or any(value not in self.known for value in refs((op.args, op.kwargs)))
        ):
            return False
        args, kwargs = map_refs(op.args, self.known.__getitem__), map_refs(op.kwargs, self.known.__getitem__)
        made = overload(op.target)(*args, **kwargs)
        for number, tensor in zip(op.outputs, made if op.multiple else (made,), strict=True):
            if number is not None:
                self.know(number, tensor)
        return True
