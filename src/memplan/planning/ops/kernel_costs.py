"""Work of the ops of `memplan.kernels` whose bytes are not only those of their operands and results."""

from __future__ import annotations

from memplan.planning.graph.joint_graph import GraphOp, JointGraph
from memplan.planning.graph.op_schema import arguments_of, itemsize
from memplan.planning.graph.roofline import WORKS, Work


def _statistics(graph: JointGraph, op: GraphOp) -> Work:
    """One product, which writes the logits of all classes part by part, and a kernel that reads them."""
    return _of_logits(graph, op, products=1, passes=2)


def _statistics_backward(graph: JointGraph, op: GraphOp) -> Work:
    """The logits once more, a kernel that writes their gradient over them, and a product for each gradient."""
    wanted = arguments_of(op.target, op.args, op.kwargs)["wanted"]
    products = 1 + sum(wanted[:2])
    return _of_logits(graph, op, products=products, passes=2 + products)


def _of_logits(graph: JointGraph, op: GraphOp, *, products: int, passes: int) -> Work:
    """Return the work of a number of products of N tokens, D features and V classes, and of passes over N V logits."""
    named = arguments_of(op.target, op.args, op.kwargs)
    hidden, weight = (graph.values[named[name].value] for name in ("hidden", "weight"))
    (tokens, features), classes, size = hidden.shape, weight.shape[0], itemsize(hidden.dtype)
    operands = size * features * (tokens + classes) * products
    return Work(2 * products * tokens * features * classes, operands + passes * tokens * classes * size, hidden.dtype)


WORKS["memplan.token_statistics.default"] = _statistics
WORKS["memplan.token_statistics_backward.default"] = _statistics_backward
