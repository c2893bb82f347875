"""This repository's own guard: what its examples take on a card, beside the baseline that is committed."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from environment import thinned

from memplan.cli import main

ROOT = Path(__file__).resolve().parents[2]
BASELINE = ROOT / "examples" / "memory.json"
STEPS = [(one["target"], one["options"], one["device"]) for one in json.loads(BASELINE.read_text("utf-8"))["steps"]]
NEEDS = {"examples/gpt2.py:build": "transformers", "examples/unet3d.py:build": "monai"}


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="the baseline was written with torch 2.13")
@pytest.mark.parametrize(("target", "options", "device"), thinned(STEPS, 4))
def test_an_example_takes_what_it_took(target: str, options: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if target in NEEDS:
        pytest.importorskip(NEEDS[target])
    monkeypatch.chdir(ROOT)
    # importing MONAI sets this one, which sizes cuBLAS's workspaces
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    given = [target, *shlex.split(options), "--device", device, "--baseline", str(BASELINE), "--tolerance", "0%"]
    done = CliRunner().invoke(main, ["guard", *given])
    assert done.exit_code == 0, f"{done.output}\nWhere that is meant: memplan guard {target} {options} ... --update"
    assert "as in the baseline." in done.output


def test_each_example_that_makes_a_step_is_guarded() -> None:
    makers = {path.stem for path in (ROOT / "examples").glob("*.py") if "\ndef make(" in path.read_text("utf-8")}
    assert makers - {Path(target.partition(":")[0]).stem for target, _, _ in STEPS} == {"guard"}
