"""Symbolic scalars are numbers like any other, keep their range through sums and products, and report decisions."""

from __future__ import annotations

import copy
import itertools
import math
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from memplan.trace.recording.values.scalars import bound_of, is_symbolic, symbolic


class Reports:
    """Counts what a symbolic scalar reports."""

    def __init__(self) -> None:
        self.decisions = 0
        self.plain = 0

    def decides(self, answer: bool) -> bool:
        self.decisions += 1
        return answer

    def becomes_plain(self) -> None:
        self.plain += 1


COMPUTED: dict[str, Callable[[Any], Any]] = {
    "sum": lambda n: 3 + n - 1,
    "difference": lambda n: 40 - n,
    "product": lambda n: -2 * n * 3,
    "by itself": lambda n: n * n,
    "parts": lambda n: n // 4,
    "scaled": lambda n: n * 0.5,
    "several": lambda n: (40 - n) * 2 // 3 + 1,
}


@pytest.mark.parametrize("name", COMPUTED)
@pytest.mark.parametrize(("low", "high"), [(0, 9), (-7, 5), (3, 4)])
def test_a_result_lies_in_its_range_for_each_value(name: str, low: int, high: int) -> None:
    result = COMPUTED[name](symbolic(high, Reports(), (low, high)))
    bound = bound_of(result)
    assert bound is not None
    assert result + 0.0 == COMPUTED[name](high)
    for value in range(low, high + 1):
        assert bound[0] <= COMPUTED[name](value) <= bound[1]


@pytest.mark.parametrize("name", ["lt", "le", "gt", "ge", "eq", "ne"])
def test_a_comparison_is_a_decision_unless_all_values_agree(name: str) -> None:
    compare = getattr(operator, name)
    for low, high, other in itertools.product(range(3), range(3), range(-1, 4)):
        if low <= high:
            reports, answers = Reports(), {compare(value, other) for value in range(low, high + 1)}
            assert compare(symbolic(high, reports, (low, high)), other) == compare(high, other)
            assert reports.decisions >= len(answers) - 1
            assert not reports.decisions or low <= other <= high


UNKNOWN: dict[str, Callable[[Any], Any]] = {
    "above": lambda n: n > 1,
    "reflected": lambda n: operator.gt(1, n),
    "square": lambda n: n**2 > 50,
    "part": lambda n: n % 4 == 1,
    "beside a float": lambda n: n * 0.9 > 2,
    "itself": bool,
}


@pytest.mark.parametrize("value", [6, 6.5])
@pytest.mark.parametrize("name", UNKNOWN)
def test_a_value_of_unknown_range_decides(value: float, name: str) -> None:
    reports = Reports()
    assert UNKNOWN[name](symbolic(value, reports)) == UNKNOWN[name](value)
    assert reports.decisions == 1


@pytest.mark.parametrize("convert", [int, round, math.floor, math.ceil, math.trunc])
def test_a_float_of_unknown_range_that_becomes_whole_is_reported(convert: Callable[[Any], int]) -> None:
    unknown, bounded = Reports(), Reports()
    assert convert(symbolic(6.5, unknown)) == convert(6.5)
    assert convert(symbolic(6.5, bounded, (0.5, 6.5))) == convert(6.5)
    assert (unknown.plain, bounded.plain) == (1, 0)


def test_a_float_that_is_rounded_to_digits_stays_symbolic() -> None:
    reports = Reports()
    assert is_symbolic(round(symbolic(6.54, reports), 1))
    assert not reports.plain


@pytest.mark.parametrize("value", [6, 6.5])
def test_a_number_is_printed_looked_up_and_copied_as_a_plain_one(value: float) -> None:
    reports = Reports()
    number = symbolic(value, reports)
    assert (str(number), f"{number:.2f}", repr(number)) == (str(value), f"{value:.2f}", repr(value))
    assert hash(number) == hash(value)
    assert not reports.decisions
    for plain in (copy.deepcopy(number), pickle.loads(pickle.dumps(number))):
        assert (type(plain), plain) == (type(value), value)
