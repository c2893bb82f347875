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
from memplan.exporting.int8.arithmetic import Affine
from memplan.exporting.int8.frozen_part import FrozenPart
from memplan.exporting.int8.int8_ops import Stage
from memplan.exporting.int8.integer_layers import IntegerLayer, channels_read
from memplan.exporting.int8.layers import Activation, Add, AveragePool, Convolution, MaxPool, Multiply, Pool, View
from memplan.planning.graph.editor import Rebuild
from memplan.planning.graph.joint_graph import GraphOp, JointGraph, Ref, map_refs

LARGEST_WHOLE_RESULT = 4096
"""Bytes of a result above which the next convolution reads it row by row."""
MOST_STAGES = 16
"""Convolutions of a pipeline, at most: the kernel counts the rows of each."""


def rewritten(
    part: FrozenPart, layers: Sequence[IntegerLayer], constants: Mapping[int, torch.Tensor]
) -> tuple[JointGraph, dict[int, torch.Tensor]]:
    """Return the graph with integer kernels in place of the layers, and its constants."""
    return _Rewriting(part, layers, constants).done()


class _Rewriting(Rebuild):
    """Replaces the layers of a frozen part by kernels on integers."""

    def __init__(self, part: FrozenPart, layers: Sequence[IntegerLayer], constants: Mapping[int, torch.Tensor]) -> None:
        graph = part.graph
        kept = tuple(value for value in graph.values if value.kind not in ("encoded", "host"))
        super().__init__(replace(graph, values=kept, forms=()))
        self.part, self.layers, self.constants = part, layers, dict(constants)
        self.integers: dict[int, Ref] = {}
        """By value of the graph: its integers."""
        self.floats: dict[int, int] = {}
        """By value of integers that were converted: the value of the floats."""
        self.readers: dict[int, list[IntegerLayer]] = {}
        """By value: the layers that read it."""
        for integers in layers:
            for value in integers.layer.operands:
                self.readers.setdefault(value, []).append(integers)

    def done(self) -> tuple[JointGraph, dict[int, torch.Tensor]]:
        """Return the graph with integer kernels, and its constants. A layer's kernel takes the place of its last op."""
        pipelines = {id(chain[-1]): chain for chain in self._pipelines()}  # by the last layer of each
        replaced_ops = {op.index for integers in self.layers for op in integers.layer.ops}
        layers_by_last_op: dict[int, list[IntegerLayer]] = {}
        for integers in self.layers:
            last_op = integers.layer.ops[-1] if integers.layer.ops else self._float_op(integers)
            layers_by_last_op.setdefault(last_op.index, []).append(integers)
        for op in self.graph.ops:
            if op.index not in replaced_ops:
                self.add(replace(op, gradient_of=None) if op.gradient_of in replaced_ops else op)
            for integers in layers_by_last_op.get(op.index, ()):
                if id(integers) in pipelines:
                    self._convolutions(op, pipelines[id(integers)])
                elif not isinstance(integers.layer, Convolution):
                    self._other(op, integers)
                if integers.layer.output in self.part.values_read_in_float32:
                    self._dequantize(op, integers)
        return self.finished(), self.constants

    def _dequantize(self, op: GraphOp, integers: IntegerLayer) -> None:
        """Add the op that converts a layer's result to floats. If another view of the integers was converted, add a
        view of those floats instead."""
        result, int8_result = self.values[integers.layer.output], self.integers[integers.layer.output]
        floats = self.floats.get(int8_result.value)
        if floats is not None:
            self.values[result.id] = replace(result, base=self.values[floats].base, bytes=0)
            self._call(op, "aten.alias.default", (Ref(floats),), (result.id,), makes=())
            return
        # it may have been a view
        self.values[result.id] = replace(result, base=result.id, bytes=result.contiguous_bytes)
        self._call(
            op, ops.DEQUANTIZE, (int8_result, integers.result_type.scale, integers.result_type.zero_point), (result.id,)
        )
        self.floats[int8_result.value] = result.id

    def _float_op(self, integers: IntegerLayer) -> GraphOp:
        """Return the op that computes in float32 what a layer without ops of its own computes."""
        return next(op for op in self.graph.ops if integers.layer.output in op.outputs)

    # -- pipelines

    def _pipelines(self) -> Iterator[list[IntegerLayer]]:
        """Yield chains of convolutions: the result of each but the last is large, and only the next one reads it."""
        in_chains = set[int]()
        for integers in self.layers:
            if not isinstance(integers.layer, Convolution) or id(integers) in in_chains:
                continue
            chain = [integers]
            while len(chain) < MOST_STAGES and (following := self._next(chain[-1])) is not None:
                chain.append(following)
            in_chains |= set(map(id, chain))
            yield chain

    def _next(self, integers: IntegerLayer) -> IntegerLayer | None:
        """Return the convolution that reads the result of this one row by row.

        None if there is none, if other layers read the result, or if it is small or not much higher than a window.
        """
        layer, readers = integers.layer, self.readers.get(integers.layer.output, [])
        if len(readers) != 1 or layer.output in self.part.values_read_in_float32 or not isinstance(layer, Convolution):
            return None
        reader = readers[0].layer
        if not isinstance(reader, Convolution) or reader.input_size != layer.output_size:
            return None
        result_bytes = len(layer.weight) * math.prod(layer.output_size)
        is_high = layer.output_size[0] >= 2 * _rows_per_window(reader)
        return readers[0] if result_bytes > LARGEST_WHOLE_RESULT and is_high else None

    def _convolutions(self, op: GraphOp, chain: list[IntegerLayer]) -> None:
        """Add the op of a pipeline."""
        stages, ring_bytes = list[tuple[Any, ...]](), 0
        for integers, following in zip(chain, (*chain[1:], None), strict=True):
            layer = integers.layer
            assert isinstance(layer, Convolution), "of nothing else"
            assert integers.weight is not None, "it has one"
            assert integers.rescale is not None, "it has them"
            stage = _stage(integers, layer)
            if len(chain) == 1 and _is_pointwise(layer):  # as a single long row, which has the longest inner loop
                size = math.prod(layer.input_size)
                stage = replace(stage, in_height=1, in_width=size, out_height=1, out_width=size)
            if following is not None:
                assert isinstance(following.layer, Convolution), "of nothing else"
                rows = _rows_per_window(following.layer)
                stage = replace(stage, rows_in_memory=rows, ring_start=ring_bytes)
                ring_bytes += stage.out_channels * stage.out_width * rows
            arrays = (integers.weight, _folded(integers, layer), integers.zero_points, integers.table)
            constants = (None if array is None else self._constant(op, array) for array in arrays)
            stages.append((*constants, stage))
        source, source_type = chain[0].layer.operands[0], chain[0].operand_types[0]
        x = Ref(source) if source_type is None else self._read(op, source, source_type)
        output = chain[-1].layer.output
        result = self._result(op, output)
        rings = self._buffer(op, (ring_bytes,)) if ring_bytes else None
        self._call(op, ops.CONVOLUTIONS, (x, *stages), (result, rings), returns_tuple=True)
        self.integers[output] = Ref(result)

    # -- others

    def _other(self, op: GraphOp, integers: IntegerLayer) -> None:
        """Add the op of a layer that is no convolution."""
        layer = integers.layer
        reads = [
            self._read(op, value, type) for value, type in zip(layer.operands, integers.operand_types, strict=True)
        ]
        zeros = [type.zero_point for type in integers.operand_types if type is not None]
        if isinstance(layer, View):
            self.integers[layer.output] = self._view(layer.ops[0], layer, reads[0])
            return
        bounds = (integers.result_type.zero_point, integers.lowest, integers.highest)
        if isinstance(layer, Activation):
            assert integers.table is not None, "it has one"
            target, args = ops.LOOKUP, (*reads, self._constant(op, integers.table))
        elif isinstance(layer, Add):
            first, second, shift = integers.multipliers
            target, args = ops.ADD, (*reads, zeros[0], first, zeros[1], second, shift, *bounds)
        elif isinstance(layer, Multiply):
            target, args = ops.MULTIPLY, (*reads, *zeros, *integers.multipliers, *bounds, layer.elements_per_factor)
        elif isinstance(layer, AveragePool):
            target, args = ops.AVERAGE_POOL, (*reads, _sizes(layer), zeros[0], *integers.multipliers, *bounds)
        else:
            assert isinstance(layer, MaxPool), "there are no others"
            target, args = ops.MAX_POOL, (*reads, _sizes(layer))
        result = self._result(op, layer.output)
        operands = [self.values[read.value] for read in reads]
        overwritable = [
            operand.id for operand in operands
            if target in (ops.LOOKUP, ops.ADD, ops.MULTIPLY) and operand.shape == self.values[result].shape
            and not operand.is_view and operand.kind == "result"
        ]  # fmt: skip
        self._call(op, target, args, (result,), overwrites=tuple(dict.fromkeys(overwritable)))
        self.integers[layer.output] = Ref(result)

    def _view(self, op: GraphOp, layer: View, read: Ref) -> Ref:
        """Return a view of integers `read`; where shape and order are the same, `read` itself."""
        if not op.is_view or self.values[layer.output].shape == self.values[read.value].shape:
            return read
        like, base = self.values[layer.output], self.values[read.value].base
        view = self.value(like.name, like, dtype="int8", base=base, bytes=0, op=None)
        args, kwargs = (map_refs(arguments, lambda _: read) for arguments in (op.args, op.kwargs))
        self._call(op, op.target, args, (view,), kwargs=kwargs, makes=())
        return Ref(view)

    # -- values

    def _read(self, op: GraphOp, value: int, type: Affine | None) -> Ref:
        """Return the integers of a value; those of an input in float32 are computed where they are first read."""
        if value not in self.integers:
            assert value in self.part.float_inputs, "layers are in order"
            assert type is not None, "only bytes have no type, and convolutions alone read them"
            result = self._result(op, value)
            self._call(op, ops.QUANTIZE, (Ref(value), float(type.reciprocal), type.zero_point), (result,))
            self.integers[value] = Ref(result)
        return self.integers[value]

    def _result(self, op: GraphOp, like: int) -> int:
        """Add a contiguous int8 value with shape and name of a value of the graph."""
        return self._buffer(op, self.values[like].shape, like)

    def _buffer(self, op: GraphOp, shape: tuple[int, ...], like: int | None = None) -> int:
        """Add a contiguous int8 value, named after value `like`, by default the result of the op."""
        template = self.values[op.outputs[0] or 0 if like is None else like]
        stride = tuple(torch.empty(shape, device="meta").stride())
        fields = {"shape": shape, "stride": stride, "dtype": "int8", "bytes": math.prod(shape), "op": None}
        return self.value(f"{template.name}_int8", template, **fields)

    def _constant(self, op: GraphOp, array: np.ndarray) -> Ref:
        """Add an array of integers."""
        template, dtype = self.values[op.outputs[0] or 0], str(array.dtype)
        number = self.value(
            f"{template.name}_constant", template, kind="constant", shape=array.shape, dtype=dtype, bytes=0, op=None
        )
        self.constants[number] = torch.from_numpy(np.ascontiguousarray(array))
        return Ref(number)

    def _call(
        self, op: GraphOp, target: str, args: tuple[Any, ...], outputs: tuple[int | None, ...], **changes: Any
    ) -> None:
        """Add an op with phase, layer and source line of `op`."""
        fields: dict[str, Any] = {
            "index": -1 - len(self.ops), "target": target, "args": args, "kwargs": {}, "outputs": outputs,
            "makes": tuple(value for value in outputs if value is not None), "returns_tuple": False, "discarded": 0,
            "scratch": 0, "in_place_scratch": None, "overwrites": (), "random": False, "must_run_once": False,
            "gradient_of": None, "held_values": (), "cheaper_recompute": None, "phase": "forward", "seconds": 0.0,
        }  # fmt: skip
        self.add(replace(op, **{**fields, **changes}))


def _stage(integers: IntegerLayer, layer: Convolution) -> Stage:
    """Return the sizes of a convolution."""
    out_channels, group_channels, *kernel = layer.weight.shape
    return Stage(
        in_channels=group_channels * layer.groups, in_height=layer.input_size[0], in_width=layer.input_size[1],
        out_channels=out_channels, out_height=layer.output_size[0], out_width=layer.output_size[1], groups=layer.groups,
        kernel=(kernel[0], kernel[1]), stride=layer.stride, padding=layer.padding, dilation=layer.dilation,
        input_zero_point=_input_zero_point(integers), result_zero_point=integers.type_before_table.zero_point,
        lowest_result=integers.lowest, highest_result=integers.highest,
    )  # fmt: skip


def _input_zero_point(integers: IntegerLayer) -> int:
    """Return the zero point of a convolution's input: 0 for bytes, whose channels have their own."""
    return 0 if integers.operand_types[0] is None else integers.operand_types[0].zero_point


def _rows_per_window(layer: Convolution) -> int:
    """Return the rows of the input that a row of the result reads, with those between them."""
    return (layer.weight.shape[2] - 1) * layer.dilation[0] + 1


def _folded(integers: IntegerLayer, layer: Convolution) -> np.ndarray:
    """Return bias, multiplier and shift of each output channel, for kernels that multiply operands without subtracting
    their zero point: the bias contains the products of all weights with it."""
    assert integers.weight is not None, "a convolution has one"
    assert integers.rescale is not None, "a convolution has them"
    out_channels, group_channels = integers.weight.shape[:2]
    zeros = integers.zero_points  # by channel
    if zeros is None:
        zeros = np.full(group_channels * layer.groups, _input_zero_point(integers))
    weight_sums = integers.weight.astype(np.int64).sum(axis=(2, 3))
    zeros_read = zeros[channels_read(out_channels, group_channels, layer.groups)]
    folded = integers.rescale.copy()
    folded[:, 0] -= (weight_sums * zeros_read).sum(axis=1).astype(np.int32)
    return folded


def _is_pointwise(layer: Convolution) -> bool:
    return layer.weight.shape[2:] == (1, 1) and layer.stride == (1, 1) and layer.padding == (0, 0)


def _sizes(layer: Pool) -> tuple[int, ...]:
    return (
        layer.planes,
        *layer.input_size,
        *layer.output_size,
        *layer.kernel,
        *layer.stride,
        *layer.padding,
        *layer.dilation,
    )
