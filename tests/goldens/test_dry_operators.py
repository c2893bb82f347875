"""The benchmark that holds PyTorch's corpus of operators against the emulated card: how it judges, and that it runs."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from environment import ENVIRONMENT, needs_cuda_torch
from goldens.handmade import ROOT

operators: Any = importlib.import_module("dry_operators")  # of benchmarks/; handmade.py says where


def row(peak: int, between: int = 512, **more: Any) -> dict[str, Any]:
    return {"peak": peak, "between": between, "sizes": [4, peak - 512]} | more


@pytest.mark.parametrize(
    ("real", "said", "status"),
    [
        (row(2048), row(2048), "exact"),
        (row(2048), row(2560), "wrong"),
        (row(2048), row(2048, between=1024), "wrong"),
        (row(2048), row(4096, low=1024), "interval"),
        (row(2048), row(4096, low=3072), "wrong"),
        (row(2048), row(4096, values="nonzero"), "values"),
        (row(2048), row(2048, values="nonzero"), "exact"),
        ({"error": "RuntimeError: cuFFT"}, row(2048), "not on the card"),
        (row(2048), {"error": "StepError: it raised"}, "refused"),
        (row(2048), {"error": "DataDependentError: a shape"}, "values"),
    ],
)
def test_each_step_is_judged(real: dict[str, Any], said: dict[str, Any], status: str) -> None:
    assert operators.judged(real, said)["status"] == status


def test_the_counts_are_those_of_the_steps() -> None:
    steps = [operators.judged(row(2048), row(said)) for said in (2048, 2048, 2560, 4096)]
    text = operators.said(steps, "h100", "2.11.0")
    assert "of 4 steps, 2 (50.0%) have the peak" in text
    assert "1 more within a block of 512 bytes, 1 are wrong" in text


def test_the_pages_say_what_the_stored_steps_say() -> None:
    stored = json.loads((operators.RESULTS / "dry_operators.json").read_text(encoding="utf-8"))
    text = operators.said(stored["steps"], stored["card"], stored["torch"])
    assert (operators.RESULTS / "dry_operators_short.md").read_text(encoding="utf-8") == text
    assert text.strip() in operators.PAGE.read_text(encoding="utf-8")


@needs_cuda_torch
def test_some_operators_are_exact(tmp_path: Path) -> None:
    script, some = ROOT / "benchmarks" / "dry_operators.py", "cdist,randperm,nn.GRUCell"
    command = [sys.executable, str(script), "--torch", str(ENVIRONMENT), "--keep", str(tmp_path), "--only", some]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stdout + said.stderr
    assert " 0 are wrong" in said.stdout
    assert "of 0 steps" not in said.stdout
