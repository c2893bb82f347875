"""Ranges of the values of tensors, where they follow from the ops of a recording.

`torch.randint(1, 91, ...)` is at most 90, a mask of 400 elements sums to 400 at most, an index lies within its
dimension. A loop that generates tokens ends when its mask of finished sequences becomes all true.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memplan import _torch
from memplan.trace.recording.ledger import Ledger

Number = int | float
Range = tuple[Number, Number]
"""Smallest and largest possible value, both included."""
_MAX_READ = 1 << 16
"""Most elements of a tensor with known values that are searched for their smallest and largest."""


@dataclass(frozen=True, slots=True)
class Call:
    """An op with its arguments and result."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any
    range_of: Callable[[torch.Tensor], Range | None]

    def range(self, position: int) -> Range | None:
        """Return the range of the argument at a position; None if unknown."""
        return self._range_of(self.args[position])

    def _range_of(self, value: Any) -> Range | None:
        """Return the range of an argument: a tensor, a list of tensors or a number; None if unknown."""
        if isinstance(value, torch.Tensor):
            return self.range_of(value)
        if isinstance(value, (list, tuple)):
            return union([self._range_of(item) for item in value])
        return (value, value) if isinstance(value, (int, float)) else None

    def last_index(self, dim_at: int, default: int | None = None) -> Range:
        """Return the range of the indices along the dimension that the argument ``dim_at`` (or ``dim=``) names; for
        None, of the indices over all elements."""
        x, dim = self.args[0], self.args[dim_at] if dim_at < len(self.args) else self.kwargs.get("dim", default)
        size = x.numel() if dim is None or not x.dim() else x.shape[dim]
        return 0, max(size - 1, 0)


Rule = Callable[[Call], Range | list[Range | None] | None]
"""Returns the range of an op's result, or of each of its results."""


def union(ranges: Sequence[Range | None]) -> Range | None:
    """Return the smallest range that contains all ranges; None if any is unknown, or there are none."""
    known = [values for values in ranges if values is not None]
    if not known or len(known) < len(ranges):
        return None
    return min(low for low, _ in known), max(high for _, high in known)


def corners(combine: Callable[[Number, Number], Number], left: Range | None, right: Range | None) -> Range | None:
    """Return the range of a function that is monotone in each of its two arguments, from their ranges."""
    if left is None or right is None:
        return None
    ends = [combine(end, other_end) for end, other_end in itertools.product(left, right)]
    return min(ends), max(ends)


def _same(*positions: int) -> Rule:
    """Return the rule of an op whose results are elements of the arguments at these positions."""
    return lambda call: union([call.range(at) for at in positions])


def _constant(value: Number) -> Rule:
    """Return the rule of an op whose results have a single value."""
    return lambda call: (value, value)


def _binary(combine: Callable[[Number, Number], Number]) -> Rule:
    """Return the rule of an elementwise op of two operands, which is monotone in each; ``alpha`` scales the second."""

    def rule(call: Call) -> Range | None:
        return corners(lambda a, b: combine(a, _alpha(call) * b), call.range(0), call.range(1))

    return rule


def _alpha(call: Call) -> Number:
    return call.args[2] if len(call.args) > 2 else call.kwargs.get("alpha", 1)


def _divided(call: Call) -> Range | None:
    """Return the range of a quotient; None if the divisor may be 0."""
    divisor = call.range(1)
    if divisor is None or divisor[0] <= 0 <= divisor[1]:
        return None
    values = corners(operator.truediv, call.range(0), divisor)
    return values if values is None or "rounding_mode" not in call.kwargs else _rounded(values)


def _rounded(values: Range) -> Range:
    """Return a range with its ends rounded outwards to integers."""
    return math.floor(values[0]), math.ceil(values[1])


def _rounding_rule(rule: Rule) -> Rule:
    """Return ``rule`` for an op that also rounds: the ends of its range are rounded outwards to integers."""

    def rounded(call: Call) -> Range | None:
        values: Any = rule(call)
        return None if values is None else _rounded(values)

    return rounded


def _remainder(call: Call) -> Range | None:
    """Return the range of a remainder: less than the divisor; None if the divisor may be 0 or negative."""
    divisor = call.range(1)
    if divisor is None or divisor[0] <= 0:
        return None
    return 0, divisor[1] if call.result.is_floating_point() else divisor[1] - 1


def _clamped(low_at: int, high_at: int) -> Rule:
    """Return the rule of a clamp whose optional lower and upper bounds are at these argument positions."""

    def rule(call: Call) -> Range:
        low, high = call.range(0) or (-math.inf, math.inf)
        for limit, at in ((max, low_at), (min, high_at)):
            if at < len(call.args) and call.args[at] is not None:
                bound = call.range(at) or (-math.inf, math.inf)
                low, high = limit(low, bound[0]), limit(high, bound[1])
        return low, high

    return rule


def _summed(call: Call) -> Range | None:
    """Return the range of a sum, for each element of the result over an equal number of input elements."""
    count = call.args[0].numel() // max(call.result.numel(), 1)
    return corners(operator.mul, call.range(0), (count, count))


def _partly_summed(call: Call) -> Range | None:
    """Return the range of a cumulative sum, of one element up to all."""
    return corners(operator.mul, call.range(0), (1, call.args[0].numel()))


def _added_at(call: Call) -> Range | None:
    """Return the range of `scatter_add` and `index_add`, which may add all elements to the same element."""
    count, factor = call.args[3].numel(), call.kwargs.get("alpha", 1)
    added = corners(operator.mul, call.range(3), (0, count * factor))
    return corners(operator.add, call.range(0), added)


def _put(call: Call) -> Range | None:
    """Return the range of `index_put`, unless it accumulates: of elements of the input or of the values."""
    accumulates = len(call.args) > 3 and call.args[3]
    return None if accumulates else union([call.range(0), call.range(2)])


def _drawn(call: Call) -> Range | None:
    """Return the range of `randint`: from its lower bound, by default 0, to below its upper bound."""
    numbers = [arg for arg in call.args if isinstance(arg, int)]
    low = numbers[0] if len(numbers) > 1 else 0
    return (low, max(low, numbers[-1] - 1)) if numbers else None


def _counting(call: Call) -> Range:
    """Return the range of `arange`, including its end."""
    start, end = (0, call.args[0]) if len(call.args) == 1 else call.args[:2]
    return min(start, end), max(start, end)


def _uniform(call: Call) -> Range:
    """Return the range of `uniform_`, whose upper end is never drawn: the largest number is half an eps below it."""
    low = call.args[1] if len(call.args) > 1 else 0.0
    high = call.args[2] if len(call.args) > 2 else 1.0
    return low, low + (high - low) * (1 - torch.finfo(call.result.dtype).eps / 2)


def _unit(call: Call) -> Range:
    """Return the range of `rand`: that of `uniform_` from 0 to 1."""
    return _uniform(Call((), {}, call.result, call.range_of))


def _bin_counts(call: Call) -> Range | None:
    """Return the range of `bincount`; None if it sums weights."""
    weighted = any(isinstance(arg, torch.Tensor) for arg in call.args[1:])
    return None if weighted else (0, call.args[0].numel())


def _distinct(call: Call) -> list[Range | None]:
    """Return the ranges of the results of `unique`: elements, inverse indices, counts."""
    count = call.args[0].numel()
    return [call.range(0), (0, max(count - 1, 0)), (1, max(count, 1))]


def _ordered(holds: Callable[[Number, Number], bool]) -> Rule:
    """Return the rule of an order comparison (``<``), certain for all values if it is for the ends of the ranges."""
    return lambda call: corners(holds, call.range(0), call.range(1))


def _equality(*, when_equal: bool) -> Rule:
    """Return the rule of ``==`` or ``!=``: certain for disjoint ranges, and for equal single values."""

    def rule(call: Call) -> Range | None:
        first, second = call.range(0), call.range(1)
        if first is None or second is None:
            return None
        if first[1] < second[0] or second[1] < first[0]:
            return not when_equal, not when_equal
        is_single = first == second and first[0] == first[1]
        return (when_equal, when_equal) if is_single else (0, 1)

    return rule


def _both(call: Call) -> Range | None:
    """Return the range of a bitwise "and", for non-negative numbers at most the smaller operand; else None."""
    first, second = call.range(0), call.range(1)
    if first is None or second is None or min(*first, *second) < 0:
        return None
    are_truths = max(*first, *second) <= 1  # then it is the smaller operand; of other numbers, it may be 0
    return min(first[0], second[0]) if are_truths else 0, min(first[1], second[1])


def _either(call: Call) -> Range | None:
    """Return the range of a bitwise "or" of booleans; None for other dtypes."""
    return corners(max, call.range(0), call.range(1)) if call.result.dtype is torch.bool else None


def _negated(call: Call) -> Range | None:
    """Return the range of a bitwise "not" of booleans; None for other dtypes."""
    return corners(operator.sub, (1, 1), call.range(0)) if call.args[0].dtype is torch.bool else None


def _unknown(call: Call) -> None:
    return None


_SUBSETS = (
    "clone", "_to_copy", "contiguous", "cat", "stack", "index", "index_select", "gather", "repeat", "flip", "roll",
    "masked_select", "take", "max", "min", "amax", "amin", "_unsafe_index", "lift_fresh", "lift_fresh_copy", "mean",
)  # fmt: skip
"""Ops whose results lie within the range of the first operand."""
RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_SUBSETS, _same(0)),
    **dict.fromkeys(("copy", "fill", "full_like", "full"), _same(1)),
    "new_full": _same(2),
    "scalar_tensor": _same(0),
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros", "zero"), _constant(0)),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), _constant(1)),
    "where": _same(1, 2),
    **dict.fromkeys(("maximum", "minimum"), _same(0, 1)),
    **dict.fromkeys(("masked_fill", "masked_scatter"), _same(0, 2)),
    "index_put": _put,
    **dict.fromkeys(("scatter", "index_copy", "index_fill"), _same(0, 3)),
    **dict.fromkeys(("scatter.reduce", "scatter.value_reduce", "round.decimals"), _unknown),
    **dict.fromkeys(("scatter_add", "index_add"), _added_at),
    "add": _binary(operator.add),
    "sub": _binary(operator.sub),
    "rsub": lambda call: corners(lambda a, b: b - _alpha(call) * a, call.range(0), call.range(1)),
    "mul": _binary(operator.mul),
    "neg": lambda call: corners(operator.mul, call.range(0), (-1, -1)),
    "div": _divided,
    "floor_divide": _rounding_rule(_divided),
    "remainder": _remainder,
    "clamp": _clamped(1, 2),
    "clamp_min": _clamped(1, 9),
    "clamp_max": _clamped(9, 1),
    **dict.fromkeys(("floor", "ceil", "round", "trunc"), _rounding_rule(_same(0))),
    "sum": _summed,
    "cumsum": _partly_summed,
    "count_nonzero": lambda call: (0, call.args[0].numel() // max(call.result.numel(), 1)),
    **dict.fromkeys(("argmax", "argmin"), lambda call: call.last_index(1)),
    "argsort": lambda call: call.last_index(1, -1),
    **dict.fromkeys(("sort", "max.dim", "min.dim"), lambda call: [call.range(0), call.last_index(1, -1)]),
    **dict.fromkeys(("sort.stable", "topk"), lambda call: [call.range(0), call.last_index(2, -1)]),
    "nonzero": lambda call: (0, max([*call.args[0].shape, 1]) - 1),
    "randperm": lambda call: (0, max(call.args[0] - 1, 0)),
    **dict.fromkeys(("randint", "random"), _drawn),
    "random.from": lambda call: (call.args[1], call.args[2] - 1),
    "arange": _counting,
    "multinomial": lambda call: call.last_index(9, -1),
    "searchsorted": lambda call: (0, call.args[0].shape[-1]),
    "bucketize": lambda call: (0, call.args[1].shape[-1]),
    "bincount": _bin_counts,
    **dict.fromkeys(("_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"), _distinct),
    "repeat_interleave": _same(0),
    "repeat_interleave.Tensor": lambda call: (0, max(call.args[0].numel() - 1, 0)),
    **dict.fromkeys(("any", "all"), lambda call: call.range(0) if call.args[0].numel() else None),
    "bitwise_and": _both,
    "bitwise_or": _either,
    "bitwise_not": _negated,
    "eq": _equality(when_equal=True),
    "ne": _equality(when_equal=False),
    "lt": _ordered(operator.lt),
    "le": _ordered(operator.le),
    "gt": _ordered(operator.gt),
    "ge": _ordered(operator.ge),
    **dict.fromkeys(("sigmoid", "_softmax", "bernoulli"), lambda call: (0.0, 1.0)),
    **dict.fromkeys(("rand", "rand_like"), _unit),
    "uniform": _uniform,
}  # fmt: skip
"""Op -> rule. Keys are names without the underscore of in-place ops, with an overload whose rule differs."""

_EXCHANGES: Mapping[str, Rule] = {
    "c10d.alltoall_base_.default": _same(1), "_c10d_functional.all_to_all_single.default": _same(0),
}  # fmt: skip
"""Of other ranks come values like this rank's own."""


class ValueRanges:
    """Follows the smallest and the largest element of storages through the ops of a recording."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._by_storage: dict[int, tuple[Range, torch.dtype]] = {}
        """Range of each storage's elements, and the dtype in which they were written."""

    def of(self, tensor: torch.Tensor) -> Range | None:
        """Return the range of a tensor's elements; None if it is unknown."""
        values = self._known(tensor)
        return (0, 1) if values is None and tensor.dtype is torch.bool else values

    def _known(self, tensor: torch.Tensor) -> Range | None:
        """Return the range of a tensor's elements by its values, if these are known, or by the ops that wrote it."""
        if tensor.is_complex() or tensor.layout != torch.strided or not _torch.has_shape(tensor):
            return None
        known = tensor.constant if isinstance(tensor, _torch.FakeTensor) else tensor
        if known is not None:
            return _ends(known) if known.numel() <= _MAX_READ and not known.is_floating_point() else None
        entry = self._ledger.find(tensor)
        if entry is None or entry.id not in self._by_storage:
            return None
        values, dtype = self._by_storage[entry.id]
        return values if dtype is tensor.dtype else None  # view(dtype) reads the same bits as other numbers

    def put(self, tensor: torch.Tensor, values: Range | None) -> None:
        """Set the range of a tensor's elements; None: unknown."""
        entry = self._ledger.find(tensor)
        if entry is None:
            return
        stored = None if values is None else _stored(values, tensor.dtype)
        if stored is None:
            self._by_storage.pop(entry.id, None)
        else:
            self._by_storage[entry.id] = stored, tensor.dtype

    def before(self, written: Sequence[Any]) -> None:
        """Store the ranges of tensors with known values before an op writes them."""
        for target in written if not self._ledger.real else ():
            if isinstance(target, _torch.FakeTensor) and target.constant is not None:
                self.put(target, self.of(target))

    def after(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any, written: Sequence[Any] = ()
    ) -> None:
        """Set the ranges of an op's results by its rule. ``written``: arguments that the op wrote."""
        if self._ledger.real:
            return
        rule = _EXCHANGES.get(name) or rule_of(name)
        if name.startswith("c10d.alltoall_base_."):  # whose schema does not say that it writes its first argument
            written = args[:1]
        values = None if rule is None else _computed(rule, Call(args, kwargs, result, self.of))
        if written:
            self._put_written(written, values)
        elif values is not None:
            results = result if isinstance(result, (list, tuple)) else [result]
            for tensor, ends in zip(results, values if isinstance(values, list) else [values], strict=False):
                if isinstance(tensor, torch.Tensor):
                    self.put(tensor, ends)

    def _put_written(self, targets: Sequence[Any], values: Range | list[Range | None] | None) -> None:
        """Set the ranges of arguments that an op wrote. A write into a part of a storage widens the storage's range."""
        ranges = values if isinstance(values, list) else [values]
        if len(ranges) != len(targets):
            ranges = [None] * len(targets)
        for target, ends in zip(targets, ranges, strict=True):
            for tensor in target if isinstance(target, (list, tuple)) else [target]:
                if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                    known = ends if tensor is target else None  # a list, as of a foreach op, has no rule
                    is_whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
                    self.put(tensor, known if is_whole else union([self.of(tensor), known]))


def rule_of(name: str) -> Rule | None:
    """Return the rule of an op with this name and overload, or None."""
    _, base, overload = name.split(".") if name.count(".") == 2 else ("", name, "")
    base = base.rstrip("_")
    rule = RULES.get(f"{base}.{overload}")
    # of overloads that write into ``out=``, only the one named "out" has the plain op's arguments
    if rule is None and (overload == "out" or "out" not in overload):
        rule = RULES.get(base)
    return rule


def _computed(rule: Rule, call: Call) -> Range | list[Range | None] | None:
    """Return the range that the rule computes for a call; None if it cannot."""
    try:
        return rule(call)
    except (IndexError, KeyError, TypeError, AttributeError, ValueError, ArithmeticError):
        return None  # an overload whose arguments the rule does not read


def _stored(values: Range, dtype: torch.dtype) -> Range | None:
    """Return the range after a cast, which rounds or truncates; None if it is unknown: an integer would wrap around."""
    if not all(map(math.isfinite, values)) or dtype.is_complex:
        return None
    if dtype is torch.bool:
        if values[0] == values[1] == 0:
            return 0, 0
        return (1, 1) if values[0] * values[1] > 0 else None  # without 0 in the range, all are true
    if dtype.is_floating_point:
        with _torch.no_modes():
            low, high = torch.tensor(values, dtype=torch.float64).to(dtype).tolist()
        return (low, high) if math.isfinite(low) and math.isfinite(high) else None
    low, high = math.trunc(values[0]), math.trunc(values[1])
    return (low, high) if torch.iinfo(dtype).min <= low and high <= torch.iinfo(dtype).max else None


def _ends(known: torch.Tensor) -> Range | None:
    """Return the smallest and the largest element of a real tensor; None if it is empty."""
    if not known.numel():
        return None
    with _torch.no_modes(), torch.no_grad():
        return known.min().item(), known.max().item()
