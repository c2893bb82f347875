"""The integers of the frozen part: types of activations from the ranges on the user's data, weights, tables; and a
reference that computes with them what the device does, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from memplan.errors import InputError
from memplan.exporting.int8.arithmetic import HIGHEST, LARGEST_WEIGHT, LOWEST, Affine, multiplier, shifted
from memplan.exporting.int8.layers import Activation, Add, Average, Convolution, Largest, Layer, Multiply, View, Window
from memplan.planning.graph.joint_graph import GraphOp, map_refs
from memplan.planning.graph.op_schema import overload

WORD = 2**31
"""Sums of products lie below this magnitude."""


@dataclass(frozen=True)
class Integers:
    """What the kernel of a layer computes with."""

    layer: Layer
    reads: tuple[Affine | None, ...]
    """Types of what it reads; None: an input of eight bits as it is."""
    type: Affine
    """Type of the result."""
    before: Affine
    """Type of a convolution's result before its table; else that of the result."""
    low: int = LOWEST
    high: int = HIGHEST
    weight: np.ndarray | None = None
    """int8: (wide, narrow of a group, kernel height, kernel width)."""
    rescale: np.ndarray | None = None
    """int32: for each channel the bias, the multiplier and its shift."""
    zeros: np.ndarray | None = None
    """int32: for each channel of an input of eight bits, the byte that stands for 0."""
    table: np.ndarray | None = None
    """int8: 256 results of an activation."""
    factors: tuple[int, ...] = ()
    """Multipliers of an add, product or average, and then their shift."""


def integer_layers(
    layers: Iterable[Layer], ranges: Mapping[int, tuple[float, float]], known: Mapping[int, torch.Tensor]
) -> list[Integers]:
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

    done = list[Integers]()
    for layer in layers:
        before = layer.before if isinstance(layer, Convolution) else None
        used = [ranges[value] for value in (*layer.reads, before, layer.out) if value is not None and value in ranges]
        if not np.isfinite(used).all():
            raise _unfit(layer, "results that are not finite", "numbers, which have a range")
        if isinstance(layer, (View, Largest)):
            types[layer.out] = type_of(layer.reads[0])
        try:
            done.append(_integers(layer, type_of, known))
        except OverflowError:
            low, high = ranges[layer.out if before is None else before]
            raise _unfit(
                layer, f"results from {low:.3g} to {high:.3g}", "a range above a billionth of what the layer adds up"
            ) from None
    return done


def _unfit(layer: Layer, found: str, expected: str) -> InputError:
    """Return the error for a layer whose results on the calibration data do not suit eight bits."""
    return InputError(
        f"{layer.ops[-1].layer or 'the model'}: {found} on the data of calibrate", expected=expected,
        do="Give data as the device will see it, or leave out frozen_layers='int8'",
    )  # fmt: skip


def _integers(layer: Layer, type_of: Callable[[int], Affine], known: Mapping[int, torch.Tensor]) -> Integers:
    """Return the integers of a layer. Raises OverflowError if its scale is too small beside what it reads."""
    if isinstance(layer, Convolution):
        return _convolution(layer, type_of, known)
    reads, result = tuple(map(type_of, layer.reads)), type_of(layer.out)
    low, high = result.bound(layer.low), result.bound(layer.high)
    table, factors = None, ()
    if isinstance(layer, Activation):
        table = _table(layer.ops[-1], layer.reads[0], reads[0], result, known)
    elif isinstance(layer, Add):
        real = [reads[0].scale / result.scale, layer.factor * reads[1].scale / result.scale]
        _, shift = multiplier(max(map(abs, real)))
        factors = (*(round(number * 2.0**shift) for number in real), shift)
    elif isinstance(layer, Multiply):
        factors = multiplier(reads[0].scale * reads[1].scale / result.scale)
    elif isinstance(layer, Average):
        factors = multiplier(reads[0].scale / (result.scale * layer.divisor))
    return Integers(layer, reads, type=result, before=result, low=low, high=high, table=table, factors=factors)


def _convolution(layer: Convolution, type_of: Callable[[int], Affine], known: Mapping[int, torch.Tensor]) -> Integers:
    """Return the integers of a convolution.

    Steps, the real numbers that weights of 1 stand for by output channel, double until the sum of products and bias
    stays below 2 ** 31 for any input.
    """
    reads = None if layer.bytes else type_of(layer.reads[0])
    if reads is None:
        weight, bias, zeros, scale = _of_bytes(layer)
        largest = 255 + int(np.abs(zeros).max())
    else:
        weight, bias, zeros, scale, largest = layer.weight, layer.bias, None, reads.scale, 2 * -LOWEST
    before = type_of(layer.out if layer.before is None else layer.before)
    flat = np.abs(weight).reshape(len(weight), -1)
    steps = np.maximum(flat.max(axis=1, initial=0.0) / LARGEST_WEIGHT, np.abs(bias) / (scale * WORD / 2))
    steps = np.where(steps > 0, steps, 1.0)
    while True:
        numbers = np.clip(np.rint(weight / steps.reshape(-1, 1, 1, 1)), -LARGEST_WEIGHT, LARGEST_WEIGHT).astype(np.int8)
        terms = np.rint(bias / (scale * steps)).astype(np.int64)
        sums = np.abs(numbers.astype(np.int64)).reshape(len(weight), -1).sum(axis=1) * largest + np.abs(terms)
        if (sums < WORD).all():
            break
        steps = np.where(sums < WORD, steps, 2 * steps)
    pairs = [multiplier(scale * step / before.scale) for step in steps]
    rescale = np.array([(term, *pair) for term, pair in zip(terms, pairs, strict=True)], np.int32)
    low, high = before.bound(layer.low), before.bound(layer.high)
    table, result = None, type_of(layer.out)
    if layer.activation is not None:
        assert layer.before is not None
        table = _table(layer.activation, layer.before, before, result, known)
    return Integers(layer, (reads,), result, before, low, high, numbers, rescale, zeros, table)


def _of_bytes(layer: Convolution) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Return (weight, bias, zeros, scale) of a convolution that reads bytes q as ``factor * q + addend`` by channel.

    The convolution reads ``scale * (q - zero)``: the weight contains the factors relative to the scale. `zeros` are
    rounded to integers, and the bias corrects for that, exactly except for windows that reach into the padding.
    """
    assert layer.bytes is not None
    factor, addend, wide = layer.bytes.factor, layer.bytes.addend, len(layer.weight)
    exact = np.where(factor == 0, 0.0, -addend / np.where(factor == 0, 1.0, factor))
    zeros = np.rint(exact)
    of_group = np.arange(wide) // (wide // layer.groups)
    narrow = layer.weight.shape[1]
    channels = of_group[:, None] * narrow + np.arange(narrow)  # (wide, narrow): the channel that a weight reads
    left = np.where(factor == 0, addend, factor * zeros + addend)
    sums = layer.weight.sum(axis=(2, 3))
    bias = layer.bias + (sums * left[channels]).sum(axis=1)
    scale = float(np.abs(factor).max()) or 1.0
    return layer.weight * (factor / scale)[channels][:, :, None, None], bias, zeros.astype(np.int32), scale


def _table(op: GraphOp, x: int, of: Affine, result: Affine, known: Mapping[int, torch.Tensor]) -> np.ndarray:
    """Return the result in int8 of an activation `op` for each int8 operand from -128 to 127.

    `x` is the operand's value in the graph, `of` its type, and `known` the op's constants by value.
    """
    real = torch.from_numpy(of.scale * (np.arange(LOWEST, HIGHEST + 1) - of.zero).astype(np.float64))
    args, kwargs = (
        map_refs(given, lambda v: real if v == x else known[v].double().reshape(())) for given in (op.args, op.kwargs)
    )
    return result.integers(overload(op.target)(*args, **kwargs).numpy())


# -- the reference


def integer_values(
    layers: Iterable[Integers], inputs: Mapping[int, np.ndarray], shapes: Mapping[int, tuple[int, ...]]
) -> Iterator[tuple[Integers, np.ndarray]]:
    """Compute layers as the device does; yield each with its result in int8.

    Args:
        layers: in order.
        inputs: elements of the values that no layer computes, in float32, or in eight bits as they are.
        shapes: of the layers' results.
    """
    values: dict[int, np.ndarray] = {}
    for layer in layers:
        read = list[np.ndarray]()
        for value, type in zip(layer.layer.reads, layer.reads, strict=True):
            if value not in values:
                values[value] = inputs[value] if type is None else type.rounded_inputs(inputs[value])
            read.append(values[value])
        out = _computed(layer, read).reshape(shapes[layer.layer.out])
        values[layer.layer.out] = out
        yield layer, out


def _computed(integers: Integers, read: list[np.ndarray]) -> np.ndarray:
    """Compute a layer from its operands in int8 (or bytes of an input); return int8."""
    layer = integers.layer
    if isinstance(layer, Convolution):
        return _convolved(integers, layer, read[0])
    if isinstance(layer, View):
        return read[0]
    if isinstance(layer, Activation):
        assert integers.table is not None
        return integers.table[read[0].astype(np.int64) - LOWEST]
    if isinstance(layer, Largest):
        return _windows(layer, read[0], LOWEST).max(axis=0)
    centred = [x.astype(np.int64) - type.zero for x, type in zip(read, integers.reads, strict=True) if type is not None]
    if isinstance(layer, Add):
        products = centred[0] * integers.factors[0] + centred[1] * integers.factors[1]
    elif isinstance(layer, Multiply):
        products = centred[0].reshape(-1, layer.inner) * centred[1].reshape(-1, 1) * integers.factors[0]
    else:
        assert isinstance(layer, Average), "there are no others"
        products = _windows(layer, centred[0], padding=0).sum(axis=0) * integers.factors[0]
    return np.clip(shifted(products, integers.factors[-1]) + integers.type.zero, integers.low, integers.high).astype(
        np.int8
    )


def _convolved(integers: Integers, layer: Convolution, x: np.ndarray) -> np.ndarray:
    """Compute an integer convolution of int8 or bytes; the sums are exact in float64."""
    assert integers.weight is not None, "a convolution has one"
    assert integers.rescale is not None, "a convolution has them"
    channels = integers.weight.shape[1] * layer.groups
    planes = x.reshape(-1, channels, *layer.plane).astype(np.float64)
    if integers.zeros is not None:  # of the channels of an input of eight bits
        planes -= integers.zeros.reshape(-1, 1, 1)
    elif integers.reads[0] is not None:
        planes -= integers.reads[0].zero
    weight = torch.from_numpy(integers.weight.astype(np.float64))
    sums = F.conv2d(
        torch.from_numpy(planes), weight, None, layer.stride, layer.padding, layer.dilation, layer.groups
    ).numpy()  # fmt: skip
    bias, factors, shifts = (integers.rescale[:, k].astype(np.int64).reshape(-1, 1, 1) for k in range(3))
    products = (np.rint(sums).astype(np.int64) + bias) * factors
    result = np.clip(shifted(products, shifts) + integers.before.zero, integers.low, integers.high)
    return (result if integers.table is None else integers.table[result - LOWEST]).astype(np.int8)


def _windows(layer: Window, x: np.ndarray, padding: int) -> np.ndarray:
    """Return the elements of all windows of a pool, as (elements of a window, planes, rows, columns)."""
    (height, width), (top, left) = layer.plane, layer.padding
    sizes = zip(layer.result, layer.stride, layer.kernel, layer.dilation, strict=True)
    ends = [(count - 1) * stride + (size - 1) * step + 1 for count, stride, size, step in sizes]
    planes = x.reshape(-1, height, width)
    padded = np.full((len(planes), max(ends[0], top + height), max(ends[1], left + width)), padding, planes.dtype)
    padded[:, top : top + height, left : left + width] = planes
    reach = [(count - 1) * stride + 1 for count, stride in zip(layer.result, layer.stride, strict=True)]
    starts = [(ky * layer.dilation[0], kx * layer.dilation[1])
              for ky in range(layer.kernel[0]) for kx in range(layer.kernel[1])]  # fmt: skip
    return np.stack(
        [padded[:, y : y + reach[0] : layer.stride[0], x : x + reach[1] : layer.stride[1]] for y, x in starts]
    )
