"""Numbers that stand for values which a recording does not know: they say so where they decide something."""

from __future__ import annotations

import dis
import functools
import operator
import sys
from collections.abc import Callable, Collection
from typing import Any, Protocol

from memplan.trace.recording.place import Line
from memplan.trace.recording.values.intervals import Number, Range, computed
from memplan.trace.recording.values.list_indices import is_printed, readers
from memplan.trace.recording.values.readings import Site, Use


class Reader(Protocol):
    """Told what a value that is not known decides."""

    def decides(self, answer: bool) -> bool:
        """Note that it decides a branch, and return the answer to give."""
        ...

    def becomes_size(self, low: Number | None, high: Number, line: Line | None) -> None:
        """Note that it becomes a size, or the length of a loop. ``low``, ``high``: its range, where that is known;
        ``line``: where it was read."""
        ...

    def used(self, how: str) -> None:
        """Note that something is made of it that is not followed, but is hardly a size."""
        ...

    def uses(self, sites: Collection[Site], use: Use) -> None:
        """Note what becomes of what was read at sites."""
        ...

    def given(self, number: Any, use: Use) -> Any:
        """Return a number that is handed to the user's code, of which nobody may see what becomes but ``use``."""
        ...

    def in_turn(self, low: Number | None, high: Number) -> Number:
        """Return what it is taken as where its text chooses: in a loop, one value of its range after the other."""
        ...


AS_TEXT = "is written as text or copied, of which nothing is followed"
_CHOSEN = "is compared by min or max, whose answer is not followed"
Origin = tuple[Any, int]
"""A value, and the number that was added to it."""


class StandinFloat(float):
    """A number that was never computed; says so when it decides a branch."""

    __slots__ = ("line", "low", "origin", "reader", "seen", "sites")
    reader: Reader
    low: Number | None
    """Smallest that it can be, where it is itself the largest; None where nothing is known."""
    line: Line | None
    """Where it was read."""
    origin: Origin
    """What it was computed from by adding whole numbers: `i` and `i + 8` have the same."""
    sites: frozenset[Site]
    """Where what it was computed from was read."""


class StandinInt(int):
    """Like `StandinFloat`, for integers."""

    _reader: Reader
    seen = False
    """Whether anything was done with it that shows: C code that reads it, as a list does its index, does not."""
    low: Number | None
    line: Line | None
    origin: Origin
    sites: frozenset[Site]

    @property
    def reader(self) -> Reader:
        """Return what is told what it decides; who asks has seen it."""
        self.seen = True
        return self._reader

    @reader.setter
    def reader(self, reader: Reader) -> None:
        self._reader = reader


def standin(
    value: float | int,
    reader: Reader,
    low: Number | None = None,
    line: Line | None = None,
    origin: Origin | None = None,
    sites: frozenset[Site] = frozenset(),
) -> Any:
    """Return a number for one that is not known.

    Args:
        value: what it counts as: the largest that it can be, where that is known.
        reader: told what it decides.
        low: the smallest that it can be; None where nothing is known.
        line: of the user's, at which it was read.
        origin: what it was computed from by adding whole numbers; None where that is nothing else.
        sites: where what it was computed from was read.
    """
    result = StandinInt(value) if isinstance(value, int) else StandinFloat(value)
    result.reader, result.low, result.line, result.origin = reader, low, line, origin or (object(), 0)
    result.sites = sites
    if isinstance(result, StandinInt):
        for one in readers():
            reader.uses(sites, Use.PLAIN if isinstance(one, float) else Use.CHOOSES)
    return result


def is_standin(value: Any) -> bool:
    """Return whether a number stands for one that is not known."""
    return isinstance(value, (StandinInt, StandinFloat))


def plain(number: Number) -> Number:
    """Return what a number counts as, a plain number."""
    return int.__add__(number, 0) if isinstance(number, int) else float.__add__(number, 0.0)


def becomes_size(number: Any, taken: Number | None = None) -> None:
    """Note that a number becomes a size, taken at its largest if nothing else is given."""
    number.reader.becomes_size(number.low if taken is None else taken, number if taken is None else taken, number.line)
    number.reader.uses(number.sites, Use.SIZE)


def decides(answer: bool, *compared: Any) -> bool:
    """Note that numbers decide a branch, and return the answer to give."""
    unknown = [one for one in compared if is_standin(one)]
    for one in unknown:
        becomes_plain(one, Use.COMPARED)
    return unknown[0].reader.decides(answer)


def becomes_plain(number: Any, use: Use = Use.PLAIN) -> None:
    """Note that a number becomes one of which nothing is followed."""
    number.reader.uses(number.sites, use)


def _method(base: type, name: str) -> Callable[..., Any]:
    """Return a method of numbers that also takes a float beside an integer: the float's own would read it in C."""
    method = getattr(base, name)

    @functools.wraps(method)
    def call(self: Any, *args: Any) -> Any:
        result = method(self, *args)
        if result is NotImplemented and isinstance(args[0], float):
            return getattr(float, name)(float(plain(self)), args[0])
        return result

    return call


def _comparing(base: type, name: str) -> Callable[..., Any]:
    method = _method(base, name)

    @functools.wraps(method)
    def compare(self: Any, *args: Any) -> Any:
        result = method(self, *args)
        if not isinstance(result, bool):
            return result
        if name not in _CHOOSING or not _called_as_a_function(sys._getframe(1)):
            return decides(result, self, *args)
        answers = _answers(name, self, *args)
        if answers is None and base is float:  # such as the best loss so far
            self.reader.used(_CHOSEN)
            return result
        certain = answers is not None and len(answers) == 1
        return result if certain else decides(result, self, *args)

    return compare


def _converting(base: type, name: str) -> Callable[..., Any]:
    method = getattr(base, name)

    @functools.wraps(method)
    def convert(self: Any, *args: Any) -> Any:
        becomes_plain(self)
        if name != "__float__":
            becomes_size(self)
        return method(self, *args)

    return convert


def _answers(name: str, one: Any, other: Any) -> set[bool] | None:
    """Return the answers that a comparison can have over the whole ranges; None where these are not known.

    `min` and `max` choose by it, and the plain number that is chosen no longer shows what it was compared to.
    """
    first, second = range_of(one), range_of(other)
    if first is None or second is None:
        return None
    return {getattr(operator, name)(a, b) for a in first for b in second}


def _called_as_a_function(frame: Any) -> bool:
    """Return whether a comparison was made by ``max(a, b)`` and its like, which choose a value and no branch."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith(("CALL", "PRECALL"))


def _computing(base: type, name: str) -> Callable[..., Any]:
    method, operator_name = _method(base, name), name.strip("_")

    @functools.wraps(method)
    def compute(self: Any, *args: Any) -> Any:
        if args and isinstance(args[0], (list, tuple, str)):  # as often as the number says
            becomes_size(self)
        result = method(self, *args)
        if type(result) not in (int, float):
            return result
        values, origin = _range_of_result(operator_name, self, *args), _origin_of_result(operator_name, self, *args)
        return of_range(result, values, (self, *args), origin)

    return compute


def of_range(result: Number, values: Range | None, of: Collection[Any], origin: Origin | None = None) -> Any:
    """Return a number for one that was computed of others.

    Args:
        result: what comes of what the others count as.
        values: between what it lies, None where that is not known.
        of: the operands, of which one at least stands for another.
        origin: what it was computed from by adding whole numbers.
    """
    unknown = [one for one in of if is_standin(one)]
    sites = frozenset[Site]().union(*(one.sites for one in unknown))
    for one in unknown:
        one.seen = True
    first = unknown[0]
    if values is None:
        return first.reader.given(standin(result, first.reader, None, first.line, sites=sites), Use.COMPARED)
    high = values[1] if all(isinstance(one, int) for one in (result, *values)) else float(values[1])
    number = standin(high, first.reader, values[0], first.line, origin, sites)
    return first.reader.given(number, Use.COMPARED)  # most often a sum that is not read to the end


def _telling(base: type, name: str) -> Callable[..., Any]:
    method = getattr(base, name)

    @functools.wraps(method)
    def tell(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen = self.seen if isinstance(self, StandinInt) else True
        self.reader.used(AS_TEXT)
        text = method(self.reader.in_turn(self.low, plain(self)), *args, **kwargs)
        _looked_up(self, seen)
        return text

    return tell


def _looked_up(number: Any, seen: bool) -> None:
    """Note that a number may choose by its text or its hash; it may be read elsewhere, too, where nobody sees it."""
    if isinstance(number, StandinInt):
        becomes_plain(number, Use.KEPT if is_printed() else Use.CHOOSES)
        number.seen = seen


def _hashing(base: Any) -> Callable[[Any], int]:
    def find(self: Any) -> int:
        if isinstance(self, StandinInt):
            _looked_up(self, self.seen)
        return base.__hash__(self)

    return find


def _deciding(base: type, name: str) -> Callable[..., Any]:
    method = getattr(base, name)

    def decide(self: Any) -> bool:
        return decides(method(self), self)

    return decide


def _itself(self: Any, memo: Any = None) -> Any:
    return self


def _reduced(self: Any, protocol: Any = None) -> Any:
    """Copied and pickled as a plain number, which another process knows."""
    self.reader.used(AS_TEXT)
    return type(plain(self)), (plain(self),)


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
    return computed(name, *ranges)


def range_of(value: Any) -> Range | None:
    """Return the range of a number; None where that is not known."""
    if is_standin(value):
        return None if value.low is None else (value.low, plain(value))
    return (value, value) if isinstance(value, (int, float)) else None


_CHOOSING = frozenset({"__lt__", "__le__", "__gt__", "__ge__"})
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and", "or", "xor")
_OF_ONE = ("neg", "pos", "abs", "invert", "round", "trunc", "floor", "ceil")
_AS_TEXT = ("__str__", "__repr__", "__format__", "hex", "to_bytes", "as_integer_ratio")

for _class, _base in ((StandinFloat, float), (StandinInt, int)):
    _of: dict[str, Any] = {
        # a running mean or a scaled loss is as unknown as what it came from
        **dict.fromkeys([f"__{_name}__" for one in _OPERATORS for _name in (one, f"r{one}")], _computing),
        **dict.fromkeys([f"__{_name}__" for _name in _OF_ONE], _computing),
        **dict.fromkeys(("bit_length", "bit_count"), _computing),
        **dict.fromkeys((*_CHOOSING, "__eq__", "__ne__", "__bool__"), _comparing),
        # as an integer it can become a size, or the length of a loop
        **dict.fromkeys(("__int__", "__index__", "__float__"), _converting),
        **dict.fromkeys(_AS_TEXT, _telling),
        "is_integer": _deciding,
    }
    for _name, _make in _of.items():
        if hasattr(_base, _name):
            setattr(_class, _name, _make(_base, _name))
    for _name in ("real", "numerator"):
        if hasattr(_base, _name):
            setattr(_class, _name, property(_itself))
    for _name in ("conjugate", "__copy__"):
        setattr(_class, _name, _itself)
    for _name in ("__divmod__", "__rdivmod__"):
        setattr(_class, _name, _dividing(_name))
    # a class that defines __eq__ loses its hash
    for _name, _value in (("__deepcopy__", _itself), ("__reduce_ex__", _reduced), ("__hash__", _hashing(_base))):
        setattr(_class, _name, _value)
