"""Work of the ops of `memplan.kernels` whose bytes are not only those of their operands and results."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from memplan.kernels import dice
from memplan.kernels.depthwise import parts_of
from memplan.planning.graph.joint_graph import Value
from memplan.planning.graph.op_schema import (
    CHANNEL_NORM,
    CHANNEL_NORM_BACKWARD,
    CLASS_SUMS,
    DEPTHWISE,
    DEPTHWISE_BACKWARD,
    DROPOUT_MASK,
    KERNELS,
    TOKEN_STATISTICS,
    TOKEN_STATISTICS_BACKWARD,
    itemsize,
)
from memplan.planning.graph.roofline import WORKS, Work
from memplan.trace.records import HOST


def _statistics(args: Sequence[Any]) -> Work:
    """Return the work of the op `TOKEN_STATISTICS`: a product writes the logits, and a kernel reads them."""
    named = dict(zip(KERNELS[TOKEN_STATISTICS], args, strict=True))
    return _of_logits(named["hidden"], named["weight"], products=1, passes=2)


def _statistics_backward(args: Sequence[Any]) -> Work:
    """Return the work of the op `TOKEN_STATISTICS_BACKWARD`. A product writes the logits again, a kernel writes their
    gradient over them, and a product computes each of the gradients of hidden states and weight that are wanted."""
    named = dict(zip(KERNELS[TOKEN_STATISTICS_BACKWARD], args, strict=True))
    products = 1 + sum(named["wanted"][:2])
    return _of_logits(named["hidden"], named["weight"], products=products, passes=2 + products)


def _of_logits(hidden: Value, weight: Value, *, products: int, passes: int) -> Work:
    """Return the work of a number of matrix products of the sizes tokens, features and classes, and of passes that each
    read or write all logits. ``hidden``: (tokens, features); ``weight``: (classes, features)."""
    (tokens, features), classes, size = hidden.shape, weight.shape[0], itemsize(hidden.dtype)
    flops = 2 * products * tokens * features * classes
    operand_bytes = size * features * (tokens + classes) * products
    return Work(flops, operand_bytes + passes * tokens * classes * size, hidden.dtype)


def _channel_norm(args: Sequence[Any]) -> Work:
    """Reads x for the moments, and once more with a residual to write y."""
    named = dict(zip(KERNELS[CHANNEL_NORM], args, strict=True))
    return _of_passes(named["x"], passes=3 + (named["residual"] is not None))


def _channel_norm_backward(args: Sequence[Any]) -> Work:
    """Reads the gradient, x and, where it is saved, y for the sums, and once more to write the gradients of x and the
    residual."""
    named = dict(zip(KERNELS[CHANNEL_NORM_BACKWARD], args, strict=True))
    return _of_passes(named["x"], passes=5 + 2 * (named["y"] is not None) + named["added"])


def _of_passes(x: Value, *, passes: int) -> Work:
    """Return the work of passes over a tensor; its arithmetic takes less time than its bytes."""
    return Work(flops=0, bytes=passes * prod(x.shape) * itemsize(x.dtype), rate=x.dtype)


def _depthwise(args: Sequence[Any]) -> Work:
    """Reads x and writes y: each element once, as its neighbours find it in the cache."""
    named = dict(zip(KERNELS[DEPTHWISE], args, strict=True))
    x, weight = named["x"], named["weight"]
    steps = (named["stride"], named["padding"], named["dilation"])
    sizes = (
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, k, s, p, d in zip(x.shape[2:], weight.shape[2:], *steps, strict=True)
    )
    return _of_filters(x, (*x.shape[:2], *sizes), weight, products=1, sums=0)


def _depthwise_backward(args: Sequence[Any]) -> Work:
    """Reads the gradient and writes that of x; reads both x and the gradient for that of the weight, whose parts' sums
    are written and read again."""
    named = dict(zip(KERNELS[DEPTHWISE_BACKWARD], args, strict=True))
    d_y, weight, wanted = named["d_y"], named["weight"], named["wanted"]
    taps, sums = prod(weight.shape[2:]), 0
    if wanted[1] or wanted[2]:
        parts, _, _ = parts_of(d_y.shape[0], prod(d_y.shape[2:]), taps)
        sums = parts * (taps + wanted[2]) * d_y.shape[1]
    return _of_filters(named["x"], d_y.shape, weight, products=wanted[0] + (wanted[1] or wanted[2]), sums=sums)


def _of_filters(x: Value, result: Sequence[int], weight: Value, *, products: int, sums: int) -> Work:
    """Return the work of passes that each read or write x, the result and the weight once, and of float32 sums that are
    written and read. Tensor cores take no part in it."""
    taps, size = prod(weight.shape[2:]), itemsize(x.dtype)
    moved = size * (prod(x.shape) + prod(result) + prod(weight.shape)) * products + 2 * 4 * sums
    return Work(2 * products * prod(result) * taps, moved, "float32")


def _class_sums(args: Sequence[Any]) -> Work:
    """Reads logits and targets; the sums of parts are written and read again. More classes go through plain torch."""
    named = dict(zip(KERNELS[CLASS_SUMS], args, strict=True))
    logits, targets = named["logits"], named["targets"]
    samples, classes, *sizes = logits.shape
    parts = -(-prod(sizes) // dice.part_length(classes)) if classes <= dice.LARGEST_CLASSES else 0
    operands = sum(prod(value.shape) * itemsize(value.dtype) for value in (logits, targets))
    return Work(flops=0, bytes=operands + 4 * 4 * samples * classes * (1 + 2 * parts), rate=logits.dtype)


def _dropout_mask(args: Sequence[Any]) -> Work:
    """Reads the input and writes a byte an element; on a card torch's kernel writes a product, too."""
    x, elements = args[0], prod(args[0].shape)
    return Work(flops=0, bytes=((1 if x.place == HOST else 2) * itemsize(x.dtype) + 1) * elements, rate=x.dtype)


WORKS[CLASS_SUMS] = _class_sums
WORKS[DROPOUT_MASK] = _dropout_mask
WORKS[CHANNEL_NORM] = _channel_norm
WORKS[CHANNEL_NORM_BACKWARD] = _channel_norm_backward
WORKS[DEPTHWISE] = _depthwise
WORKS[DEPTHWISE_BACKWARD] = _depthwise_backward
WORKS[TOKEN_STATISTICS] = _statistics
WORKS[TOKEN_STATISTICS_BACKWARD] = _statistics_backward
