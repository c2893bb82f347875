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
    """The second factor of a product, which is a weight or its transpose."""

    weight: int
    """Id of the weight's value."""
    transposed: bool
    """Whether the factor is the weight's transpose."""


def weight_factor(node: Node, maker_of: Mapping[int, Node], program: Program) -> Factor | None:
    """Return the weight that a product multiplies by; None if the node is no product with a weight.

    Args:
        node: of ``program``.
        maker_of: by value that is the first result of a node: the node.
        program: its static inputs count as weights.
    """
    if node.target not in ("aten.mm.default", "aten.addmm.default"):
        return None
    arguments = arguments_of(node.target, node.args, node.kwargs)
    if any(arguments.get(name, 1) != 1 for name in ("alpha", "beta")):  # `Product` does not scale
        return None
    if node.target == "aten.addmm.default":
        columns = program.likes[node.outputs[0]].shape[-1]
        adds_row = program.likes[arguments["self"].value].shape == (columns,)
        if not adds_row:  # but a matrix
            return None
    factor = Factor(arguments["mat2"].value, transposed=False)
    maker = maker_of.get(factor.weight)
    if maker is not None and maker.target == "aten.t.default" and isinstance(maker.args[0], Ref):
        factor = Factor(maker.args[0].value, transposed=True)
    return factor if factor.weight in program.static_inputs else None


class Product(torch.autograd.Function):
    """``x @ factor + added_row``, whose derivative adds the gradient of the factor's weight in place."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, added_row: Tensor | None, transposed: bool, weight_gradient: Tensor
    ) -> Tensor:  # fmt: skip
        """Return ``x @ factor + added_row``.

        Args:
            ctx: autograd's context.
            x: a matrix.
            weight: the factor, or its transpose if ``transposed``.
            added_row: is added to each row of the result; None for zeros.
            transposed: see ``weight``.
            weight_gradient: the gradient of the weight is added to it.
        """
        ctx.save_for_backward(x, weight)
        ctx.has_added_row, ctx.transposed, ctx.weight_gradient = added_row is not None, transposed, weight_gradient
        factor = weight.t() if transposed else weight
        return torch.mm(x, factor) if added_row is None else torch.addmm(added_row, x, factor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the gradients of ``x`` and ``added_row``, and add that of the weight to ``weight_gradient``."""
        (dy,), (x, weight) = gradients, ctx.saved_tensors
        if ctx.transposed:
            ctx.weight_gradient.addmm_(dy.t(), x)
        else:
            ctx.weight_gradient.addmm_(x.t(), dy)
        dx = dy.mm(weight if ctx.transposed else weight.t()) if ctx.needs_input_grad[0] else None
        d_row = dy.sum(0) if ctx.has_added_row and ctx.needs_input_grad[2] else None
        return dx, None, d_row, None, None
