"""Numbers that stand for values which a recording does not know: they say so where they decide something."""

from __future__ import annotations

import dis
import functools
import math
import operator
import sys
from collections.abc import Callable
from typing import Any, Protocol

from memplan.trace.recording.place import Line, user_frame
from memplan.trace.recording.values.loops import is_counted_to
from memplan.trace.recording.values.range_rules import Number, Range


class Reader(Protocol):
    """Told what a value that is not known decides."""

    def decides(self, answer: bool) -> bool:
        """Note that it decides a branch, and return the answer to give."""
        ...

    def becomes_size(self, low: Number | None, high: Number, line: Line | None) -> None:
        """Note that it becomes a size, or the length of a loop. ``low``, ``high``: its range, where that is known;
        ``line``: where it was read."""
        ...

    def as_plain(self, low: Number | None, high: Number, line: Line | None, *, size: bool) -> Number:
        """Return what it is taken as where it becomes a plain number, of which nothing is followed; ``size``: it may
        be one."""
        ...


Origin = tuple[Any, int]
"""A value, and the number that was added to it."""


class StandinFloat(float):
    """A number that was never computed; says so when it decides a branch."""

    __slots__ = ("line", "low", "origin", "reader")
    reader: Reader
    low: Number | None
    """Smallest that it can be, where it is itself the largest; None where nothing is known."""
    line: Line | None
    """Where it was read."""
    origin: Origin
    """What it was computed from by adding whole numbers: `i` and `i + 8` have the same."""


class StandinInt(int):
    """Like `StandinFloat`, for integers."""

    reader: Reader
    low: Number | None
    line: Line | None
    origin: Origin


def standin(
    value: float | int,
    reader: Reader,
    low: Number | None = None,
    line: Line | None = None,
    origin: Origin | None = None,
) -> Any:
    """Return a number for one that is not known.

    Args:
        value: what it counts as: the largest that it can be, where that is known.
        reader: told what it decides.
        low: the smallest that it can be; None where nothing is known.
        line: of the user's, at which it was read.
        origin: what it was computed from by adding whole numbers; None where that is nothing else.
    """
    result = StandinInt(value) if isinstance(value, int) else StandinFloat(value)
    result.reader, result.low, result.line, result.origin = reader, low, line, origin or (object(), 0)
    if isinstance(result, StandinInt) and is_counted_to(user_frame()):
        becomes_size(result)
    return result


def is_standin(value: Any) -> bool:
    """Return whether a number stands for one that is not known."""
    return isinstance(value, (StandinInt, StandinFloat))


def plain(number: Number) -> Number:
    """Return what a number counts as, a plain number."""
    return int.__add__(number, 0) if isinstance(number, int) else float.__add__(number, 0.0)


def becomes_size(number: Any) -> None:
    """Note that a number becomes a size, or the length of a loop."""
    number.reader.becomes_size(number.low, number, number.line)


def _comparing(base: type, name: str) -> Callable[..., Any]:
    method = getattr(base, name)

    @functools.wraps(method)
    def compare(self: Any, *args: Any) -> Any:
        result = method(self, *args)
        if not isinstance(result, bool):
            return result
        chooses = name in _CHOOSING and _called_as_a_function(sys._getframe(1))
        return result if chooses and _is_certain(name, self, *args) else self.reader.decides(result)

    return compare


def _converting(base: type, name: str) -> Callable[..., Any]:
    method = getattr(base, name)

    @functools.wraps(method)
    def convert(self: Any, *args: Any) -> Any:
        value = method(self, *args)
        low = None if self.low is None else method(self.low) if hasattr(self.low, name) else int(self.low)
        return self.reader.as_plain(low, value, self.line, size=name != "__float__")

    return convert


def _is_certain(name: str, one: Any, other: Any) -> bool:
    """Return whether a comparison has one answer for the whole range, or nothing is known of its ranges.

    `min` and `max` choose by it, and the plain number that is chosen no longer shows what it was compared to.
    """
    first, second = range_of(one), range_of(other)
    if first is None or second is None:
        return True
    method = getattr(operator, name)
    return len({method(a, b) for a in first for b in second}) == 1


def _called_as_a_function(frame: Any) -> bool:
    """Return whether a comparison was made by ``max(a, b)`` and its like, which choose a value and no branch."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith(("CALL", "PRECALL"))


def _computing(base: type, name: str) -> Callable[..., Any]:
    method = getattr(base, f"__{name}__")

    @functools.wraps(method)
    def compute(self: Any, *args: Any) -> Any:
        if args and isinstance(args[0], (list, tuple, str)):  # as often as the number says
            becomes_size(self)
        result = method(self, *args)
        if type(result) not in (int, float):
            return result
        values = _range_of_result(name, self, *args)
        if values is None:
            return standin(result, self.reader, None, self.line)
        origin = _origin_of_result(name, self, *args)
        return standin(type(result)(values[1]), self.reader, values[0], self.line, origin)

    return compute


def _dividing(name: str) -> Callable[..., Any]:
    def divide(self: Any, other: Any) -> Any:
        before = "__r" if name == "__rdivmod__" else "__"
        parts = tuple(getattr(self, f"{before}{one}__")(other) for one in ("floordiv", "mod"))
        return NotImplemented if NotImplemented in parts else parts

    return divide


def _origin_of_result(name: str, one: Any, other: Any = None) -> Origin | None:
    if type(other) is not int or name not in ("add", "radd", "sub"):
        return None
    return one.origin[0], one.origin[1] + (-other if name == "sub" else other)


def _range_of_result(name: str, *operands: Any) -> Range | None:
    """Return the range of an operator's result; None where nothing is known."""
    ranges = [range_of(one) for one in operands]
    if name.startswith("r") and name not in ("round", "rshift"):
        name, ranges = name[1:], ranges[::-1]
    known = [one for one in ranges if one is not None]
    if len(known) < len(ranges):
        return None
    if len(known) == 1:
        return _of_one(name, known[0])
    if name == "mod" and known[1][0] > 0:
        return 0, known[1][1] - all(isinstance(one, int) for values in known for one in values)
    if name in ("truediv", "floordiv") and known[1][0] <= 0:
        return None
    if name in ("lshift", "rshift") and not 0 <= known[1][0] <= known[1][1] <= _MOST_BITS:
        return None
    if name in ("and", "or", "xor"):
        return _of_bits(name, *known)
    if name not in ("add", "sub", "mul", "truediv", "floordiv", "lshift", "rshift"):
        return None
    corners = [getattr(operator, name)(a, b) for a in known[0] for b in known[1]]
    return min(corners), max(corners)


_MOST_BITS = 64
"""By which a number is shifted; what is shifted by more is not a size."""


def _of_bits(name: str, one: Any, other: Any) -> Range | None:
    """Return the range of an operator on bits; None where an operand may be negative."""
    if min(one[0], other[0]) < 0:
        return None
    if one[0] == one[1] and other[0] == other[1]:
        value = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}[name](one[0], other[0])
        return value, value
    if name == "and":
        return 0, min(one[1], other[1])
    most = (1 << max(one[1].bit_length(), other[1].bit_length())) - 1
    return (max(one[0], other[0]), min(most, one[1] + other[1])) if name == "or" else (0, min(most, one[1] + other[1]))


def _of_one(name: str, given: Range) -> Range | None:
    if name == "neg":
        return -given[1], -given[0]
    if name == "abs":
        most = max(map(abs, given))
        return (0, most) if given[0] <= 0 <= given[1] else (min(map(abs, given)), most)
    if name == "pos":
        return given
    if name == "invert":
        return ~given[1], ~given[0]  # pyright: ignore[reportOperatorIssue]  # of whole numbers alone
    way = {"round": round, "trunc": math.trunc, "floor": math.floor, "ceil": math.ceil}.get(name)
    return None if way is None else (way(given[0]), way(given[1]))


def range_of(value: Any) -> Range | None:
    """Return the range of a number; None where that is not known."""
    if is_standin(value):
        return None if value.low is None else (value.low, plain(value))
    return (value, value) if isinstance(value, (int, float)) else None


_CHOOSING = frozenset({"__lt__", "__le__", "__gt__", "__ge__"})
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and", "or", "xor")
_OF_ONE = ("neg", "pos", "abs", "invert", "round", "trunc", "floor", "ceil")

for _class, _base in ((StandinFloat, float), (StandinInt, int)):
    for _name in ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__", "__bool__"):
        setattr(_class, _name, _comparing(_base, _name))
    # a running mean or a scaled loss is as unknown as what it came from
    for _name in (*_OPERATORS, *(f"r{one}" for one in _OPERATORS), *_OF_ONE):
        if hasattr(_base, f"__{_name}__"):
            setattr(_class, f"__{_name}__", _computing(_base, f"__{_name}__".strip("_")))
    # as an integer it can become a size, or the length of a loop
    for _name in ("__int__", "__index__", "__float__"):
        if hasattr(_base, _name):
            setattr(_class, _name, _converting(_base, _name))
    for _name in ("__divmod__", "__rdivmod__"):
        setattr(_class, _name, _dividing(_name))
    setattr(_class, "__hash__", _base.__hash__)  # noqa: B010  # a class that defines __eq__ loses it
