"""`memplan explain --no-train --weights` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from memplan.cli import main

pytest.importorskip("torchao")

pytestmark = pytest.mark.usefixtures("models")
MODELS = """
from torch import nn


def net():
    return nn.Sequential(nn.Conv1d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 30, 64), nn.ReLU(), nn.Linear(64, 5))


def build():
    return lambda: None
"""
INPUT = ("--input", "2x3x32")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["explain", *arguments])


def test_before_and_after(models: Path) -> None:
    done = run("models.py:net", *INPUT, "--no-train", "--weights", "int8", "--json", "found.json")
    assert done.exit_code == 0, done.output
    assert done.output.startswith("models.py:net: inference on the CPU, by Int8WeightOnlyConfig\nWeights ")
    assert "0 (1, 288 B) stays: torchao quantizes nn.Linear, not Conv1d." in done.output
    data = json.loads((models / "found.json").read_text())
    assert data["weights_saved"] == 4 * (240 * 64 + 64 * 5) - (64 * 245 + 5 * 69)
    alone = run("models.py:net", *INPUT, "--no-train", "--weights", "int8", "--json", "-")
    assert json.loads(alone.output)["layers"] == data["layers"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("models.py:net", "--weights", "int8"), "--weights int8 for a training step"),
        (("models.py:net", "--no-train", "--activations", "int8"), "--activations int8. Expected --weights beside it"),
        (("models.py:net", "--no-train", "--weights", "int3"), "'int3' is not one of 'int8', 'int4'"),
        (("models.py:net", "--no-train", "--weights", "int4"), "nothing in Sequential can be quantized"),
        (("models.py:net", "--no-train", "--weights", "int8", "--device", "h100"), "--weights int8 on h100"),
        (("models.py:net", "--no-train", "--weights", "int8", "--trace", "t.json"), "with --trace, --snapshot or"),
        (("models.py:build", "--no-train", "--weights", "int8"), "returned a step, and --no-train"),
        (("step.json", "--no-train", "--weights", "int8"), "--weights int8 for a trace"),
    ],
)
def test_mistakes(arguments: tuple[str, ...], said: str) -> None:
    done = run(*arguments, *INPUT)
    assert done.exit_code == 2
    assert said in done.output
    assert len(done.output.splitlines()) == 1
