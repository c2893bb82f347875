"""`memplan explain --lengths` and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from memplan.cli import main
from memplan.studies.lengths import lengths as study
from memplan.studies.lengths.lengths import Lengths

MODEL = """
from torch import nn

def make():
    return nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 100))

def classifier():
    return nn.Linear(4, 4)
"""


@pytest.fixture(autouse=True)
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lm.py").write_text(MODEL)
    (tmp_path / "empty.txt").write_text("")
    monkeypatch.chdir(tmp_path)
    for name, value in (("BATCHES", 20), ("COMPARED", 10), ("EPOCH", 5), ("_MOMENTS", (1,))):
        monkeypatch.setattr(study, name, value)


def explain(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["explain", *arguments])
    return result.exit_code, result.output


STEP = ("lm.py:make", "--input", "4x32:int64<100", "--optimizer", "sgd")


def test_the_report_and_its_json(tmp_path: Path) -> None:
    code, text = explain(*STEP, "--lengths", "32:0.5,64:0.5", "--device", "h100", "--json", "lengths.json")
    assert code == 0, text
    assert "lm.py:make: 20 batches of 2 lengths on h100" in text
    result = Lengths.load(tmp_path / "lengths.json")
    assert json.loads((tmp_path / "lengths.json").read_text())["format"] == "memplan.lengths"
    assert [one.length for one in result.lengths] == [32, 64]
    assert result.worst_length == 64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*STEP, "--lengths", "0:0.5,64:0.5"), "the length '0'"),
        ((*STEP, "--lengths", "32:0.5,64:0.4"), "add up to 0.9"),
        ((*STEP, "--lengths", "empty.txt"), "it is empty"),
        (("lm.py:classifier", "--input", "8x4", "--lengths", "32:1"), "neither a sequence nor an image"),
        ((*STEP, "--lengths", "32:1", "--measure"), "--lengths with --measure"),
        (("step.trace.json", "--lengths", "32:1"), "a file"),
    ],
)
def test_what_is_refused_is_a_clear_line(arguments: tuple[str, ...], message: str) -> None:
    code, text = explain(*arguments)
    assert code == 2
    (line,) = [line for line in text.splitlines() if line.startswith("memplan:")]
    assert message in line
    assert "Traceback" not in text
