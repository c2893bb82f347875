"""Interval arithmetic: between which numbers a result lies, given between which its operands lie."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Number = int | float
Range = tuple[Number, Number]
"""Smallest and largest that a value can be at most; both ends belong to it."""
Rule = Callable[..., Range | None]
"""Takes the ranges of the operands, returns that of the result; None where nothing is known."""

_MOST_BITS = 64
"""By which a number is shifted; what is shifted by more is not a size."""


def union(ranges: Sequence[Range | None]) -> Range | None:
    """Return the smallest range around all; None where one is not known, or there is none."""
    known = [one for one in ranges if one is not None]
    if not known or len(known) < len(ranges):
        return None
    return min(low for low, _ in known), max(high for _, high in known)


def at_corners(combine: Callable[..., Any], *given: Range | None) -> Range | None:
    """Return the range of a function that is monotone in each operand, whatever the others are.

    None where an operand has no range, or the function no value or none that is finite at a corner.
    """
    known = [one for one in given if one is not None]
    if len(known) < len(given):
        return None
    try:
        corners = [combine(*ends) for ends in itertools.product(*known)]
        low, high = min(corners), max(corners)
        return (low, high) if math.isfinite(low) and math.isfinite(high) else None
    except (ArithmeticError, ValueError, TypeError):
        return None


def divided(combine: Callable[[Number, Number], Number], one: Range | None, other: Range | None) -> Range | None:
    """Return the range of a quotient, which grows and shrinks steadily where the divisor keeps its sign."""
    return None if other is None or other[0] <= 0 <= other[1] else at_corners(combine, one, other)


def modulo(one: Range | None, divisor: Range | None, *, whole: bool) -> Range | None:
    """Return the range of a remainder by a divisor above 0; ``whole``: of whole numbers."""
    if divisor is None or divisor[0] <= 0:
        return None
    most = divisor[1] - whole
    if one is None or one[0] < 0:
        return 0, most
    return one if one[1] < divisor[0] else (0, min(one[1], most))


def computed(name: str, *given: Range | None) -> Range | None:
    """Return the range of an operator's result, or of a function's of one number.

    Args:
        name: of the operator as Python's methods have it, without underscores, or of the function: "add", "sqrt".
        given: range of each operand; None where nothing is known.
    """
    rules = {1: _OF_ONE, 2: _OF_TWO}.get(len(given), {})
    return None if name not in rules or None in given else rules[name](*given)


def _remainder(one: Range, other: Range) -> Range | None:
    return modulo(one, other, whole=all(isinstance(end, int) for end in (*one, *other)))


def _power(one: Range, other: Range) -> Range | None:
    """Of a base above 0, steady in both; a number that is squared is so on either side of 0."""
    if one[0] > 0 or (one[0] == 0 and other[0] >= 0):
        return at_corners(operator.pow, one, other)
    even = other[0] == other[1] and other[0] >= 0 and other[0] % 2 == 0
    return at_corners(operator.pow, _magnitude(one), other) if even else None


def _shifted(name: str) -> Rule:
    return lambda one, other: (
        at_corners(getattr(operator, name), one, other) if 0 <= other[0] <= other[1] <= _MOST_BITS else None
    )


def _of_bits(name: str) -> Rule:
    def rule(one: Any, other: Any) -> Range | None:
        if min(one[0], other[0]) < 0:
            return None
        if one[0] == one[1] and other[0] == other[1]:
            return at_corners(getattr(operator, f"{name}_"), one, other)
        if name == "and":
            return 0, min(one[1], other[1])
        most = min((1 << max(one[1].bit_length(), other[1].bit_length())) - 1, one[1] + other[1])
        return (max(one[0], other[0]) if name == "or" else 0), most

    return rule


def _magnitude(given: Range) -> Range:
    least, most = sorted(map(abs, given))
    return (0 if given[0] <= 0 <= given[1] else least), most


def _steady(function: Callable[[Any], Any]) -> Rule:
    return lambda given: at_corners(function, given)


def _bits(given: Any) -> Range:
    lengths = [end.bit_length() for end in given]
    return (lengths[0] if given[0] >= 0 else 0), max(lengths)


_OF_TWO: Mapping[str, Rule] = {
    **{
        name: lambda one, other, combine=combine: at_corners(combine, one, other)
        for name, combine in (
            ("add", operator.add), ("sub", operator.sub), ("mul", operator.mul), ("max", max), ("min", min),
        )
    },
    "truediv": lambda one, other: divided(operator.truediv, one, other),
    "floordiv": lambda one, other: divided(operator.floordiv, one, other),
    "mod": _remainder,
    "pow": _power,
    "round": lambda one, digits: at_corners(round, one, digits) if digits[0] == digits[1] else None,
    **{name: _shifted(name) for name in ("lshift", "rshift")},
    **{name: _of_bits(name) for name in ("and", "or", "xor")},
}  # fmt: skip
_STEADY = (
    "floor", "ceil", "trunc", "sqrt", "cbrt", "isqrt", "exp", "exp2", "expm1", "log2", "log10", "log1p", "atan", "asin",
    "acos", "tanh", "sinh", "asinh", "acosh", "atanh", "erf", "erfc", "degrees", "radians", "factorial",
)  # fmt: skip
"""Functions of `math` that only grow, or only shrink, as their argument grows."""
_OF_ONE: Mapping[str, Rule] = {
    **{name: _steady(getattr(math, name)) for name in _STEADY if hasattr(math, name)},
    **{name: _steady(getattr(operator, name)) for name in ("neg", "pos", "invert")},
    **dict.fromkeys(("abs", "fabs"), _magnitude),
    "log": _steady(math.log),
    "round": _steady(round),
    "bit_length": _bits,
    "bit_count": lambda given: (0, _bits(given)[1]),
}
