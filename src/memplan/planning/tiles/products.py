"""Products with a weight, whose gradient each piece adds in place to what the pieces before it have computed.

Without that, each piece would make a gradient of the weight's size: of a head over a vocabulary, the largest tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memplan.planning.graph.joint_graph import Ref
from memplan.planning.graph.op_schema import arguments_of
from memplan.planning.tiles.program import Node, Program


@dataclass(frozen=True)
class Factor:
    """The second factor of a product, which is a weight."""

    weight: int
    transposed: bool
    """Whether the factor is the weight's transpose."""


def summed_factor(node: Node, makers: Mapping[int, Node], program: Program) -> Factor | None:
    """Return the weight that a product multiplies by; None if the node is no product with a weight.

    Args:
        node: of a program.
        makers: nodes by their first result.
        program: a weight is a tensor that it reads from outside, the same for all pieces.
    """
    if node.target not in ("aten.mm.default", "aten.addmm.default"):
        return None
    arguments = arguments_of(node.target, node.args, node.kwargs)
    if any(arguments.get(name, 1) != 1 for name in ("alpha", "beta")):
        return None
    if node.target == "aten.addmm.default":
        columns = program.likes[node.outputs[0]].shape[-1]
        if program.likes[arguments["self"].value].shape != (columns,):  # it adds a matrix, not a bias
            return None
    factor = Factor(arguments["mat2"].value, transposed=False)
    maker = makers.get(factor.weight)
    if maker is not None and maker.target == "aten.t.default" and isinstance(maker.args[0], Ref):
        factor = Factor(maker.args[0].value, transposed=True)
    return factor if factor.weight in program.static else None


class Product(torch.autograd.Function):
    """``x @ factor``, plus a row, whose derivative adds the gradient of the factor's weight in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, row: Tensor | None, transposed: bool, into: Tensor) -> Tensor:
        """Return ``x @ factor`` plus ``row``.

        Args:
            ctx: autograd's context.
            x: a matrix.
            weight: the factor, or its transpose if ``transposed``.
            row: a row to add to each of the result's; None for zeros.
            transposed: see ``weight``.
            into: what the gradient of the weight is added to.
        """
        ctx.save_for_backward(x, weight)
        ctx.row, ctx.transposed, ctx.into = row is not None, transposed, into
        factor = weight.t() if transposed else weight
        return torch.mm(x, factor) if row is None else torch.addmm(row, x, factor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the gradients of ``x`` and the row; add that of the weight to ``into``."""
        (dy,), (x, weight) = gradients, ctx.saved_tensors
        if ctx.transposed:
            ctx.into.addmm_(dy.t(), x)
        else:
            ctx.into.addmm_(x.t(), dy)
        dx = dy.mm(weight if ctx.transposed else weight.t()) if ctx.needs_input_grad[0] else None
        return dx, None, dy.sum(0) if ctx.row and ctx.needs_input_grad[2] else None, None, None
