"""The integers of the frozen part: types of activations from the ranges on the user's data, weights, tables; and a
reference that computes with them what the device does, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from memplan.errors import InputError
from memplan.exporting.int8.arithmetic import HIGHEST, LARGEST_WEIGHT, LOWEST, Affine, multiplier, shifted_right
from memplan.exporting.int8.layers import (
    Activation,
    Add,
    AveragePool,
    Convolution,
    Layer,
    MaxPool,
    Multiply,
    Pool,
    View,
)
from memplan.planning.graph.joint_graph import GraphOp, map_refs
from memplan.planning.graph.op_schema import overload

SUM_LIMIT = 2**31
"""Sums of products lie below this magnitude."""


@dataclass(frozen=True)
class IntegerLayer:
    """What the kernel of a layer computes with."""

    layer: Layer
    operand_types: tuple[Affine | None, ...]
    """Types of its operands; None: an input of eight bits as it is."""
    result_type: Affine
    type_before_table: Affine
    """Type of a convolution's result before its table; else that of the result."""
    lowest: int = LOWEST
    highest: int = HIGHEST
    """Bounds of the result, or before the table."""
    weight: np.ndarray | None = None
    """int8: (output channels, input channels of a group, kernel height, kernel width)."""
    rescale: np.ndarray | None = None
    """int32, (output channels, 3): bias, multiplier and shift. They turn a sum of products into an integer of
    `type_before_table`: ``(sum + bias) * multiplier >> shift``, plus the zero point."""
    zero_points: np.ndarray | None = None
    """int32: for each channel of an input of eight bits, the byte that stands for 0."""
    table: np.ndarray | None = None
    """int8: 256 results of an activation, of -128 to 127."""
    multipliers: tuple[int, ...] = ()
    """Multipliers of an add (of each operand), product or average, and then their shift."""


def integer_layers(
    layers: Iterable[Layer], ranges: Mapping[int, tuple[float, float]], known: Mapping[int, torch.Tensor]
) -> list[IntegerLayer]:
    """Return the integers of layers.

    Args:
        layers: in order.
        ranges: smallest and largest element of each value of the graph on the user's data.
        known: numbers that activations read as tensors.

    Raises:
        InputError: the range of a layer is not finite, or too small beside what the layer reads.
    """
    types: dict[int, Affine] = {}

    def type_of(value: int) -> Affine:
        if value not in types:
            types[value] = Affine.of_range(*ranges[value])
        return types[value]

    converted = list[IntegerLayer]()
    for layer in layers:
        before_table = layer.value_before_table if isinstance(layer, Convolution) else None
        values = [value for value in (*layer.operands, before_table, layer.output) if value is not None]
        if not np.isfinite([ranges[value] for value in values if value in ranges]).all():
            raise _unfit(layer, "results that are not finite", "numbers, which have a range")
        if isinstance(layer, (View, MaxPool)):  # their kernels copy integers as they are
            types[layer.output] = type_of(layer.operands[0])
        try:
            converted.append(_integers(layer, type_of, known))
        except OverflowError:
            low, high = ranges[layer.output if before_table is None else before_table]
            raise _unfit(
                layer, f"results from {low:.3g} to {high:.3g}", "a range above a billionth of what the layer adds up"
            ) from None
    return converted


def _unfit(layer: Layer, found: str, expected: str) -> InputError:
    """Return the error for a layer whose results on the calibration data do not suit eight bits."""
    return InputError(
        f"{layer.ops[-1].layer or 'the model'}: {found} on the data of calibrate", expected=expected,
        do="Give data as the device will see it, or leave out frozen_layers='int8'",
    )  # fmt: skip


def _integers(layer: Layer, type_of: Callable[[int], Affine], known: Mapping[int, torch.Tensor]) -> IntegerLayer:
    """Return the integers of a layer. Raises OverflowError if its scale is too small beside what it reads."""
    if isinstance(layer, Convolution):
        return _convolution(layer, type_of, known)
    reads, result = tuple(map(type_of, layer.operands)), type_of(layer.output)
    low, high = result.integer_at(layer.lower_bound), result.integer_at(layer.upper_bound)
    table, factors = None, ()
    if isinstance(layer, Activation):
        table = _table(layer.ops[-1], layer.operands[0], reads[0], result, known)
    elif isinstance(layer, Add):
        real_factors = [reads[0].scale / result.scale, layer.factor * reads[1].scale / result.scale]
        _, shift = multiplier(max(map(abs, real_factors)))  # one for both: the products are added before the shift
        factors = (*(round(factor * 2.0**shift) for factor in real_factors), shift)
    elif isinstance(layer, Multiply):
        factors = multiplier(reads[0].scale * reads[1].scale / result.scale)
    elif isinstance(layer, AveragePool):
        factors = multiplier(reads[0].scale / (result.scale * layer.divisor))
    return IntegerLayer(
        layer,
        reads,
        result_type=result,
        type_before_table=result,
        lowest=low,
        highest=high,
        table=table,
        multipliers=factors,
    )


def _convolution(
    layer: Convolution, type_of: Callable[[int], Affine], known: Mapping[int, torch.Tensor]
) -> IntegerLayer:
    """Return the integers of a convolution.

    The scales of the weights, one for each output channel, double until the sum of products and bias stays below 2 **
    31 for any input.
    """
    input_type = None if layer.byte_input else type_of(layer.operands[0])
    if input_type is None:
        weight, bias, zeros, input_scale = _of_bytes(layer)
        largest_input = 255 + int(np.abs(zeros).max())
    else:
        weight, bias, zeros, input_scale = layer.weight, layer.bias, None, input_type.scale
        largest_input = 2 * -LOWEST  # less a zero point of -128 to 127
    before_table = type_of(layer.output if layer.value_before_table is None else layer.value_before_table)
    largest_weights = np.abs(weight).reshape(len(weight), -1).max(axis=1, initial=0.0)
    scales = np.maximum(largest_weights / LARGEST_WEIGHT, np.abs(bias) / (input_scale * SUM_LIMIT / 2))
    scales = np.where(scales > 0, scales, 1.0)
    while True:
        rounded = np.rint(weight / scales.reshape(-1, 1, 1, 1))
        int8_weight = np.clip(rounded, -LARGEST_WEIGHT, LARGEST_WEIGHT).astype(np.int8)
        int_bias = np.rint(bias / (input_scale * scales)).astype(np.int64)
        magnitudes = np.abs(int8_weight.astype(np.int64)).reshape(len(weight), -1).sum(axis=1)
        largest_sums = magnitudes * largest_input + np.abs(int_bias)
        if (largest_sums < SUM_LIMIT).all():
            break
        scales = np.where(largest_sums < SUM_LIMIT, scales, 2 * scales)
    multipliers = [multiplier(input_scale * scale / before_table.scale) for scale in scales]
    rescale = np.array([(term, *pair) for term, pair in zip(int_bias, multipliers, strict=True)], np.int32)
    table, result = None, type_of(layer.output)
    if layer.activation is not None:
        assert layer.value_before_table is not None
        table = _table(layer.activation, layer.value_before_table, before_table, result, known)
    return IntegerLayer(
        layer, (input_type,), result_type=result, type_before_table=before_table,
        lowest=before_table.integer_at(layer.lower_bound), highest=before_table.integer_at(layer.upper_bound),
        weight=int8_weight, rescale=rescale, zero_points=zeros, table=table,
    )  # fmt: skip


def _of_bytes(layer: Convolution) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Return (weight, bias, zero points, scale) of a convolution that reads bytes q as ``factor * q + addend``.

    It then reads ``scale * (q - zero point)``: the weight contains the factors relative to the scale. Zero points are
    rounded to integers, and the bias corrects for that, exactly except for windows that reach into the padding.
    """
    assert layer.byte_input is not None
    factor, addend = layer.byte_input.factor, layer.byte_input.addend
    is_constant = factor == 0  # a channel without influence of its bytes
    zeros = np.rint(np.where(is_constant, 0.0, -addend / np.where(is_constant, 1.0, factor)))
    rounding_errors = np.where(is_constant, addend, factor * zeros + addend)
    channels = channels_read(layer.weight.shape[0], layer.weight.shape[1], layer.groups)
    weight_sums = layer.weight.sum(axis=(2, 3))
    bias = layer.bias + (weight_sums * rounding_errors[channels]).sum(axis=1)
    scale = float(np.abs(factor).max()) or 1.0
    return layer.weight * (factor / scale)[channels][:, :, None, None], bias, zeros.astype(np.int32), scale


def channels_read(out_channels: int, group_channels: int, groups: int) -> np.ndarray:
    """Return the input channel that each weight of a convolution reads, (output channels, input channels of a group).

    Example:
        >>> channels_read(2, 3, groups=2).tolist()
        [[0, 1, 2], [3, 4, 5]]
    """
    group = np.arange(out_channels) // (out_channels // groups)
    return group[:, None] * group_channels + np.arange(group_channels)


def _table(
    op: GraphOp, operand: int, operand_type: Affine, result: Affine, known: Mapping[int, torch.Tensor]
) -> np.ndarray:
    """Return the result in int8 of an activation `op` for each int8 `operand`, a value of the graph, from -128 to 127.

    `known` has the op's constants by value.
    """
    integers = np.arange(LOWEST, HIGHEST + 1)
    reals = torch.from_numpy(operand_type.scale * (integers - operand_type.zero_point).astype(np.float64))

    def elements(value: int) -> torch.Tensor:
        return reals if value == operand else known[value].double().reshape(())

    args, kwargs = map_refs(op.args, elements), map_refs(op.kwargs, elements)
    return result.integers(overload(op.target)(*args, **kwargs).numpy())


# -- the reference


def integer_values(
    layers: Iterable[IntegerLayer], inputs: Mapping[int, np.ndarray], shapes: Mapping[int, tuple[int, ...]]
) -> Iterator[tuple[IntegerLayer, np.ndarray]]:
    """Compute layers as the device does; yield each with its result in int8.

    Args:
        layers: in order.
        inputs: elements of the values that no layer computes, in float32, or in eight bits as they are.
        shapes: of the layers' results.
    """
    values: dict[int, np.ndarray] = {}
    for integers in layers:
        layer, operands = integers.layer, list[np.ndarray]()
        for value, type in zip(layer.operands, integers.operand_types, strict=True):
            if value not in values:
                values[value] = inputs[value] if type is None else type.rounded_inputs(inputs[value])
            operands.append(values[value])
        result = _computed(integers, operands).reshape(shapes[layer.output])
        values[layer.output] = result
        yield integers, result


def _computed(integers: IntegerLayer, operands: list[np.ndarray]) -> np.ndarray:
    """Compute a layer from its operands in int8 (or bytes of an input); return int8."""
    layer = integers.layer
    if isinstance(layer, Convolution):
        return _convolved(integers, layer, operands[0])
    if isinstance(layer, View):
        return operands[0]
    if isinstance(layer, Activation):
        assert integers.table is not None
        return integers.table[operands[0].astype(np.int64) - LOWEST]
    if isinstance(layer, MaxPool):
        return _windows(layer, operands[0], padding=LOWEST).max(axis=0)
    types = [type for type in integers.operand_types if type is not None]  # all: convolutions alone read bytes
    centred = [x.astype(np.int64) - type.zero_point for x, type in zip(operands, types, strict=True)]
    *factors, shift = integers.multipliers
    if isinstance(layer, Add):
        products = centred[0] * factors[0] + centred[1] * factors[1]
    elif isinstance(layer, Multiply):
        products = centred[0].reshape(-1, layer.elements_per_factor) * centred[1].reshape(-1, 1) * factors[0]
    else:
        assert isinstance(layer, AveragePool), "there are no others"
        products = _windows(layer, centred[0], padding=0).sum(axis=0) * factors[0]
    return np.clip(
        shifted_right(products, shift) + integers.result_type.zero_point, integers.lowest, integers.highest
    ).astype(np.int8)


def _convolved(integers: IntegerLayer, layer: Convolution, x: np.ndarray) -> np.ndarray:
    """Compute an integer convolution of int8 or bytes. Its sums of integers, below 2 ** 31, are exact in float64."""
    assert integers.weight is not None, "a convolution has one"
    assert integers.rescale is not None, "a convolution has them"
    channels = integers.weight.shape[1] * layer.groups
    planes = x.reshape(-1, channels, *layer.input_size).astype(np.float64)
    if integers.zero_points is not None:  # of the channels of an input of eight bits
        planes -= integers.zero_points.reshape(-1, 1, 1)
    elif integers.operand_types[0] is not None:
        planes -= integers.operand_types[0].zero_point
    weight = torch.from_numpy(integers.weight.astype(np.float64))
    sums = F.conv2d(
        torch.from_numpy(planes), weight, None, layer.stride, layer.padding, layer.dilation, layer.groups
    ).numpy()  # fmt: skip
    bias, factors, shifts = (integers.rescale[:, k].astype(np.int64).reshape(-1, 1, 1) for k in range(3))
    products = (np.rint(sums).astype(np.int64) + bias) * factors
    result = np.clip(
        shifted_right(products, shifts) + integers.type_before_table.zero_point, integers.lowest, integers.highest
    )
    return (result if integers.table is None else integers.table[result - LOWEST]).astype(np.int8)


def _windows(layer: Pool, x: np.ndarray, padding: int) -> np.ndarray:
    """Return the elements of all windows of a pool, as (elements of a window, planes, rows, columns)."""
    (height, width), (top, left) = layer.input_size, layer.padding
    sizes = zip(layer.output_size, layer.stride, layer.kernel, layer.dilation, strict=True)
    ends = [(count - 1) * stride + (size - 1) * step + 1 for count, stride, size, step in sizes]  # of the last window
    planes = x.reshape(-1, height, width)
    padded = np.full((len(planes), max(ends[0], top + height), max(ends[1], left + width)), padding, planes.dtype)
    padded[:, top : top + height, left : left + width] = planes
    # one element of each window is a slice with the stride as step, which ends at the last window's
    h, w = ((count - 1) * stride + 1 for count, stride in zip(layer.output_size, layer.stride, strict=True))
    first_elements = [(ky * layer.dilation[0], kx * layer.dilation[1])
                      for ky in range(layer.kernel[0]) for kx in range(layer.kernel[1])]  # fmt: skip
    return np.stack([padded[:, y : y + h : layer.stride[0], x : x + w : layer.stride[1]] for y, x in first_elements])
