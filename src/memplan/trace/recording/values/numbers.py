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
        """Note that it becomes a size, or the length of a loop. ``low``, ``high``: between which it lies, where that
        is known; ``line``: where it was read."""
        ...


class StandinFloat(float):
    """A number that was never computed; says so when it decides a branch."""

    __slots__ = ("line", "low", "reader")
    reader: Reader
    low: Number | None
    """Smallest that it can be, where it is itself the largest; None where nothing is known."""
    line: Line | None
    """Where it was read."""


class StandinInt(int):
    """Like `StandinFloat`, for integers."""

    reader: Reader
    low: Number | None
    line: Line | None


def standin(value: float | int, reader: Reader, low: Number | None = None, line: Line | None = None) -> Any:
    """Return a number for one that is not known.

    Args:
        value: what it counts as: the largest that it can be, where that is known.
        reader: told what it decides.
        low: the smallest that it can be; None where nothing is known.
        line: of the user's, at which it was read.
    """
    result = StandinInt(value) if isinstance(value, int) else StandinFloat(value)
    result.reader, result.low, result.line = reader, low, line
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
        chooses = name in _CHOOSING and _called_as_a_function(sys._getframe(1))
        return result if chooses or not isinstance(result, bool) else self.reader.decides(result)

    return compare


def _converting(base: type, name: str) -> Callable[..., Any]:
    method = getattr(base, name)

    @functools.wraps(method)
    def convert(self: Any, *args: Any) -> Any:
        becomes_size(self)
        return method(self, *args)

    return convert


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
        return standin(type(result)(values[1]), self.reader, values[0], self.line)

    return compute


def _range_of_result(name: str, *operands: Any) -> Range | None:
    """Return between what the result of an operator lies; None where nothing is known."""
    ranges = [range_of(one) for one in operands]
    if name.startswith("r") and name != "round":
        name, ranges = name[1:], ranges[::-1]
    known = [one for one in ranges if one is not None]
    if len(known) < len(ranges):
        return None
    if len(known) == 1:
        return _of_one(name, known[0])
    if name == "mod" and known[1][0] > 0:
        return 0, known[1][1] - isinstance(known[1][1], int)
    if name in ("truediv", "floordiv") and known[1][0] <= 0:
        return None
    if name not in ("add", "sub", "mul", "truediv", "floordiv"):
        return None
    corners = [getattr(operator, name)(a, b) for a in known[0] for b in known[1]]
    return min(corners), max(corners)


def _of_one(name: str, given: Range) -> Range | None:
    if name == "neg":
        return -given[1], -given[0]
    if name == "abs":
        return None if given[0] < 0 else given
    way = {"round": round, "trunc": math.trunc, "floor": math.floor, "ceil": math.ceil}.get(name)
    return None if way is None else (way(given[0]), way(given[1]))


def range_of(value: Any) -> Range | None:
    """Return between what a number lies; None where that is not known."""
    if is_standin(value):
        return None if value.low is None else (value.low, plain(value))
    return (value, value) if isinstance(value, (int, float)) else None


_CHOOSING = frozenset({"__lt__", "__le__", "__gt__", "__ge__"})
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")

for _class, _base in ((StandinFloat, float), (StandinInt, int)):
    for _name in ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__", "__bool__"):
        setattr(_class, _name, _comparing(_base, _name))
    # a running mean or a scaled loss is as unknown as what it came from
    for _name in (*_OPERATORS, *(f"r{one}" for one in _OPERATORS), "neg", "abs", "round", "trunc", "floor", "ceil"):
        if hasattr(_base, f"__{_name}__"):
            setattr(_class, f"__{_name}__", _computing(_base, f"__{_name}__".strip("_")))
    # as an integer it can become a size, or the length of a loop
    for _name in ("__int__", "__index__"):
        if hasattr(_base, _name):
            setattr(_class, _name, _converting(_base, _name))
    setattr(_class, "__hash__", _base.__hash__)  # noqa: B010  # a class that defines __eq__ loses it
