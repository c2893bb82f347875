"""Replace the frozen part of a captured graph by ops of integer kernels.

Convolutions one behind another become one op that computes row by row where what lies between them is large: of it, no
more rows are in memory than the next convolution reads at once. Nothing is computed twice for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from memplan.exporting.int8 import int8_ops as ops
from memplan.exporting.int8.frozen_part import FrozenPart
from memplan.exporting.int8.int8_ops import Stage
from memplan.exporting.int8.integer_layers import Integers
from memplan.exporting.int8.layers import Activation, Add, Average, Convolution, Largest, Multiply, View, Window
from memplan.planning.graph.editor import Rebuild
from memplan.planning.graph.joint_graph import GraphOp, JointGraph, Ref, map_refs

BY_ROWS = 4096
"""Bytes of a result above which the next convolution reads it row by row."""
MOST_STAGES = 16
"""Convolutions of a pipeline, at most: the kernel counts the rows of each."""


def rewritten(
    part: FrozenPart, layers: Sequence[Integers], constants: Mapping[int, torch.Tensor]
) -> tuple[JointGraph, dict[int, torch.Tensor]]:
    """Return the graph with integer kernels in place of the layers, and its constants."""
    return _Rewriting(part, layers, constants).done()


class _Rewriting(Rebuild):
    """Replaces the layers of a frozen part by kernels on integers."""

    def __init__(self, part: FrozenPart, layers: Sequence[Integers], constants: Mapping[int, torch.Tensor]) -> None:
        graph = part.graph
        kept = tuple(value for value in graph.values if value.kind not in ("encoded", "host"))
        super().__init__(replace(graph, values=kept, forms=()))
        self.part, self.layers, self.constants = part, layers, dict(constants)
        self.integers: dict[int, Ref] = {}
        """By value of the graph: its integers."""
        self.floats: dict[int, int] = {}
        """By integers: the value of their floats."""
        self.read_by: dict[int, list[Integers]] = {}
        """By value: the layers that read it."""
        for integers in layers:
            for value in integers.layer.reads:
                self.read_by.setdefault(value, []).append(integers)

    def done(self) -> tuple[JointGraph, dict[int, torch.Tensor]]:
        """Return the graph with integer kernels, and its constants. A layer's kernel takes the place of its last op."""
        pipelines = {id(chain[-1]): chain for chain in self._pipelines()}
        inside = {op.index for integers in self.layers for op in integers.layer.ops}
        last: dict[int, list[Integers]] = {}
        for integers in self.layers:
            index = integers.layer.ops[-1].index if integers.layer.ops else self._before(integers)
            last.setdefault(index, []).append(integers)
        for op in self.graph.ops:
            if op.index not in inside:
                known = op.gradient_of is None or op.gradient_of not in inside
                self.add(op if known else replace(op, gradient_of=None))
            for integers in last.get(op.index, ()):
                if id(integers) in pipelines:
                    self._convolutions(op, pipelines[id(integers)])
                elif not isinstance(integers.layer, Convolution):
                    self._other(op, integers)
                if integers.layer.out in self.part.borders:
                    self._dequantize(op, integers)
        return self.finished(), self.constants

    def _dequantize(self, op: GraphOp, integers: Integers) -> None:
        """Add the op that converts a layer's result to floats. If another view of the integers was converted, add a
        view of those floats instead."""
        out, read = self.values[integers.layer.out], self.integers[integers.layer.out]
        if read.value in self.floats:
            base = self.values[self.floats[read.value]].base
            self.values[out.id] = replace(out, base=base, bytes=0)
            self._call(op, "aten.alias.default", (Ref(self.floats[read.value]),), (out.id,), makes=())
            return
        self.values[out.id] = replace(out, base=out.id, bytes=out.own_bytes)  # it may have been a view
        self._call(op, ops.DEQUANTIZE, (read, integers.type.scale, integers.type.zero), (out.id,))
        self.floats[read.value] = out.id

    def _before(self, integers: Integers) -> int:
        """Return the index of the op that computes in float32 what a layer without ops of its own computes."""
        return next(op.index for op in self.graph.ops if integers.layer.out in op.outputs)

    # -- pipelines

    def _pipelines(self) -> Iterator[list[Integers]]:
        """Yield chains of convolutions: the result of each but the last is large, and only the next one reads it."""
        in_chains = set[int]()
        for integers in self.layers:
            if not isinstance(integers.layer, Convolution) or id(integers) in in_chains:
                continue
            chain = [integers]
            while len(chain) < MOST_STAGES and (behind := self._next(chain[-1])) is not None:
                chain.append(behind)
            in_chains |= set(map(id, chain))
            yield chain

    def _next(self, integers: Integers) -> Integers | None:
        """Return the convolution that reads the result of this one row by row.

        None if there is none, if other layers read the result, or if it is small or not much higher than a window.
        """
        layer, readers = integers.layer, self.read_by.get(integers.layer.out, [])
        if len(readers) != 1 or layer.out in self.part.borders or not isinstance(layer, Convolution):
            return None
        behind = readers[0].layer
        if not isinstance(behind, Convolution) or behind.plane != layer.result:
            return None
        size = len(layer.weight) * math.prod(layer.result)
        reach = (behind.weight.shape[2] - 1) * behind.dilation[0] + 1
        return readers[0] if size > BY_ROWS and 2 * reach <= layer.result[0] else None

    def _convolutions(self, op: GraphOp, chain: list[Integers]) -> None:
        """Add the op of a pipeline."""
        stages, start = list[tuple[Any, ...]](), 0
        for k, integers in enumerate(chain):
            layer = integers.layer
            assert isinstance(layer, Convolution), "of nothing else"
            assert integers.weight is not None, "it has one"
            assert integers.rescale is not None, "it has them"
            stage = _stage(integers, layer)
            if len(chain) == 1 and _is_pointwise(layer):  # as a single long row, which has the longest inner loop
                size = math.prod(layer.plane)
                stage = replace(stage, height=1, width=size, rows=1, columns=size)
            if k + 1 < len(chain):
                behind = chain[k + 1].layer
                assert isinstance(behind, Convolution), "of nothing else"
                kept = (behind.weight.shape[2] - 1) * behind.dilation[0] + 1
                stage = replace(stage, kept=kept, start=start)
                start += stage.wide * stage.columns * kept
            arrays = (integers.weight, _folded(integers, layer), integers.zeros, integers.table)
            refs = (None if array is None else self._constant(op, array) for array in arrays)
            stages.append((*refs, stage))
        first, final = chain[0].layer, chain[-1].layer
        read = Ref(first.reads[0]) if chain[0].reads[0] is None else self._read(op, first.reads[0], chain[0].reads[0])
        out = self._result(op, final.out)
        rings = self._buffer(op, (start,)) if start else None
        self._call(op, ops.CONVOLUTIONS, (read, *stages), (out, rings), multiple=True)
        self.integers[final.out] = Ref(out)

    # -- others

    def _other(self, op: GraphOp, integers: Integers) -> None:
        """Add the op of a layer that is no convolution."""
        layer = integers.layer
        reads = [self._read(op, value, type) for value, type in zip(layer.reads, integers.reads, strict=True)]
        zeros = [type.zero for type in integers.reads if type is not None]
        if isinstance(layer, View):
            self.integers[layer.out] = self._view(layer.ops[0], layer, reads[0])
            return
        bounds = (integers.type.zero, integers.low, integers.high)
        if isinstance(layer, Activation):
            assert integers.table is not None, "it has one"
            target, args = ops.LOOKUP, (*reads, self._constant(op, integers.table))
        elif isinstance(layer, Add):
            first, second, shift = integers.factors
            target, args = ops.ADD, (*reads, zeros[0], first, zeros[1], second, shift, *bounds)
        elif isinstance(layer, Multiply):
            target, args = ops.MULTIPLY, (*reads, *zeros, *integers.factors, *bounds, layer.inner)
        elif isinstance(layer, Average):
            target, args = ops.AVERAGE, (*reads, _sizes(layer), zeros[0], *integers.factors, *bounds)
        else:
            assert isinstance(layer, Largest), "there are no others"
            target, args = ops.LARGEST, (*reads, _sizes(layer))
        out = self._result(op, layer.out)
        size = self.values[out].shape
        pointwise = target in (ops.LOOKUP, ops.ADD, ops.MULTIPLY)
        into = tuple(
            self.values[read.value].base for read in reads
            if pointwise and self.values[read.value].shape == size and not self.values[read.value].is_view
            and self.values[read.value].kind == "result"
        )  # fmt: skip
        self._call(op, target, args, (out,), overwrites=tuple(dict.fromkeys(into)))
        self.integers[layer.out] = Ref(out)

    def _view(self, op: GraphOp, layer: View, read: Ref) -> Ref:
        """Return a view of integers; where shape and order are the same, they are these themselves."""
        if not op.is_view or self.values[layer.out].shape == self.values[read.value].shape:
            return read
        base = self.values[read.value].base
        out = self.value(self.values[layer.out].name, self.values[layer.out], dtype="int8", base=base, bytes=0, op=None)
        args, kwargs = (map_refs(given, lambda v: read) for given in (op.args, op.kwargs))
        self._call(op, op.target, args, (out,), kwargs=kwargs, makes=())
        return Ref(out)

    # -- values

    def _read(self, op: GraphOp, value: int, type: Any) -> Ref:
        """Return the integers of a value; those of an input in float32 are computed where they are first read."""
        if value not in self.integers:
            assert value in self.part.inputs, "layers are in order"
            out = self._result(op, value)
            self._call(op, ops.QUANTIZE, (Ref(value), float(type.reciprocal), type.zero), (out,))
            self.integers[value] = Ref(out)
        return self.integers[value]

    def _result(self, op: GraphOp, like: int) -> int:
        """Add a contiguous int8 value with shape and name of a value of the graph."""
        return self._buffer(op, self.values[like].shape, like)

    def _buffer(self, op: GraphOp, shape: tuple[int, ...], like: int | None = None) -> int:
        """Add a contiguous int8 value, named after value `like`, by default the result of the op."""
        of = self.values[op.outputs[0] or 0 if like is None else like]
        stride = tuple(torch.empty(shape, device="meta").stride())
        size = math.prod(shape)
        return self.value(f"{of.name}_int8", of, shape=shape, stride=stride, dtype="int8", bytes=size, op=None)

    def _constant(self, op: GraphOp, array: np.ndarray) -> Ref:
        """Add an array of integers."""
        of = self.values[op.outputs[0] or 0]
        dtype = str(array.dtype)
        number = self.value(
            f"{of.name}_constant", of, kind="constant", shape=array.shape, dtype=dtype, bytes=0, op=None
        )
        self.constants[number] = torch.from_numpy(np.ascontiguousarray(array))
        return Ref(number)

    def _call(
        self, op: GraphOp, target: str, args: tuple[Any, ...], outputs: tuple[int | None, ...], **changes: Any
    ) -> None:
        """Add an op with phase, layer and source line of `op`."""
        fields: dict[str, Any] = {
            "index": -1 - len(self.ops), "target": target, "args": args, "kwargs": {}, "outputs": outputs,
            "makes": tuple(value for value in outputs if value is not None), "multiple": False, "discarded": 0,
            "scratch": 0, "scratch_into": None, "overwrites": (), "random": False, "once": False, "gradient_of": None,
            "holds": (), "cheaper_recompute": None, "phase": "forward", "seconds": 0.0,
        }  # fmt: skip
        self.add(replace(op, **{**fields, **changes}))


def _stage(integers: Integers, layer: Convolution) -> Stage:
    """Return the sizes of a convolution."""
    wide, narrow, *kernel = layer.weight.shape
    return Stage(
        channels=narrow * layer.groups, height=layer.plane[0], width=layer.plane[1], wide=wide, rows=layer.result[0],
        columns=layer.result[1], groups=layer.groups, kernel=(kernel[0], kernel[1]), stride=layer.stride,
        padding=layer.padding, dilation=layer.dilation, zero=0 if integers.reads[0] is None else integers.reads[0].zero,
        result_zero=integers.before.zero, low=integers.low, high=integers.high,
    )  # fmt: skip


def _folded(integers: Integers, layer: Convolution) -> np.ndarray:
    """Return bias, multiplier and shift of each output channel, for kernels that multiply operands without subtracting
    their zero: the bias contains the products of all weights with it."""
    assert integers.weight is not None, "a convolution has one"
    assert integers.rescale is not None, "a convolution has them"
    wide, narrow = integers.weight.shape[:2]
    channels = (np.arange(wide) // (wide // layer.groups))[:, None] * narrow + np.arange(narrow)
    zero = 0 if integers.reads[0] is None else integers.reads[0].zero
    zeros = np.full(narrow * layer.groups, zero) if integers.zeros is None else integers.zeros
    folded = integers.rescale.copy()
    folded[:, 0] -= (integers.weight.astype(np.int64).sum(axis=(2, 3)) * zeros[channels]).sum(axis=1).astype(np.int32)
    return folded


def _is_pointwise(layer: Convolution) -> bool:
    return layer.weight.shape[2:] == (1, 1) and layer.stride == (1, 1) and layer.padding == (0, 0)


def _sizes(layer: Window) -> tuple[int, ...]:
    return (layer.planes, *layer.plane, *layer.result, *layer.kernel, *layer.stride, *layer.padding, *layer.dilation)
