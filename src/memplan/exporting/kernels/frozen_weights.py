"""Quantize weights to int8, and find those whose ops have kernels that read int8.

Quantization is symmetric, with a scale for each index of the first dimension: an output channel of a linear layer or a
convolution (an input channel of a transposed convolution), a row of an embedding. Kernels multiply by the scale as they
read an element.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from memplan.exporting.lowering import convolution_splitting as conv
from memplan.planning.graph.joint_graph import GraphOp, JointGraph, Ref, Value, refs
from memplan.planning.graph.op_schema import is_contiguous

LARGEST_INT8 = 127
"""Largest magnitude of an element; -128 is not used, which keeps the range symmetric."""

WEIGHT_POSITION = {
    "aten.addmm.default": 2,
    "aten.mm.default": 1,
    "aten.embedding.default": 0,
    conv.GATHER: 1,
    conv.SCATTER: 1,
}
"""By op whose kernel reads int8 weights: the position of the weight among its arguments."""
_PRODUCTS = ("aten.addmm.default", "aten.mm.default")


@dataclass(frozen=True, slots=True)
class Quantized:
    """An int8 weight."""

    numbers: np.ndarray
    """int8, in the weight's shape."""
    scales: np.ndarray
    """float32, of the size of the first dimension."""

    @property
    def floats(self) -> np.ndarray:
        """Return the weight that kernels compute with, in float32."""
        shape = (-1, *(1,) * (self.numbers.ndim - 1))
        return self.scales.reshape(shape) * self.numbers.astype(np.float32)


def quantized(weight: np.ndarray, headroom: float = 1.0) -> Quantized:
    """Round a weight to int8; along the first dimension 127 is `headroom` times the largest magnitude of each slice.

    Example:
        >>> quantized(np.array([[1.0, -0.5], [0.0, 0.0]], np.float32)).numbers.tolist()
        [[127, -64], [0, 0]]
    """
    slices = weight.reshape(weight.shape[0], -1).astype(np.float32)
    scales = (np.abs(slices).max(axis=1, initial=0.0) * np.float32(headroom) / LARGEST_INT8).astype(np.float32)
    divisors = np.where(scales > 0, scales, np.float32(1.0))[:, None]  # a slice of zeros is divided by 1
    numbers = np.clip(np.rint(slices / divisors), -LARGEST_INT8, LARGEST_INT8).astype(np.int8)
    return Quantized(numbers.reshape(weight.shape), scales)


def trainable(weight: np.ndarray, headroom: float) -> Quantized:
    """Round a weight that is trained to int8: it can grow to `headroom` times its largest magnitude. A slice of zeros
    gets the largest scale of the others.

    Example:
        >>> trainable(np.array([[1.0, -0.5], [0.0, 0.0]], np.float32), 1.27).scales.tolist()
        [0.009999999776482582, 0.009999999776482582]
    """
    rounded = quantized(weight, headroom)
    scales = np.where(rounded.scales > 0, rounded.scales, rounded.scales.max(initial=0.0))
    return Quantized(rounded.numbers, scales.astype(np.float32))


def parameters_readable_in_int8(graphs: Iterable[JointGraph], parameters: Iterable[str]) -> set[str]:
    """Return the names of those of the parameters whose reading ops, in all graphs, have kernels for int8 weights."""
    names, in_int8, in_float32 = set(parameters), set[str](), set[str]()
    for graph in graphs:
        for value in graph.values:
            if value.kind == "parameter" and value.path in names:  # `parameters` also names buffers
                (in_int8 if _is_readable(graph, value) else in_float32).add(value.path)
    return in_int8 - in_float32


def _is_readable(graph: JointGraph, parameter: Value) -> bool:
    """Return whether a kernel for int8 weights exists for every op that reads the parameter."""
    if len(parameter.shape) < 2 or not is_contiguous(parameter):
        return False
    outputs = {graph.base(value) for value in graph.outputs}
    readers = [op for op in graph.ops if not op.is_view and parameter.id in op.reads]
    return parameter.id not in outputs and all(_reads_as_weight(graph, op, parameter) for op in readers)


def _reads_as_weight(graph: JointGraph, op: GraphOp, parameter: Value) -> bool:
    """Return whether an op can read the parameter in int8: as its weight and nothing else, in a layout in which its
    kernel knows the scale of each element."""
    position = WEIGHT_POSITION.get(op.target)
    views_read = [value for value in refs((op.args, op.kwargs)) if graph.base(value) == parameter.id]
    weight = None if position is None else op.args[position]
    if op.target in _PRODUCTS and "bytes" in op.kwargs:  # no kernel reads an input in bytes and a weight in int8
        return False
    if len(views_read) != 1 or not isinstance(weight, Ref) or weight.value != views_read[0]:
        return False
    view = graph.values[weight.value]
    if op.target in _PRODUCTS:
        return scales_are_by_column(graph, view) is not None
    return is_contiguous(view) and view.shape[0] == parameter.shape[0] and _is_whole(view, parameter)


def scales_are_by_column(graph: JointGraph, value: Value) -> bool | None:
    """Return True if each column of a matrix, a view of an int8 weight, has a scale, False if each row has, None if
    neither does."""
    weight = graph.values[graph.base(value.id)]
    scales, elements_per_scale = weight.shape[0], math.prod(weight.shape[1:])
    if len(value.shape) != 2 or not _is_whole(value, weight):
        return None
    by_row = ((scales, elements_per_scale), (elements_per_scale, 1))  # (shape, strides)
    transposed = ((elements_per_scale, scales), (1, elements_per_scale))
    for is_transposed, (shape, strides) in ((False, by_row), (True, transposed)):
        dims = zip(shape, value.stride, strides, strict=True)
        if value.shape == shape and all(size == 1 or stride == expected for size, stride, expected in dims):
            return is_transposed
    return None


def _is_whole(value: Value, weight: Value) -> bool:
    return math.prod(value.shape) == math.prod(weight.shape)
