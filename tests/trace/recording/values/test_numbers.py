"""A number that stands for another is followed through Python's arithmetic, or the recording says so."""

from __future__ import annotations

import copy
import math
import operator
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.trace.recording.values.c_readers import math_seen
from memplan.trace.recording.values.numbers import is_standin, range_of, standin


class Told:
    """Counts what a reader is told."""

    def __init__(self) -> None:
        self.times = 0

    def decides(self, answer: bool) -> bool:
        self.times += 1
        return answer

    def becomes_size(self, low: Any, high: Any, line: Any) -> None:
        self.times += 1

    def used(self, how: str) -> None:
        self.times += 1

    def uses(self, sites: Any, use: Any) -> None:
        self.times += 1

    def given(self, number: Any, use: Any) -> Any:
        return number

    def in_turn(self, low: Any, high: Any) -> Any:
        return high


@pytest.fixture(autouse=True, scope="module")
def functions_seen() -> Iterator[None]:
    with math_seen():
        yield


def leaves(value: Any) -> list[Any]:
    return [leaf for one in value for leaf in leaves(one)] if isinstance(value, (list, tuple)) else [value]


INVISIBLE = {
    "__new__", "__init__", "__init_subclass__", "__subclasshook__", "__class__", "__doc__", "__dir__", "__sizeof__",
    "__getattribute__", "__setattr__", "__delattr__", "__getstate__", "__reduce__", "__getnewargs__", "__getformat__",
    "from_bytes", "fromhex", "from_number",
}  # fmt: skip
"""Of classes, not of a value; or asked by Python alone, after ``__reduce_ex__``."""
THE_SAME = {"imag", "denominator", "__hash__"}
"""The same for every number, or followed by ``__eq__`` where it matters."""


@pytest.mark.parametrize(("kind", "name"), [(kind, one) for kind in (int, float) for one in dir(kind)])
def test_no_method_loses_a_number_in_silence(kind: type, name: str) -> None:
    told = Told()
    number: Any = standin(kind(6), told, kind(2))
    if name in INVISIBLE | THE_SAME or (kind is int and name == "is_integer"):
        return
    found = getattr(number, name)
    results = []
    for args in ((), (kind(3),), (3, "big"), ("",)) if callable(found) and not is_standin(found) else [None]:
        try:
            results.append(found if args is None else found(*args))
        except (TypeError, ValueError, OverflowError):
            continue
    assert results
    assert told.times or all(is_standin(one) for result in results for one in leaves(result))


ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "dist": ((1.0,), (2.0,)), "fsum": ((2.0, 1.0),), "prod": ((2.0, 1.0),), "sumprod": ((1.0, 2.0), (2.0, 1.0)),
    "ldexp": (2.0, 1), "perm": (6, 2), "comb": (6, 2), "asin": (0.5,), "acos": (0.5,), "atanh": (0.5,),
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in dir(math) if callable(getattr(math, name)) and name[0] != "_"])
def test_no_function_of_math_loses_a_number_in_silence(name: str) -> None:
    told = Told()
    form: Any
    for form in (ARGUMENTS.get(name, ()), (6,), (6, 2), (6.0,), (6.0, 2.0), (6.0, 2.0, 3.0)):
        if not form:
            continue
        several = isinstance(form[0], tuple)
        first: Any = form[0][0] if several else form[0]
        number = standin(first, told, type(first)(first / 2))
        try:
            result = getattr(math, name)((number, *form[0][1:]) if several else number, *form[1:])
        except TypeError:
            continue
        assert told.times or all(map(is_standin, leaves(result)))
        return
    raise AssertionError("called with no arguments that it takes")


Step = tuple[str, Callable[[Any], Any]]
NUMBERS: Any = st.one_of(st.integers(-9, 9).filter(bool), st.sampled_from([0.5, 2.5, -1.5]))


def _binary(name: str, other: float, reflected: bool) -> Step:
    method, reflected = getattr(operator, name), reflected and isinstance(other, int)  # a float reads it in C
    return f"{name} {other}", (lambda x: method(other, x)) if reflected else (lambda x: method(x, other))


BINARY = st.builds(
    _binary,
    st.sampled_from(["add", "sub", "mul", "truediv", "floordiv", "mod", "and_", "or_", "xor", "lshift", "rshift"]),
    NUMBERS,
    st.booleans(),
)
FUNCTIONS: list[Step] = [
    ("neg", operator.neg), ("abs", abs), ("round", round), ("floor", math.floor), ("ceil", math.ceil), ("int", int),
    ("float", float), ("sqrt", lambda x: math.sqrt(x)), ("isqrt", lambda x: math.isqrt(x)), ("trunc", math.trunc),
    ("log2", lambda x: math.log2(x)), ("log 3", lambda x: math.log(x, 3)), ("exp", lambda x: math.exp(x)),
    ("square", lambda x: x**2), ("power", lambda x: 2**x), ("root", lambda x: x**0.5), ("invert", operator.invert),
    ("acos", lambda x: math.acos(x)), ("bits", lambda x: x.bit_length()), ("ones", lambda x: x.bit_count()),
    ("max", lambda x: max(x, 3)), ("min", lambda x: min(3, x)), ("divmod", lambda x: divmod(x, 3)[1]),
    ("digits", lambda x: round(x, 1)), ("tens", lambda x: round(x, -1)), ("text", lambda x: int(f"{x:.0f}")),
    ("sum", lambda x: sum([x, x, 1])), ("prod", lambda x: math.prod([x, 2])), ("fsum", lambda x: math.fsum([x, 2])),
    ("gcd", lambda x: math.gcd(x, 6)), ("hypot", lambda x: math.hypot(x, 3)), ("range", lambda x: len(range(x))),
    ("pow", lambda x: pow(x, 2, 7)), ("real", lambda x: x.real), ("copied", lambda x: copy.deepcopy(copy.copy(x))),
    ("by itself", lambda x: x * x - x), ("ratio", lambda x: x.as_integer_ratio()[0]),
    ("below", lambda x: int(x < 2.5)), ("above", lambda x: int(x < 2.5)), ("equal", lambda x: int(x == 2.0)),
    ("pickled", lambda x: pickle.loads(pickle.dumps(x))),
]  # fmt: skip


LARGE = 10_000
"""Beyond it nothing more is computed: a power of a power would take all memory."""


def after(value: Any, steps: list[Step]) -> Any:
    """What comes of a number; None where Python computes nothing, or a complex or a large number."""
    for _, step in steps:
        try:
            value = step(value)
            size = abs(float.__abs__(value) if isinstance(value, float) else int.__abs__(value))
        except (ArithmeticError, ValueError, TypeError, AttributeError):
            return None
        if not size <= LARGE:
            return None
    return value


@settings(max_examples=400, deadline=None)
@given(
    ends=st.lists(st.integers(-20, 40), min_size=2, max_size=2).map(sorted),
    steps=st.lists(st.one_of(BINARY, st.sampled_from(FUNCTIONS)), min_size=1, max_size=4),
)
def test_what_is_computed_lies_within_its_range(ends: list[int], steps: list[Step]) -> None:
    told = Told()
    result = after(standin(ends[1], told, ends[0]), steps)
    if result is None or told.times or (is_standin(result) and range_of(result) is None):
        return
    values = range_of(result)
    assert values is not None
    for value in range(ends[0], ends[1] + 1):
        really = after(value, steps)
        if really is not None:
            slack = 1e-9 * max(1, abs(really))
            assert values[0] - slack <= really <= values[1] + slack
