"""Planned steps that torch's CUDA build runs on the emulated card: the budget is kept, and the peak is as predicted."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from dry_torch import ENVIRONMENT, needs_cuda_torch
from goldens.handmade import ROOT  # noqa: F401  # says where the script lies

fit_dry: Any = importlib.import_module("fit_dry")  # of benchmarks/


@needs_cuda_torch
@pytest.mark.parametrize("engine", ["graph", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("step", ["variational decoder", "GPT with dropout, 6 layers of 512"])
def test_a_planned_step_keeps_its_budget(step: str, engine: str) -> None:
    row = fit_dry.cell(step, engine, 0.4, "h100", ENVIRONMENT)
    assert row["reserved"] <= row["budget"] < row["eager"]
    assert 0.97 * row["predicted"] <= row["reserved"] <= row["predicted"]


@needs_cuda_torch
@pytest.mark.slow
def test_the_least_of_many_convolutions_keeps_its_budget() -> None:
    """There is not the time to measure the workspaces of a ResNet-50, so that they have to be cuDNN's answers."""
    row = fit_dry.cell("ResNet-50, batch 8", "graph", 0.0, "h100", ENVIRONMENT)
    assert row["reserved"] <= row["budget"]
    assert row["reserved"] == pytest.approx(row["predicted"], rel=0.01)


def test_the_table_shows_errors_and_shares() -> None:
    head = {"step": "a", "engine": "graph", "share": 0.4, "card": "h100"}
    assert "BudgetError: no" in fit_dry.line(head | {"error": "BudgetError: no"})
    counts = {"eager": 400 << 20, "budget": 300 << 20, "predicted": 200 << 20, "reserved": 202 << 20}
    assert fit_dry.line(head | counts) == "| a | graph | 0.4 | 400 | 300 | 200 | 202 | +1.00% |"
