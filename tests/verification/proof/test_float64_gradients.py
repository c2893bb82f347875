"""Errors of gradients against float64, on numbers that can be checked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from memplan.verification.proof.float64_gradients import GradientErrors, drew_same_numbers, gradient_errors

EPS = 2.0**-23


def vectors(**values: float) -> dict[str, torch.Tensor | None]:
    """Two elements each: (3, 4) times the value, of norm 5."""
    return {name: torch.tensor([3.0, 4.0], dtype=torch.float64) * value for name, value in values.items()}


def test_errors_are_norms_in_shares_of_the_largest_gradient() -> None:
    found = gradient_errors(vectors(a=1.1, b=2.0, c=0.0), vectors(a=1.0, b=2.0, c=0.001))
    assert found.errors == pytest.approx({"a": 0.05, "b": 0.0, "c": 0.0005})
    assert found.norms == pytest.approx({"a": 0.5, "b": 1.0, "c": 0.0005})
    assert found.relative == pytest.approx(math.hypot(0.5, 0.005) / math.hypot(5, 10, 0.005))


def test_a_gradient_that_is_missing_counts_as_zeros() -> None:
    found = gradient_errors({"a": None, "b": torch.ones(4), "c": None}, {"a": torch.ones(4), "b": None, "c": None})
    assert found.errors == {"a": 1.0, "b": 1.0}
    assert found.norms == {"a": 1.0, "b": 0.0}


@pytest.mark.parametrize(
    ("error", "wrong"), [(2 * 0.001 + 63 * EPS, False), (2 * 0.001 + 65 * EPS, True), (float("nan"), True)]
)
def test_twice_the_larger_of_two_and_64_eps_of_the_largest(error: float, wrong: bool) -> None:
    eager, compiled = GradientErrors({"a": 0.0005, "b": 0.0}), GradientErrors({"a": 0.001, "b": 0.0})
    one = GradientErrors({"a": error, "b": 0.0}, {"a": 0.5, "b": 1.0})
    over = one.exceeding(eager, compiled)
    assert list(over) == (["a"] if wrong else [])
    if wrong:
        assert over["a"] == pytest.approx(error / 0.5, nan_ok=True)
    assert (list(one.exceeding(eager)) == ["a"]) is True


def test_a_step_that_is_wrong_itself_excuses_no_other() -> None:
    wrong = GradientErrors({"a": 0.4}, {"a": 1.0})
    assert wrong.exceeding(wrong) == {"a": 0.4}
    assert not wrong.is_usable_yardstick


def test_where_the_gradient_is_rounding_the_error_is_in_shares_of_the_largest() -> None:
    # of a convolution's bias before a norm the true gradient is 0
    one = GradientErrors({"bias": 100 * EPS, "weight": 0.0}, {"bias": EPS, "weight": 1.0})
    assert one.exceeding() == {"bias": 100 * EPS}


def test_no_gradients_at_all() -> None:
    assert gradient_errors({}, {}).relative == 0.0
    assert gradient_errors(vectors(a=1.0), vectors(a=0.0)).errors == {"a": 5.0}


def test_losses_tell_whether_the_same_numbers_were_drawn() -> None:
    """To a thousandth, and to a hundredth where the step computes in bfloat16, of which an eps is 0.0078."""
    assert drew_same_numbers(1.0, 1.00099)
    assert not drew_same_numbers(1.0, 1.0011)
    assert drew_same_numbers(-1.0, -1.0099, lossy=True)
    assert not drew_same_numbers(-1.0, -1.011, lossy=True)
    assert drew_same_numbers(0.0, 0.0)
    assert not drew_same_numbers(float("nan"), 1.0)


def test_a_step_that_is_a_tenth_off_is_no_yardstick() -> None:
    assert GradientErrors({"a": 0.0, "b": 0.099}).is_usable_yardstick
    assert not GradientErrors({"a": 0.0, "b": 0.101}).is_usable_yardstick
    assert not GradientErrors({"a": float("nan")}).is_usable_yardstick
