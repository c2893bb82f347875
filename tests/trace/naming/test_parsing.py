from __future__ import annotations

from typing import Any

import pytest

from memplan.errors import InputError
from memplan.trace.naming.parsing import check_arguments, keywords, literal, named, offer


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8), ("-1", -1), ("1e-3", 0.001), ("(16, 32)", (16, 32)), ("16,32", (16, 32)), ("[1]", [1]),
        ("False", False), ("false", False), ("none", None), ("'8'", "8"), ("batch", "batch"), ("a b", "a b"),
        ("", ""), ("8x3", "8x3"), ("((((", "(((("), ("__import__('os')", "__import__('os')"),
    ],
)  # fmt: skip
def test_a_text_is_a_literal_or_itself(text: str, value: Any) -> None:
    assert literal(text) == value
    assert type(literal(text)) is type(value)


def test_names_and_values_are_split_at_the_first_equals_sign() -> None:
    assert named(["a=1", "b=x=y", "c="], "--arg") == {"a": "1", "b": "x=y", "c": ""}


@pytest.mark.parametrize("pairs", [["a"], ["=1"], ["2a=1"], ["a=1", "a=2"]])
def test_other_pairs_are_refused(pairs: list[str]) -> None:
    with pytest.raises(InputError, match="--arg"):
        named(pairs, "--arg")


def test_options_hold_nested_values() -> None:
    text = "lr=0.1,betas=(0.9,0.95),foreach=true,mode=fast"
    assert keywords(text, "--optimizer") == {"lr": 0.1, "betas": (0.9, 0.95), "foreach": True, "mode": "fast"}


@pytest.mark.parametrize("text", ["0.1", "lr=", "lr 0.1", "**x", "lr=0.1)(b=2"])
def test_other_options_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="name=value"):
        keywords(text, "--optimizer")


def test_the_nearest_names_are_offered() -> None:
    assert offer("mkae", ["make", "build"]) == "Did you mean make?"
    assert offer("linear", ["Linear", "ReLU"]) == "Did you mean Linear?"
    assert offer("zzz", ["make", "build"]) == "There is build, make"
    assert offer("zzz", []) == ""
    assert offer("zzz", [f"a{i:02}" for i in range(12)]).endswith("a09 and 2 more")


def takes(first: int, second: int = 2, *, third: int) -> None:
    """Something to call."""


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"first": 1}, "needs third, without a default"),
        ({"first": 1, "third": 3, "secnd": 2}, "Did you mean second?"),
        ({"first": 1, "third": 3, "zzz": 2}, "Expected one of first, second, third"),
    ],
)
def test_arguments_are_those_of_the_callable(given: dict[str, int], words: str) -> None:
    with pytest.raises(InputError, match=words.replace("?", r"\?")):
        check_arguments(takes, given, title="takes", option="--arg")


def test_fitting_arguments_are_fine() -> None:
    check_arguments(takes, {"first": 1, "third": 3}, title="takes", option="--arg")
    check_arguments(takes, {"third": 3}, title="takes", option="--arg", first=1)
    check_arguments(lambda **any_of_them: None, {"x": 1}, title="it", option="--arg")
    check_arguments(int, {"x": 1}, title="int", option="--arg")  # no signature to check
