"""The values of an axis, read from text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.errors import InputError
from memplan.studies.axes.ranges import values_of


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1,2,4,8", (1, 2, 4, 8)),
        ("64:256:64", (64, 128, 192, 256)),
        ("64:250:64", (64, 128, 192)),
        ("1,4:6,6", (1, 4, 5, 6)),
        ("fp32, bf16", ("fp32", "bf16")),
        ("(3,3),(5, 5)", ((3, 3), (5, 5))),
        ("true,none,0.5", (True, None, 0.5)),
        ("96x96x48,64", ("96x96x48", 64)),
        ("-2:2:2", (-2, 0, 2)),
        ("1,True", (1, True)),
    ],
)
def test_text_is_read(text: str, values: tuple[object, ...]) -> None:
    assert values_of(text, "axis") == values


def test_values_that_are_no_text_stay() -> None:
    assert values_of([[3, 3], 5, 5], "axis") == ([3, 3], 5)
    assert values_of(range(2), "axis") == (0, 1)
    assert values_of(7, "axis") == (7,)


@settings(deadline=None, max_examples=50)
@given(st.integers(-50, 50), st.integers(0, 50), st.integers(1, 9))
def test_a_range_is_pythons_with_its_end(first: int, more: int, step: int) -> None:
    assert values_of(f"{first}:{first + more}:{step}", "axis") == tuple(range(first, first + more + 1, step))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("256:64:32", "--size 256:64:32 is reversed, and so empty. Expected first:last:step"),
        ("64:256:-32", "Write 64:256:32"),
        ("64:256:0", "a step of 0"),
        ("", "empty value"),
        ("1,,2", "empty value"),
        ("(3,3", "open bracket"),
        ("1:1000000", "at most 10000"),
    ],
)
def test_what_is_no_range_is_refused_in_one_line(text: str, words: str) -> None:
    with pytest.raises(InputError) as error:
        values_of(text, "--size")
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_no_values_are_refused() -> None:
    with pytest.raises(InputError, match="has no values"):
        values_of([], "batch")
