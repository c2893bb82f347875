"""Between which numbers the results of an op lie, given its operands' ranges: one rule for each op."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from memplan.trace.recording.values.intervals import Number, Range, at_corners, computed, divided, modulo, union

Ranges = Range | list[Range | None] | None
"""Of an op's result, or of each of its results."""


@dataclass(frozen=True, slots=True)
class Call:
    """An op with its arguments, and what is known of the ranges of tensors."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any
    range_of: Callable[[torch.Tensor], Range | None]

    def of(self, position: int) -> Range | None:
        """Return the range of an argument, a tensor or a number."""
        return self.range(self.args[position]) if position < len(self.args) else None

    def range(self, value: Any) -> Range | None:
        """Return the range of a tensor, a number or a list of tensors."""
        if isinstance(value, torch.Tensor):
            return self.range_of(value)
        if isinstance(value, (list, tuple)):
            return union([self.range(one) for one in value])
        return (value, value) if isinstance(value, (int, float)) and math.isfinite(value) else None

    def size(self, position: int = 0, dim_at: int = 1, default: int | None = None) -> int:
        """Return how many elements an argument has along the op's dimension; in all, where that is None."""
        x, dim = self.args[position], self.args[dim_at] if dim_at < len(self.args) else default
        if isinstance(dim, int) and not isinstance(dim, bool) and x.dim():
            return x.shape[dim]
        return x.numel()


Rule = Callable[[Call], Ranges]


def _same(*positions: int) -> Rule:
    return lambda call: union([call.of(at) for at in positions])


def _by(name: str, count: int = 2) -> Rule:
    """Return the rule of an operator of numbers, or of a function of one."""
    return lambda call: computed(name, *(call.of(at) for at in range(count)))


def _alpha(call: Call) -> Number:
    """Return the factor of the second operand: in the forms that take a number, it has a position."""
    return call.args[2] if len(call.args) > 2 else call.kwargs.get("alpha", 1)


def _sum_of_two(sign: int) -> Rule:
    def rule(call: Call) -> Range | None:
        by = sign * _alpha(call)
        return at_corners(lambda a, b: a + by * b, call.of(0), call.of(1))

    return rule


def _divided(call: Call) -> Range | None:
    mode = call.kwargs.get("rounding_mode")
    ways = {"floor": operator.floordiv, "trunc": lambda a, b: math.trunc(a / b), None: operator.truediv}
    return divided(ways[mode], call.of(0), call.of(1))


def _remainder(call: Call) -> Range | None:
    return modulo(call.of(0), call.of(1), whole=not call.result.is_floating_point())


def _clamped(call: Call) -> Range | None:
    low, high = call.of(0) or (-math.inf, math.inf)
    given = call.args[1:3]
    if len(given) > 0 and given[0] is not None:
        least = call.range(given[0]) or (-math.inf, math.inf)
        low, high = max(low, least[0]), max(high, least[1])
    if len(given) > 1 and given[1] is not None:
        most = call.range(given[1]) or (-math.inf, math.inf)
        low, high = min(low, most[0]), min(high, most[1])
    return low, high


def _times(given: Range | None, count: int) -> Range | None:
    return None if given is None else (min(given[0], given[0] * count), max(given[1], given[1] * count))


def _summed(call: Call) -> Range | None:
    """A sum over as many elements as each of the results stands for."""
    given, count = call.of(0), call.args[0].numel() // max(call.result.numel(), 1)
    return None if given is None else (given[0] * count, given[1] * count)


def _added_at_places(call: Call) -> Range | None:
    """scatter_add, index_add: at worst all is added to one element."""
    source = _times(call.of(3), call.args[3].numel() if isinstance(call.args[3], torch.Tensor) else 1)
    given, by = call.of(0), call.kwargs.get("alpha", 1)
    if source is None or given is None:
        return None
    added = [by * one for one in source]
    return given[0] + min(0, *added), given[1] + max(0, *added)


def _put(call: Call) -> Range | None:
    accumulates = len(call.args) > 3 and call.args[3]
    return None if accumulates else union([call.of(0), call.of(2)])


def _nothing(call: Call) -> None:
    return None


def _index(dim_at: int, default: int | None = None) -> Rule:
    return lambda call: (0, max(call.size(0, dim_at, default) - 1, 0))


def _index_beside(dim_at: int) -> Rule:
    """A result of the operand's own values, then of indices along a dimension, by default the last."""
    return lambda call: [call.of(0), (0, max(call.size(0, dim_at, -1) - 1, 0))]


def _draws(call: Call) -> Range | None:
    numbers = [one for one in call.args if isinstance(one, int)]
    low = numbers[0] if len(numbers) > 1 else 0
    return (low, max(low, numbers[-1] - 1)) if numbers else None


def _counts_up(call: Call) -> Range | None:
    numbers = [one for one in call.args if isinstance(one, (int, float))]
    if not numbers:
        return None
    first, end = (0, numbers[0]) if len(numbers) == 1 else numbers[:2]
    return min(first, end), max(first, end)


def _uniform(call: Call) -> Range:
    """Arguments at their defaults, 0 and 1, are left out from the end. The end is never drawn: the largest number is
    half an eps of the result's dtype below 1, so that `int(torch.rand(()) * n)` is at most n - 1."""
    low = call.args[1] if len(call.args) > 1 else 0.0
    high = call.args[2] if len(call.args) > 2 else 1.0
    return low, low + (high - low) * (1 - torch.finfo(call.result.dtype).eps / 2)


def _bin_counts(call: Call) -> Range | None:
    """Count the elements of each number; where weights are given, these are summed."""
    args: Sequence[Any] = call.args
    return None if any(isinstance(one, torch.Tensor) for one in args[1:]) else (0, args[0].numel())


def _distinct(call: Call) -> Ranges:
    count = call.args[0].numel()
    return [call.of(0), (0, max(count - 1, 0)), (1, max(count, 1))]


def _known(value: Number) -> Rule:
    return lambda call: (value, value)


def _fraction(call: Call) -> Range:
    return 0.0, 1.0


_KEEP = (
    "clone", "_to_copy", "contiguous", "cat", "stack", "index", "index_select", "gather", "repeat", "flip", "roll",
    "masked_select", "take", "max", "min", "amax", "amin", "_unsafe_index", "take_along_dim", "lift_fresh",
    "lift_fresh_copy", "median",
)  # fmt: skip
RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_KEEP, _same(0)),
    **dict.fromkeys(("copy_", "fill_"), _same(1)),
    **dict.fromkeys(("full_like", "new_full", "full"), lambda call: call.of(2 if "new" in call.name else 1)),
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros", "zero_"), _known(0)),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), _known(1)),
    "scalar_tensor": _same(0),
    "where": _same(1, 2),
    "constant_pad_nd": lambda call: union([call.of(0), call.of(2) if len(call.args) > 2 else (0, 0)]),
    **dict.fromkeys(("tril", "triu"), lambda call: union([call.of(0), (0, 0)])),
    **dict.fromkeys(("masked_fill", "masked_fill_", "masked_scatter"), _same(0, 2)),
    **dict.fromkeys(("index_put", "index_put_"), _put),
    **dict.fromkeys(("scatter", "scatter_", "index_copy", "index_fill", "index_copy_", "index_fill_"), _same(0, 3)),
    **dict.fromkeys(("scatter_add", "scatter_add_", "index_add", "index_add_"), _added_at_places),
    **dict.fromkeys(("add", "add_"), _sum_of_two(1)),
    **dict.fromkeys(("sub", "sub_"), _sum_of_two(-1)),
    "rsub": lambda call: at_corners(lambda a, b: b - _alpha(call) * a, call.of(0), call.of(1)),
    **dict.fromkeys(("mul", "mul_"), _by("mul")),
    **dict.fromkeys(("div", "div_"), _divided),
    **dict.fromkeys(("floor_divide", "floor_divide_"), _by("floordiv")),
    **dict.fromkeys(("remainder", "remainder_"), _remainder),
    **dict.fromkeys(("clamp", "clamp_"), _clamped),
    **dict.fromkeys(("clamp_min", "clamp_min_", "maximum"), _by("max")),
    **dict.fromkeys(("clamp_max", "clamp_max_", "minimum"), _by("min")),
    **dict.fromkeys(("floor", "floor_"), _by("floor", 1)),
    **dict.fromkeys(("ceil", "ceil_"), _by("ceil", 1)),
    **dict.fromkeys(("round", "round_"), _by("round", 1)),
    "trunc": _by("trunc", 1),
    "abs": _by("abs", 1),
    "neg": _by("neg", 1),
    "sum": _summed,
    "mean": _same(0),
    "cumsum": lambda call: _times(call.of(0), call.size()),
    "count_nonzero": lambda call: (0, call.args[0].numel() // max(call.result.numel(), 1)),
    **dict.fromkeys(("argmax", "argmin"), _index(1)),
    "argsort": _index(1, -1),
    **dict.fromkeys(("sort", "cummax", "cummin"), _index_beside(1)),
    **dict.fromkeys(("topk", "kthvalue"), _index_beside(2)),
    "nonzero": lambda call: (0, max([*call.args[0].shape, 1]) - 1),
    "randperm": lambda call: (0, max(call.args[0] - 1, 0)),
    "randint": _draws,
    "arange": _counts_up,
    "multinomial": lambda call: (0, call.size(0, 9, -1) - 1),
    "searchsorted": lambda call: (0, call.args[0].shape[-1]),
    "bucketize": lambda call: (0, call.args[1].shape[-1]),
    "bincount": _bin_counts,
    **dict.fromkeys(("_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"), _distinct),
    "repeat_interleave": _same(0),
    **dict.fromkeys(("sigmoid", "_softmax", "bernoulli", "bernoulli_"), _fraction),
    **dict.fromkeys(("rand", "rand_like"), lambda call: _uniform(replace(call, args=()))),
    "uniform_": _uniform,
    "random_": _draws,
}  # fmt: skip
"""By the op's name without its overload; an op that is not here may give anything."""
RULES_OF_OVERLOADS: Mapping[str, Rule] = {
    **{f"aten.{name}.dim": _index_beside(1) for name in ("max", "min", "median")},
    "aten.sort.stable": lambda call: [call.of(0), (0, max(call.size(0, 2, call.kwargs.get("dim", -1)) - 1, 0))],
    "aten.argsort.stable": lambda call: (0, max(call.size(0, 2, call.kwargs.get("dim", -1)) - 1, 0)),
    "aten.repeat_interleave.Tensor": lambda call: (0, max(call.args[0].numel() - 1, 0)),
    **dict.fromkeys(("aten.max.other", "aten.max.out"), _by("max")),
    **dict.fromkeys(("aten.min.other", "aten.min.out"), _by("min")),
    **dict.fromkeys([f"aten.{name}.decimals" for name in ("round", "round_")], _nothing),
    **dict.fromkeys(
        [f"aten.scatter{end}.{form}" for end in ("", "_") for form in ("reduce", "value_reduce")], _nothing
    ),
    "aten.random_.from": lambda call: (call.args[1], call.args[2] - 1),
}
