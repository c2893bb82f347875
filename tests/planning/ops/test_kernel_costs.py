"""Work of kernels that hold logits part by part."""

from __future__ import annotations

import pytest

from memplan.planning.graph.joint_graph import Value
from memplan.planning.graph.roofline import WORKS
from memplan.planning.ops.kernel_costs import STATISTICS, STATISTICS_BACKWARD

TOKENS, WIDTH, CLASSES = 96, 64, 3000


def tensor(*shape: int) -> Value:
    return Value(0, "v", "result", 0, 0, shape, (), "float32")


@pytest.mark.parametrize("trained", [True, False])
def test_work_is_that_of_the_products_and_of_the_logits(trained: bool) -> None:
    """By hand, as derived at the top of memplan.kernels.cross_entropy: backward computes the logits once more, their
    gradient over them, then that of hidden, and of a weight that is trained. Each product is read or written once."""
    hidden, weight, rows = tensor(TOKENS, WIDTH), tensor(CLASSES, WIDTH), tensor(TOKENS)
    product, logits, operands = 2 * TOKENS * WIDTH * CLASSES, 4 * TOKENS * CLASSES, 4 * WIDTH * (TOKENS + CLASSES)
    forward = WORKS[STATISTICS]((hidden, weight, None, rows, 0.0, 1.0, False))
    assert (forward.flops, forward.bytes) == (product, 2 * logits + operands)
    wanted, products = [True, trained, False], 2 + trained
    backward = WORKS[STATISTICS_BACKWARD]((rows, rows, rows, hidden, weight, None, rows, rows, 0.0, 1.0, wanted))
    assert (backward.flops, backward.bytes) == (products * product, (2 + products) * logits + products * operands)
