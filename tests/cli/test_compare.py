"""`memplan compare` as a user runs it: options of both and of one side, files, JSON, and its one line for a mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from memplan.cli import main

pytestmark = pytest.mark.usefixtures("models")
MODELS = """
from torch import nn


def net(width: int = 4):
    return nn.Sequential(nn.Conv2d(3, width, 3), nn.ReLU(), nn.Flatten(), nn.Linear(width * 36, 5))


def other():
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 5))
"""
INPUT = ("--input", "2x3x8x8")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["compare", *arguments])


def test_two_targets(models: Path) -> None:
    done = run("models.py:net", "models.py:other", *INPUT, "--device", "cpu", "--json", "found.json")
    assert done.exit_code == 0, done.output
    assert done.output.startswith("A: models.py:net (recorded, training step, cpu)\nB: models.py:other (")
    data = json.loads((models / "found.json").read_text())
    assert data["a"]["parameters"] == 4 * 27 + 4 + 144 * 5 + 5
    assert data["b"]["parameters"] == 192 * 5 + 5
    alone = run("models.py:net", "models.py:other", *INPUT, "--device", "cpu", "--json", "-")
    assert json.loads(alone.output) == data


def test_options_of_one_side(models: Path) -> None:
    done = run("models.py:net", *INPUT, "--device", "cpu", "--b", "arg=width=8", "--a", "no-train", "--json", "-")
    data = json.loads(done.output)
    assert [data[side]["title"] for side in "ab"] == ["models.py:net --no-train", "models.py:net --arg width=8"]
    assert [data[side]["train"] for side in "ab"] == [False, True]
    assert data["b"]["parameters"] == 8 * 27 + 8 + 288 * 5 + 5
    both = run("models.py:net", *INPUT, "--device", "cpu", "--arg", "width=8", "--a", "arg=width=6", "--json", "-")
    assert [json.loads(both.output)[side]["parameters"] for side in "ab"] == [
        6 * 28 + 216 * 5 + 5,
        8 * 28 + 288 * 5 + 5,
    ]


def test_one_side_is_without_the_autocast_of_both(models: Path) -> None:
    plain = run("models.py:net", *INPUT, "--device", "cpu", "--b", "autocast=bf16", "--json", "-")
    for own in (("--a", "autocast=none"), ("--a-precision", "fp32")):
        done = run("models.py:net", *INPUT, "--device", "cpu", "--autocast", "bf16", *own, "--json", "-")
        peaks = [[json.loads(each.stdout)[side]["peak"] for side in "ab"] for each in (plain, done)]
        assert peaks[0] == peaks[1]
        assert peaks[0][0] != peaks[0][1]


def test_files_are_targets(models: Path) -> None:
    CliRunner().invoke(
        main, ["explain", "models.py:net", *INPUT, "--device", "cpu", "--json", "a.json", "--trace", "t"]
    )
    done = run("a.json", "t")
    assert done.exit_code == 0, done.output
    assert "peak: the same" in done.output
    mixed = run("t", "models.py:net", "--b", "input=2x3x8x8", "--b", "device=cpu")
    assert "peak: the same" in mixed.output


def test_points_of_a_saved_sweep_are_targets(models: Path) -> None:
    swept = ("models.py:net", *INPUT, "--device", "cpu", "--vary", "width=4,8", "--json", "swept.json")
    assert CliRunner().invoke(main, ["sweep", *swept]).exit_code == 0
    done = run("swept.json#width=4", "swept.json#2", "--json", "found.json")
    assert done.exit_code == 0, done.output
    assert done.output.startswith(
        "A: swept.json#width=4: width 4 (swept, cpu)\nB: swept.json#2: width 8 (swept, cpu)\n"
    )
    assert "Of a step" not in done.output  # nothing else is known of a point
    assert "A and B are points of a sweep" in " ".join(done.output.split())
    rows = json.loads((models / "swept.json").read_text())["rows"]
    assert json.loads((models / "found.json").read_text())["difference"] == rows[1]["peak"] - rows[0]["peak"]
    mixed = run("swept.json#2", "models.py:net", "--b", "input=2x3x8x8", "--b", "device=cpu", "--b", "arg=width=8")
    assert "peak: the same" in mixed.output


def test_measured(models: Path) -> None:
    done = run("models.py:net", *INPUT, "--b", "autocast=bf16", "--measure")
    assert done.exit_code == 0, done.output
    assert "On equal weights, B's outputs are" in done.output
    assert "measured on this CPU" in done.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("models.py:net", *INPUT), "models.py:net twice, with the same options"),
        (("models.py:net", "gone.json", *INPUT), "there is no file gone.json"),
        (("models.py:net", "models.py", *INPUT), "names no callable"),
        (("gone.json#1", "models.py:net", "--b", "input=2x3x8x8"), "there is no file gone.json."),
        (("models.json#1", "models.py:net", "--b", "input=2x3x8x8"), "models.json holds something else"),
        (("models.py:net", "models.json", *INPUT), "--input was given for it, too"),
        (("models.py:net", "models.json", "--a", "input=2x3x8x8"), "models.json holds something else"),
        (("models.py:net", "--b", "batch=0", *INPUT), "--batch"),
        (("models.py:net", "--b", "optimiser=sgd", *INPUT), "--optimiser"),
        (("models.py:net", "models.py:other", "--measure", "--device", "h100", *INPUT), "device h100 and measuring"),
    ],
)
def test_mistakes(models: Path, arguments: tuple[str, ...], said: str) -> None:
    (models / "models.json").write_text("{}")
    done = run(*arguments)
    assert done.exit_code == 2
    assert said in done.output
    assert len(done.output.splitlines()) == 1
