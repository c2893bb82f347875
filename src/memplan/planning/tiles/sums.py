"""Sums over the axis of a tile, such as that of a loss over tokens: each piece computes a part, and the parts add up.

Of a mean, the part of a piece is its own mean times its share of the elements. The mean of ``nll_loss`` is its sum,
divided by the sum of its targets' weights, which is added up in a pass of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from memplan.planning.graph.joint_graph import Ref
from memplan.planning.graph.op_schema import overload
from memplan.planning.tiles.program import NotTileable
from memplan.planning.tiles.rules import AxisPlacement, Call, Part, Window, element_range, filled, run_whole

_NONE, _MEAN, _SUM = range(3)
"""Values of the argument ``reduction`` of losses."""


class Sum:
    """How an op that reduces its operand runs on a part of the axis."""

    summed_operand = "self"
    """Name of the argument that is summed. Of its axis, each piece reads the window that no other piece reads."""

    def sums_over_axis(self, call: Call, placement: AxisPlacement) -> bool:
        """Return whether the op sums over the axis. ``placement``: where the axis lies in the operand."""
        raise NotImplementedError

    def operand_parts(self, call: Call, window: Window) -> dict[int, Part]:
        """Return the parts of operands that a window of the axis needs, by value; operands without an entry as a whole.

        These are the operands that have the dimension of the axis, with shapes aligned at the last dimension.
        """
        placement, shape = call.placement(self.summed_operand), call.shape(self.summed_operand)
        assert placement is not None
        parts = dict[int, Part]()
        for value in call.node.reads:
            dim = placement.dim - len(shape) + len(call.shapes[value])  # negative: it is broadcast
            if dim >= 0 and call.shapes[value][dim] == shape[placement.dim] > 1:
                parts[value] = Part(dim, element_range(placement, window))
                if call.placements.get(value) not in (None, replace(placement, dim=dim)):
                    raise NotTileable(f"{call.node.name} combines different axes")
            elif value in call.placements:
                raise NotTileable(f"{call.node.name} combines different axes")
        return parts

    def divides_by_weights(self, call: Call) -> bool:
        """Return whether the result is divided by a sum of weights over all pieces."""
        return False

    def piece_weights(self, call: Call, tensor_of: Callable[[int], Tensor]) -> Tensor:
        """Return the sum of the weights of a piece. ``tensor_of``: returns its part of an operand, by value."""
        raise NotImplementedError

    def piece_sum(self, call: Call, tensor_of: Callable[[int], Tensor], all_weights: Tensor | None) -> Tensor:
        """Return what a piece adds to the result.

        Args:
            call: the op on whole tensors.
            tensor_of: returns the piece's part of an operand, by value.
            all_weights: sum of the weights of all pieces; None if the op does not divide by it, or not yet.
        """
        raise NotImplementedError

    def _share_of_elements(self, call: Call, tensor_of: Callable[[int], Tensor]) -> float:
        """Return the share of the operand's elements that a piece has."""
        value = call[self.summed_operand].value
        return tensor_of(value).numel() / math.prod(call.shapes[value])


class _Reduction(Sum):
    """``sum`` and ``mean``, of all elements or along dimensions."""

    def sums_over_axis(self, call: Call, placement: AxisPlacement) -> bool:
        """Return whether the axis is among the dimensions that are reduced; without dimensions, all are."""
        dims, rank = call["dim"], len(call.shape("self"))
        return not dims or placement.dim in [dim % rank for dim in dims]

    def piece_sum(self, call: Call, tensor_of: Callable[[int], Tensor], all_weights: Tensor | None) -> Tensor:
        """Return the sum of a piece, or its mean times its share of the elements."""
        result = run_whole(call.node, tensor_of)
        return result * self._share_of_elements(call, tensor_of) if "mean" in call.node.name else result


class _Loss(Sum):
    """A loss of elements that is reduced."""

    def sums_over_axis(self, call: Call, placement: AxisPlacement) -> bool:
        """Return whether the loss is reduced, then over all elements."""
        return call["reduction"] != _NONE

    def piece_sum(self, call: Call, tensor_of: Callable[[int], Tensor], all_weights: Tensor | None) -> Tensor:
        """Return the loss of a piece; of a mean, times the piece's share of the elements."""
        result = overload(call.node.target)(**filled(dict(call.arguments), tensor_of))
        return result if call["reduction"] == _SUM else result * self._share_of_elements(call, tensor_of)


class _Likelihood(Sum):
    """``nll_loss`` of classes in dimension 1, also of images."""

    def sums_over_axis(self, call: Call, placement: AxisPlacement) -> bool:
        """Return whether the loss is reduced, and the axis is not that of the classes."""
        return placement.dim != 1 and len(call.shape("self")) > 1 and call["reduction"] != _NONE

    def operand_parts(self, call: Call, window: Window) -> dict[int, Part]:
        """Return the same window of log-probabilities and targets; weights of classes as a whole."""
        placement = call.placement("self")
        assert placement is not None
        target = replace(placement, dim=placement.dim - (placement.dim > 1))  # it has no dimension of classes
        if call.placement("target") not in (None, target) or call.placement("weight") is not None:
            raise NotTileable(f"{call.node.name} combines different axes")
        part = element_range(placement, window)
        return {call["self"].value: Part(placement.dim, part), call["target"].value: Part(target.dim, part)}

    def divides_by_weights(self, call: Call) -> bool:
        """Return whether the loss is a mean: it is divided by the weights of all targets."""
        return call["reduction"] == _MEAN

    def piece_weights(self, call: Call, tensor_of: Callable[[int], Tensor]) -> Tensor:
        """Return the sum of the weights of a piece's targets, or their number; those to ignore do not count."""
        target, class_weights = tensor_of(call["target"].value), call["weight"]
        is_counted = target != call["ignore_index"]
        if class_weights is None:
            return is_counted.sum(dtype=torch.float64)
        return tensor_of(class_weights.value)[target[is_counted]].sum(dtype=torch.float64)

    def piece_sum(self, call: Call, tensor_of: Callable[[int], Tensor], all_weights: Tensor | None) -> Tensor:
        """Return the summed loss of a piece, divided by the weights of all pieces."""
        arguments = filled({**call.arguments, "reduction": _SUM}, tensor_of)
        loss, _ = overload(call.node.target)(**arguments)
        # divided in the weights' float64: bfloat16 rounds counts of tokens, and float16 overflows at 65,520
        return loss if all_weights is None else (loss / all_weights).to(loss.dtype)


SUMS: Mapping[str, Sum] = {
    **{f"aten.{name}": _Reduction() for name in ("sum.default", "sum.dim_IntList", "mean.default", "mean.dim")},
    **{f"aten.{name}.default": _Loss() for name in (
        "mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
    )},
    "aten.nll_loss_forward.default": _Likelihood(),
    "aten.nll_loss2d_forward.default": _Likelihood(),
}  # fmt: skip
"""Sums by the target of an op."""


def sum_of(call: Call) -> Sum | None:
    """Return the rule of an op that sums over the axis; None if it does not."""
    rule = SUMS.get(call.node.target)
    placement = None if rule is None else call.placement(rule.summed_operand)
    return rule if rule is not None and placement is not None and rule.sums_over_axis(call, placement) else None


_LINEAR = """
    alias clone _to_copy detach view reshape _unsafe_view squeeze unsqueeze expand permute transpose t select slice neg
    sum mean
""".split()  # noqa: SIM905
"""Ops that are linear in their operand ``self``."""


def keeps_sum(
    node_name: str, arguments: Mapping[str, Any], is_partial: Callable[[Any], bool], is_on_axis: Callable[[Any], bool]
) -> bool:
    """Return whether an op on parts of sums returns a part of its result: it is linear in them.

    Args:
        node_name: name of the op, such as ``add``.
        arguments: its arguments by name.
        is_partial: whether an argument is a part of a sum, another one in each piece.
        is_on_axis: whether an argument lies along the axis.
    """
    if any(is_on_axis(argument) for argument in arguments.values()):
        return False
    first, second = arguments.get("self"), arguments.get("other")
    if node_name in _LINEAR:
        return is_partial(first)
    if node_name in ("add", "sub"):
        return is_partial(first) and is_partial(second) and not isinstance(arguments.get("alpha"), Ref)
    if node_name == "mul":
        return is_partial(first) != is_partial(second)
    if node_name == "div":
        return is_partial(first) and not is_partial(second) and arguments.get("rounding_mode") is None
    return False
