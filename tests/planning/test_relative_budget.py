"""Budgets that are relative to what a step takes without a plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from verification.fitting.quick import plan

from memplan.errors import UnitError, UsageError
from memplan.planning.relative_budget import Relative, read_any_budget


@pytest.mark.parametrize(
    ("text", "eager", "budget"),
    [
        ("70%", 1000, 700),
        (" 12.5 % ", 1000, 125),
        ("100%", 1001, 1001),
        ("33.3%", 1000, 333),
        ("-2 KiB", 4096, 2048),
        ("- 1.5KB", 4096, 2596),
        ("-100 B", 4096, 3996),
    ],
)
def test_what_is_relative(text: str, eager: int, budget: int) -> None:
    found = read_any_budget(text)
    assert isinstance(found, Relative)
    assert found.of(eager) == budget


@given(st.integers(1, 1 << 50), st.integers(1, 100))
def test_a_share_is_never_more_than_it_says(eager: int, percent: int) -> None:
    found = read_any_budget(f"{percent}%")
    assert isinstance(found, Relative)
    if eager * percent >= 100:
        assert found.of(eager) == eager * percent // 100


def test_what_is_not_relative_is_read_as_ever() -> None:
    assert read_any_budget("6 GiB") == 6 << 30
    assert read_any_budget(70) == 70
    assert getattr(read_any_budget("rtx4090"), "name", None) == "rtx4090"


@pytest.mark.parametrize("text", ["0%", "101%", "-5%", "70 %%", "-1", "- GiB", "--2 GiB", "-2 GiBit", -1])
def test_what_is_no_budget(text: Any) -> None:
    with pytest.raises(UnitError):
        read_any_budget(text)


def test_what_is_no_budget_is_told_what_is_one() -> None:
    """A misspelt card, too; a number in another unit is no card."""
    with pytest.raises(UnitError, match=r"such as '70%'.* a name that memplan devices lists\.$"):
        read_any_budget("rtx9999")
    with pytest.raises(UnitError, match="such as '70%'") as raised:
        read_any_budget("6 gigs")
    assert "devices" not in str(raised.value)


def test_nothing_is_left() -> None:
    with pytest.raises(UsageError, match=r"the 1\.0 KiB that the step takes without a plan, less 1\.0 KiB"):
        read_any_budget("-1 KiB").of(1024)  # pyright: ignore[reportAttributeAccessIssue]  # it is relative


def test_a_plan_for_a_share_of_the_step() -> None:
    model, x = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)]), torch.randn(256, 32)
    eager = plan(model, x, budget="1 GiB", costs="roofline").eager_peak
    assert plan(model, x, budget="90%", costs="roofline").budget == eager * 9 // 10
    assert plan(model, x, budget="-20 KiB", costs="roofline").budget == eager - 20 * 1024
