"""Work of the ops of `memplan.kernels` whose bytes are not only those of their operands and results."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from memplan.planning.graph.joint_graph import Value
from memplan.planning.graph.op_schema import (
    CHANNEL_NORM,
    CHANNEL_NORM_BACKWARD,
    KERNELS,
    TOKEN_STATISTICS,
    TOKEN_STATISTICS_BACKWARD,
    itemsize,
)
from memplan.planning.graph.roofline import WORKS, Work


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
    return Work(0, passes * prod(x.shape) * itemsize(x.dtype), x.dtype)


WORKS[CHANNEL_NORM] = _channel_norm
WORKS[CHANNEL_NORM_BACKWARD] = _channel_norm_backward
WORKS[TOKEN_STATISTICS] = _statistics
WORKS[TOKEN_STATISTICS_BACKWARD] = _statistics_backward
