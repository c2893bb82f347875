"""The report of what other addresses save of a planned step on a card."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from goldens.handmade import ROOT  # noqa: F401  # says where the script lies

fit_addresses: Any = importlib.import_module("fit_addresses")  # of benchmarks/


def loops(**ways: int) -> dict[str, dict[str, int]]:
    """Two loops: one in which every way reserves as much as the step as it is, and one with these bytes."""
    as_it_is = {"default": 100, "first": 100, "pool": 100, "expandable": 100}
    return {"sgd": as_it_is, "adamw": as_it_is | ways}


def test_changes_are_of_the_reserved_bytes_and_the_worst_loop_counts() -> None:
    """By hand: 25 and 50 % are not allocated; a segment first saves 10 and 30 %, and costs 5 % in a loop of four."""
    head = {"step": "a", "engine": "graph", "share": 0.4, "reserved": 100 << 20}
    cells = [
        head | {"allocated": 75 << 20, "first": 90 << 20, "expandable": 80 << 20, "loops": loops(first=105, pool=120)},
        head | {"allocated": 50 << 20, "first": 70 << 20, "expandable": 120 << 20, "loops": loops(expandable=60)},
        {"step": "b", "engine": "graph", "share": 0.4, "error": "no"},  # does not count
    ]
    text = fit_addresses.report(cells)
    assert "| a | graph | 0.4 | 100 | 25.0% | -10.0% | -20.0% | +5.0% | +20.0% | +0.0% |" in text
    assert "| a | graph | 0.4 | 100 | 50.0% | -30.0% | +20.0% | +0.0% | +0.0% | +0.0% |" in text
    assert "2 planned steps: in the median 37.5% of the reserved bytes are not allocated at the peak." in text
    assert "reserved first: -20.0% in the median of steps, more in 1 of 4 loops, by up to 5%." in text
    assert "Expandable segments: +0.0% in the median of steps, more in 0 of 4 loops." in text
    assert "A pool of its own: more in 1 of 4 loops, by up to 20%." in text


def test_plans_for_expandable_segments_are_held_against_their_prediction() -> None:
    cell = {"step": "a", "engine": "graph", "allocated": 75 << 20, "reserved": 100 << 20, "first": 90 << 20}
    cell |= {"expandable": 80 << 20, "loops": loops()}
    least = cell | {"share": 0.0, "planned": {"predicted": 60 << 20, "reserved": 60 << 20}}
    other = cell | {"share": 0.4, "planned": {"predicted": 70 << 20, "reserved": 71 << 20}}
    text = fit_addresses.report([least, other, cell | {"share": 0.8}])
    assert "1 of 2 reserve what is predicted, to the byte; at the least budget a, graph, 60 instead of 100 MiB." in text


def test_the_worst_loop_is_that_which_saves_least() -> None:
    assert fit_addresses.worst(loops(first=60), "first") == 0
    assert fit_addresses.worst({"adamw": {"default": 100, "first": 60}}, "first") == pytest.approx(-0.4)
