"""The report of what other addresses could save of a planned step on a card."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from goldens.handmade import ROOT  # noqa: F401  # says where the script lies

fit_addresses: Any = importlib.import_module("fit_addresses")  # of benchmarks/


def test_shares_are_of_the_reserved_bytes() -> None:
    """By hand: 0, 25 and 50 % of two steps; a cell that did not run does not count."""
    head = {"step": "a", "engine": "graph"}
    cells = [head | {"reserved": 8, "allocated": allocated} for allocated in (8, 4)]
    cells += [head | {"error": "no"}, {"step": "b", "engine": "graph", "reserved": 8, "allocated": 6}]
    rows, text = fit_addresses.report(cells)
    first = {"step": "a", "engine": "graph", "least": 0.0, "median": 0.25, "most": 0.5}
    assert rows[0] == pytest.approx(first)
    assert "| b | graph | 25.0% | 25.0% | 25.0% |" in text
    assert "3 planned steps: in the median 25.0% of" in text
