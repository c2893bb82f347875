"""Lowest budgets with and without kernels: the report, and a plan with kernels that torch's CUDA build runs."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from environment import ENVIRONMENT, needs_cuda_torch
from goldens.handmade import ROOT  # noqa: F401  # says where the script lies

kernel_floors: Any = importlib.import_module("kernel_floors")  # of benchmarks/
FIRST, SECOND = list(kernel_floors.STEPS)[:2]


def row(step: str, allow: str, budget: int, reserved: int) -> dict[str, Any]:
    kernels = [] if allow == "exact" else ["batch_norm_act", "cross_entropy"]
    sizes = {"budget": budget << 20, "reserved": reserved << 20}
    return {"step": step, "allow": allow, "card": "h100", "kernels": kernels, **sizes}


def test_a_budget_is_smaller_by_what_its_plan_takes() -> None:
    """By hand: 90 of 100 MiB; of the second step, whose plan takes 96 MiB of a budget of 80, 96 of 100."""
    cells = [row(FIRST, "exact", 100, 98), row(FIRST, "reordered", 90, 90)]
    cells += [row(SECOND, "exact", 100, 100), row(SECOND, "reordered", 80, 96)]
    text = kernel_floors.report(cells)
    assert f"| {FIRST} | 100 | 98 | 90 | 90 | 10% | `batch_norm_act`, `cross_entropy` |" in text
    assert f"| {SECOND} | 100 | 100 | 80 | 96 | 4% |" in text
    assert "4 plans ran, 1 over their budget; kernels make 1 of 2 lowest budgets smaller by 10 % or more" in text


def test_a_step_of_which_a_cell_failed_has_no_row() -> None:
    cells = [row(FIRST, "exact", 100, 100), {"step": FIRST, "allow": "reordered", "card": "h100", "error": "no"}]
    assert "0 plans ran" in kernel_floors.report(cells)


def test_a_cell_that_did_not_run_stays_and_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_floors, "RESULTS", tmp_path / "floors")
    monkeypatch.setattr(kernel_floors, "cell", lambda step, allow, *_: row(step, allow, 100, 100))
    assert kernel_floors.main(["--torch", "", "--steps", FIRST]) == 0
    monkeypatch.setattr(kernel_floors, "cell", lambda step, allow, *_: row(step, allow, 100, 101))
    assert kernel_floors.main(["--torch", "", "--steps", SECOND]) == 1
    stored = json.loads((tmp_path / "floors.json").read_text(encoding="utf-8"))
    assert [(one["step"], one["reserved"] >> 20) for one in stored] == [(FIRST, 100)] * 2 + [(SECOND, 101)] * 2


@needs_cuda_torch
@pytest.mark.slow
def test_a_plan_with_kernels_keeps_a_lower_budget() -> None:
    cells = [
        kernel_floors.cell("MONAI's BasicUNet, 64³, float32", allow, "h100", ENVIRONMENT)
        for allow in ("exact", "reordered")
    ]
    assert all(one["reserved"] <= one["budget"] for one in cells)
    assert kernel_floors.share(*cells) <= 0.9
    assert cells[1]["kernels"]
