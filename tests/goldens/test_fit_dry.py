"""Planned steps that torch's CUDA build runs on the emulated card: the budget is kept, and the peak is as predicted."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from environment import ENVIRONMENT, needs_cuda_torch
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


def test_cells_that_did_not_run_stay_in_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_dry, "RESULTS", tmp_path)
    head = {"engine": "graph", "share": 0.0, "card": "h100", "error": "no"}
    known = [head | {"step": "a"}, head | {"step": "b"}, head | {"step": "gone"}]
    (tmp_path / "fit_dry.json").write_text(json.dumps(known))
    fit_dry.write([head | {"step": "b", "error": "other"}], [(step, "graph", 0.0) for step in "abc"])
    assert json.loads((tmp_path / "fit_dry.json").read_text()) == [known[0], known[1] | {"error": "other"}]
    assert "0 of 3 cells ran" in (tmp_path / "fit_dry.md").read_text()
