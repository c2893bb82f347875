"""Symbolic scalars: ints and floats that stand for unknown values, and report where they decide a branch."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from memplan.trace.recording.values.ranges import Number, Range, corners


class Reader(Protocol):
    """Receiver of the reports of symbolic scalars."""

    def decides(self, answer: bool) -> bool:
        """Record that an unknown value decides a branch, and return the truth value of the condition to assume."""
        ...

    def becomes_plain(self) -> None:
        """Record that an unknown value without a known range was converted to a plain int, which is not followed."""
        ...


class SymbolicFloat(float):
    """A float that stands for an unknown value."""

    __slots__ = ("bound", "reader")
    reader: Reader
    bound: Range | None


class SymbolicInt(int):
    """An int that stands for an unknown value."""

    reader: Reader
    bound: Range | None


def symbolic(value: Number, reader: Reader, bound: Range | None = None) -> Any:
    """Return a symbolic scalar.

    Args:
        value: the number that it equals in computations.
        reader: receives its reports.
        bound: smallest and largest possible value, if known.
    """
    result = SymbolicInt(value) if isinstance(value, int) else SymbolicFloat(value)
    result.reader, result.bound = reader, bound
    return result


def is_symbolic(value: Any) -> bool:
    """Return whether a value is a symbolic scalar."""
    return isinstance(value, (SymbolicInt, SymbolicFloat))


def bound_of(value: Any) -> Range | None:
    """Return the range of a number, which for a plain number is the number itself; None if unknown."""
    if is_symbolic(value):
        return value.bound
    return (value, value) if isinstance(value, (int, float)) else None


def _method(base: type, name: str) -> Callable[..., Any]:
    """Return a number type's operator method. For an int with a float operand it is the float's method of this name:
    Python would call the reflected method of the plain float, and the result would not be symbolic."""
    method = getattr(base, name)

    def call(self: Any, *others: Any) -> Any:
        """Call the method on a number and, for a binary operator, its second operand."""
        result = method(self, *others)
        if result is NotImplemented and isinstance(others[0], float):
            return getattr(float, name)(float(self), *others)
        return result

    return call


def _computing(base: type, name: str) -> Callable[..., Any]:
    """Return an arithmetic operator whose result is a symbolic scalar, with a range if the operands' are known."""
    method = _method(base, name)

    @functools.wraps(getattr(base, name))
    def compute(self: Any, *others: Any) -> Any:
        result = method(self, *others)
        return symbolic(result, self.reader, _bound(name, self, *others)) if type(result) in (int, float) else result

    return compute


def _bound(name: str, *operands: Any) -> Range | None:
    """Return the range of an operator's result; None if unknown."""
    ranges = [bound_of(operand) for operand in operands]
    if name not in _MONOTONE or None in ranges:
        return None
    if name == "__floordiv__" and (is_symbolic(operands[1]) or operands[1] == 0):  # the divisor may be 0
        return None
    return corners(_MONOTONE[name], *ranges)


def _comparing(base: type, name: str) -> Callable[..., Any]:
    """Return a comparison operator, which reports a branch unless the ranges decide the answer."""
    method = _method(base, name)

    @functools.wraps(getattr(base, name))
    def compare(self: Any, other: Any) -> Any:
        """Return the answer for the assumed value; if other values could differ, as the reader decides."""
        answer = method(self, other)
        if not isinstance(answer, bool) or _is_certain(name, bound_of(self), bound_of(other)):
            return answer
        return self.reader.decides(answer)

    return compare


def _is_certain(name: str, left: Range | None, right: Range | None) -> bool:
    """Return whether a comparison has the same answer for all values in two ranges. ``name``: "__lt__" and the like."""
    if left is None or right is None:
        return False
    if name in ("__eq__", "__ne__"):
        return left[1] < right[0] or right[1] < left[0]  # disjoint
    answers = {getattr(operator, name)(low_or_high, other) for low_or_high in left for other in right}
    return len(answers) == 1


def _whole(name: str) -> Callable[..., Any]:
    """Return a conversion of a symbolic float to an integer (``__int__``, ``__floor__``, ``__round__``)."""
    method = getattr(float, name)

    @functools.wraps(method)
    def convert(self: Any, *digits: Any) -> Any:
        """Return a symbolic integer; ``__int__``, which must return a plain int, reports an unknown range."""
        result = method(self, *digits)
        if isinstance(result, float):
            return symbolic(result, self.reader)
        if self.bound is None:
            self.reader.becomes_plain()
        bound = None if self.bound is None else (method(self.bound[0]), method(self.bound[1]))
        return result if name == "__int__" else symbolic(result, self.reader, bound)

    return convert


def _is_nonzero(self: Any) -> bool:
    return self != 0


def _reduced(self: Any, protocol: Any) -> Any:
    """``__reduce_ex__`` of symbolic scalars: copies and pickles are plain numbers."""
    if isinstance(self, int):
        return int, (int.__add__(self, 0),)  # the plain number
    return float, (float.__add__(self, 0.0),)


_MONOTONE: Mapping[str, Callable[[Number, Number], Number]] = {
    "__add__": operator.add, "__radd__": operator.add, "__sub__": operator.sub, "__rsub__": lambda a, b: b - a,
    "__mul__": operator.mul, "__rmul__": operator.mul, "__floordiv__": operator.floordiv,
}  # fmt: skip
"""Operators through which ranges are followed."""
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_METHODS: Mapping[str, Callable[[type, str], Any]] = {
    **{f"__{side}{name}__": _computing for name in _OPERATORS for side in ("", "r")},
    **{f"__{name}__": _computing for name in ("neg", "abs")},
    **{f"__{name}__": _comparing for name in ("lt", "le", "gt", "ge", "eq", "ne")},
    "__bool__": lambda base, name: _is_nonzero,
    "__hash__": getattr,  # a class that defines __eq__ inherits no __hash__
    "__reduce_ex__": lambda base, name: _reduced,
}
for _name, _make in _METHODS.items():
    setattr(SymbolicInt, _name, _make(int, _name))
    setattr(SymbolicFloat, _name, _make(float, _name))
for _name in ("__int__", "__floor__", "__ceil__", "__trunc__", "__round__"):
    setattr(SymbolicFloat, _name, _whole(_name))
