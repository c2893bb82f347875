"""Sums over the axis of a tile, such as that of a loss over tokens: of each piece its part, which add up.

A mean is a sum of which each part counts by its share of the elements. The mean of ``nll_loss`` is one over the weights
of its targets, which are added up in a pass of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from memplan.planning.graph.joint_graph import Ref
from memplan.planning.graph.op_schema import overload
from memplan.planning.tiles.program import NotTileable
from memplan.planning.tiles.rules import Along, Call, Part, Window, elements, filled

_NONE, _MEAN, _SUM = range(3)
"""Values of the argument ``reduction`` of losses."""


class Sum:
    """How an op that reduces its operand runs on a part of the axis."""

    operand = "self"
    """Name of the tensor of which each piece reads its own part."""

    def over(self, call: Call, along: Along) -> bool:
        """Return whether the op sums over the axis. ``along``: where the axis lies in the operand."""
        raise NotImplementedError

    def operand_parts(self, call: Call, window: Window) -> dict[int, Part]:
        """Return the parts of operands that a window of the axis needs, by value; operands without an entry as a whole.

        These are the operands that have the dimension of the axis, with shapes aligned at the last dimension.
        """
        along, shape = call.along(self.operand), call.shape(self.operand)
        assert along is not None
        parts = dict[int, Part]()
        for value in call.node.reads:
            dim = along.dim - len(shape) + len(call.shapes[value])
            if dim >= 0 and call.shapes[value][dim] == shape[along.dim] > 1:
                parts[value] = Part(dim, elements(along, window))
                if call.axes.get(value) not in (None, Along(dim, along.unit, along.repeats)):
                    raise NotTileable(f"{call.node.name} combines different axes")
            elif value in call.axes:
                raise NotTileable(f"{call.node.name} combines different axes")
        return parts

    def weighs(self, call: Call) -> bool:
        """Return whether the result is divided by a sum of weights over all pieces."""
        return False

    def weight(self, call: Call, tensors: Callable[[int], Tensor]) -> Tensor:
        """Return the sum of the weights of a part. ``tensors``: returns the part of an operand."""
        raise NotImplementedError

    def part(self, call: Call, tensors: Callable[[int], Tensor], weight: Tensor | None) -> Tensor:
        """Return what a piece adds to the result.

        Args:
            call: what to compute.
            tensors: returns the part of an operand.
            weight: sum of the weights of all pieces, if it `weighs`.
        """
        raise NotImplementedError

    def _share(self, call: Call, tensors: Callable[[int], Tensor]) -> float:
        """Return the share of the operand's elements that a part has."""
        operand = call[self.operand].value
        return tensors(operand).numel() / math.prod(call.shapes[operand])


class _Reduction(Sum):
    """``sum`` and ``mean``, of all elements or along dimensions."""

    def over(self, call: Call, along: Along) -> bool:
        """Return whether the axis is among the dimensions that are reduced; without dimensions, all are."""
        dims, rank = call["dim"], len(call.shape("self"))
        return not dims or along.dim in [dim % rank for dim in dims]

    def part(self, call: Call, tensors: Callable[[int], Tensor], weight: Tensor | None) -> Tensor:
        """Return the sum of a part, or its mean times its share of the elements."""
        result = overload(call.node.target)(*filled(call.node.args, tensors), **filled(dict(call.node.kwargs), tensors))
        return result * self._share(call, tensors) if "mean" in call.node.name else result


class _Loss(Sum):
    """A loss of elements that is reduced."""

    def over(self, call: Call, along: Along) -> bool:
        """Return whether the loss is reduced, then over all elements."""
        return call["reduction"] != _NONE

    def part(self, call: Call, tensors: Callable[[int], Tensor], weight: Tensor | None) -> Tensor:
        """Return the loss of a part; of a mean, times the part's share of the elements."""
        result = overload(call.node.target)(**filled(dict(call.arguments), tensors))
        return result if call["reduction"] == _SUM else result * self._share(call, tensors)


class _Likelihood(Sum):
    """``nll_loss`` of classes in dimension 1, also of images."""

    def over(self, call: Call, along: Along) -> bool:
        """Return whether the loss is reduced, and the axis is not that of the classes."""
        return along.dim != 1 and len(call.shape("self")) > 1 and call["reduction"] != _NONE

    def operand_parts(self, call: Call, window: Window) -> dict[int, Part]:
        """Return the same window of log-probabilities and targets; weights of classes as a whole."""
        along = call.along("self")
        assert along is not None
        target = Along(along.dim - (along.dim > 1), along.unit, along.repeats)  # it has no dimension of classes
        if call.along("target") not in (None, target) or call.along("weight") is not None:
            raise NotTileable(f"{call.node.name} combines different axes")
        part = elements(along, window)
        return {call["self"].value: Part(along.dim, part), call["target"].value: Part(target.dim, part)}

    def weighs(self, call: Call) -> bool:
        """Return whether the loss is a mean: it is divided by the weights of all targets."""
        return call["reduction"] == _MEAN

    def weight(self, call: Call, tensors: Callable[[int], Tensor]) -> Tensor:
        """Return the sum of the weights of a part's targets, or their number; those to ignore do not count."""
        target, weights = tensors(call["target"].value), call["weight"]
        counted = target != call["ignore_index"]
        if weights is None:
            return counted.sum(dtype=torch.float64)
        return tensors(weights.value)[target[counted]].sum(dtype=torch.float64)

    def part(self, call: Call, tensors: Callable[[int], Tensor], weight: Tensor | None) -> Tensor:
        """Return the summed loss of a part, divided by the weights of all pieces."""
        arguments = filled({**call.arguments, "reduction": _SUM}, tensors)
        result, _ = overload(call.node.target)(**arguments)
        # not in the result's dtype: bfloat16 rounds counts of tokens, and float16 overflows at 65,520
        return result if weight is None else (result / weight).to(result.dtype)


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
    along = None if rule is None else call.along(rule.operand)
    return rule if rule is not None and along is not None and rule.over(call, along) else None


_KEEPING = """
    alias clone _to_copy detach view reshape _unsafe_view squeeze unsqueeze expand permute transpose t select slice neg
    sum mean
""".split()  # noqa: SIM905


def keeps_sum(
    node_name: str, arguments: Mapping[str, Any], is_partial: Callable[[Any], bool], is_along: Callable[[Any], bool]
) -> bool:
    """Return whether an op on parts of sums gives parts of its result: it is linear in them.

    Args:
        node_name: name of the op, such as ``add``.
        arguments: its arguments by name.
        is_partial: whether an argument is a part of a sum, different in each piece.
        is_along: whether an argument lies along the axis.
    """
    if any(is_along(argument) for argument in arguments.values()):
        return False
    first, second = arguments.get("self"), arguments.get("other")
    if node_name in _KEEPING:
        return is_partial(first)
    if node_name in ("add", "sub"):
        return is_partial(first) and is_partial(second) and not isinstance(arguments.get("alpha"), Ref)
    if node_name == "mul":
        return is_partial(first) != is_partial(second)
    if node_name == "div":
        return is_partial(first) and not is_partial(second) and arguments.get("rounding_mode") is None
    return False
