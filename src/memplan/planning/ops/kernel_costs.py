"""Work of the ops of `memplan.kernels` whose bytes are not only those of their operands and results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memplan.planning.graph.joint_graph import Value
from memplan.planning.graph.op_schema import KERNELS, itemsize
from memplan.planning.graph.roofline import WORKS, Work

STATISTICS = "memplan.token_statistics.default"
STATISTICS_BACKWARD = "memplan.token_statistics_backward.default"


def _statistics(args: Sequence[Any]) -> Work:
    """One product, which writes the logits of all classes part by part, and a kernel that reads them."""
    named = dict(zip(KERNELS[STATISTICS], args, strict=True))
    return _of_logits(named["hidden"], named["weight"], products=1, passes=2)


def _statistics_backward(args: Sequence[Any]) -> Work:
    """The logits once more, a kernel that writes their gradient over them, and a product for each gradient."""
    named = dict(zip(KERNELS[STATISTICS_BACKWARD], args, strict=True))
    products = 1 + sum(named["wanted"][:2])
    return _of_logits(named["hidden"], named["weight"], products=products, passes=2 + products)


def _of_logits(hidden: Value, weight: Value, *, products: int, passes: int) -> Work:
    """Return the work of a number of products of N tokens, D features and V classes, and of passes over N V logits."""
    (tokens, features), classes, size = hidden.shape, weight.shape[0], itemsize(hidden.dtype)
    operands = size * features * (tokens + classes) * products
    return Work(2 * products * tokens * features * classes, operands + passes * tokens * classes * size, hidden.dtype)


WORKS[STATISTICS] = _statistics
WORKS[STATISTICS_BACKWARD] = _statistics_backward
