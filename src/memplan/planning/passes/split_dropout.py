"""Split dropout into two ops: the mask, which is drawn once and saved, and the product, which can be recomputed.

torch's kernel draws the mask and multiplies in a single op, so that its result could not be recomputed. The two ops
draw the same random numbers at the same position, and the result is the same bit for bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from memplan.planning.graph.editor import Rebuild
from memplan.planning.graph.joint_graph import GraphOp, JointGraph, Ref, Value
from memplan.planning.graph.op_schema import DROPOUT_MASK, NUMBER_TENSOR_BYTES
from memplan.trace.records import HOST

DROPOUT = "aten.native_dropout.default"
DRAW_MASK = DROPOUT_MASK
MASK_AND_SCALE = "memplan.dropout.default"
"""Op that applies mask and scale at once: in half precision torch's products with a scalar round differently."""
_FULL_PRECISION = ("float32", "float64")


def split_dropouts(graph: JointGraph) -> JointGraph:
    """Split training dropout into mask and multiply."""
    rebuild = Rebuild(graph)
    for op in graph.ops:
        is_dropout = op.target == DROPOUT and op.phase == "forward"
        if is_dropout and op.args[2] is not False and op.outputs[1] is not None:  # in training, and its mask is read
            _split_op(rebuild, op)
        else:
            rebuild.add(op)
    return rebuild.finished()


def dropout_scale(p: float, value: Value) -> float:
    """Return the factor 1 / (1 - p) of native_dropout for a tensor like ``value``; 0 for p = 1. On a card it is
    computed in float32 (Dropout.cu: 1 - p is rounded first, and then its inverse)."""
    if p == 1:
        return 0.0
    if value.place == HOST or value.dtype == "float64":
        return 1 / (1 - p)
    return float(np.float32(1) / np.float32(1 - p))


def _split_op(rebuild: Rebuild, op: GraphOp) -> None:
    """Add the ops that draw the mask of a dropout, multiply by it and scale, as torch's kernel rounds. Where nothing
    reads the product, the mask is drawn alone."""

    def add(target: str, args: tuple[Any, ...], result: int, scratch: int, *, random: bool = False) -> None:
        """Add an op with a single result in place of the dropout."""
        rebuild.add(
            op, target=target, args=args, kwargs={}, outputs=(result,), returns_tuple=False, makes=(result,),
            discarded=0, scratch=scratch, random=random,
        )  # fmt: skip

    x, p = op.args[0], op.args[1]
    result, mask = op.outputs
    assert isinstance(x, Ref)
    assert mask is not None
    like_result = rebuild.values[x.value if result is None else result]
    is_on_host, size = like_result.place == HOST, like_result.bytes
    # on a card native_dropout runs and its product is freed
    add(DRAW_MASK, (x, p), mask, scratch=0 if is_on_host else size, random=True)
    if result is None:
        return
    scale = dropout_scale(p, like_result)
    if like_result.dtype not in _FULL_PRECISION:
        # a CPU's kernel reads the mask in the result's dtype, a card's as it is
        add(MASK_AND_SCALE, (x, Ref(mask), scale), result, scratch=size if is_on_host else 0)
        return
    masked = rebuild.value(f"{like_result.name}_masked", like_result)
    add("aten.mul.Tensor", (x, Ref(mask)), masked, scratch=size)  # a CPU casts the mask to the result's dtype first
    add("aten.mul.Tensor", (Ref(masked), scale), result, scratch=NUMBER_TENSOR_BYTES)
