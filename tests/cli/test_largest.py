"""`memplan largest` as a user runs it: the answer, exit codes, JSON, and its one line for every mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from memplan.cli import main
from memplan.devices import catalogue

pytestmark = pytest.mark.usefixtures("models")
MODELS = """
import torch
from torch import nn


def stack(width: int = 4):
    return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 2, 1))


class Skips(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 4, 4, stride=4), nn.ConvTranspose2d(4, 4, 4, stride=4)

    def forward(self, x):
        return torch.cat([x, self.up(self.down(x))], 1)


def wrong():
    return nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU())


def volumes():
    return nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 3, 1))


def build(rows, size: int = 8):
    model = nn.Linear(size, 4)
    data = torch.randn(rows, size)
    return lambda: model(data).sum().backward()
"""
IMAGE = ("models.py:stack", "--input", "2x3x16x16")
VOLUME = ("models.py:volumes", "--input", "1x1x8x8x8", "--axis", "patch", "--divisible", "4", "--window", "48x48x48")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["largest", *arguments, "--device", "cpu"])


def words(done: Result) -> str:
    return " ".join(done.output.split())


def test_the_answer_with_the_next_value(models: Path) -> None:
    done = run(*IMAGE, "--axis", "batch", "--budget", "1MiB", "--json", "a.json")
    assert done.exit_code == 0, done.output
    data = json.loads((models / "a.json").read_text())
    value = data["value"]
    assert f"the largest batch in 1.0 MiB (CPU) is {value}; {value + 1} does not fit" in words(done)
    at = {one["value"]: one for one in data["tried"]}
    assert at[value]["peak"] <= data["limit"] == 1 << 20 < at[value + 1]["peak"]


def test_an_argument_of_a_build() -> None:
    done = run("models.py:build", "--axis", "rows", "--budget", "10KiB")
    assert done.exit_code == 0, done.output
    assert "the largest rows in 10.0 KiB" in words(done)


def test_not_even_one_fits() -> None:
    done = run(*IMAGE, "--axis", "batch", "--budget", "2KiB")
    assert done.exit_code == 1
    assert "not even batch 1 fits in 2.0 KiB (CPU): " in words(done)


def test_a_volume_in_patches() -> None:
    done = run(*VOLUME, "--budget", "3MiB")
    assert done.exit_code == 0, done.output
    # a float for each of 48 ** 3 voxels and each of 3 classes, and the counts
    assert "the aggregation of the volume and its count of patches hold 1.7 MiB, the volume 432.0 KiB" in words(done)
    done = run(*VOLUME, "--budget", "1MiB")
    assert done.exit_code == 1
    assert "The aggregation can lie on the host" in words(done)


def test_sizes_that_fail_are_passed_over(models: Path) -> None:
    done = run("models.py:Skips", "--input", "1x3x30x30", "--axis", "size", "--budget", "1MiB", "--json", "a.json")
    assert done.exit_code == 0, done.output
    data = json.loads((models / "a.json").read_text())
    assert data["value"] % 4 == 0
    assert data["following"] == data["value"] + 4
    assert "Values between the multiples of 4 fail, so only these were looked at." in words(done)
    reason = next(one["reason"] for one in data["tried"] if one["value"] == 30)
    assert "Sizes of tensors must match" in reason
    assert "divisible" not in words(done)


def test_before_and_after_planning() -> None:
    done = run(*IMAGE, "--axis", "batch", "--budget", "1MiB", "--fit", "--json", "a.json")
    data = json.loads(Path("a.json").read_text())
    assert data["planned"]["value"] >= data["value"] > 0
    assert "Planned: the largest batch in 1.0 MiB (CPU) is" in words(done)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((*IMAGE, "--axis", "batch"), "neither a card nor a budget"),
        ((*IMAGE, "--axis", "sequence", "--budget", "1MiB"), "stack has no sequence to vary"),
        ((*IMAGE, "--axis", "batches", "--budget", "1MiB"), "stack has no argument 'batches'"),
        ((*IMAGE, "--axis", "size", "--budget", "1MiB", "--aspect", "1,x"), "--aspect '1,x'"),
        ((*IMAGE, "--axis", "size", "--budget", "1MiB", "--aspect", "1"), "aspect 1 for size. Expected 2 shares"),
        ((*IMAGE, "--axis", "size", "--budget", "1MiB", "--overlap", "0.5"), "without --window"),
        ((*IMAGE, "--axis", "size", "--budget", "1MiB", "--window", "8xa"), "--window '8xa'"),
        ((*IMAGE, "--axis", "size", "--budget", "1MiB", "--window", "8x8x8"), "for a volume of 8x8x8. Expected one"),
        ((*IMAGE, "--axis", "size", "--budget", "1MiB", "--margin", "1"), "margin 1. Expected a share"),
        (("models.py:stack", "--axis", "batch", "--budget", "1MiB"), "stack has no batch to vary"),
        (
            ("models.py:wrong", "--input", "2x3x16x16", "--axis", "batch", "--budget", "1MiB"),
            "so batch 2 cannot be recorded, nor can 4, 1, 8, 16, 32. Expected inputs that the model takes",
        ),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_exit_code_2(arguments: tuple[str, ...], text: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2, done.output
    assert text in done.output
    assert len(done.output.strip().splitlines()) == 1


def test_each_card_of_the_catalogue_has_a_row(models: Path) -> None:
    arguments = ["models.py:stack", "--input", "1x3x64x64", "--no-train", "--cudnn", "off", "--device", "all"]
    names = [card.name for card in catalogue()]
    done = CliRunner().invoke(main, ["largest", *arguments, "--most", "1", "--json", "a.json", "--html", "a.html"])
    assert done.exit_code == 0, done.output
    rows = json.loads((models / "a.json").read_text())["rows"]
    assert [(row["name"], row["value"], row["end"]) for row in rows] == [(name, 1, None) for name in names]
    done = CliRunner().invoke(main, ["explain", *arguments])
    assert done.exit_code == 0, done.output
    assert [name for name in names if name in done.stdout] == names


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("largest", ("--fit",)),
        ("largest", ("--budget", "1GiB")),
        ("explain", ("--measure",)),
        ("explain", ("--host", "1GiB")),
    ],
)
def test_options_that_do_not_go_with_all_cards_are_named(models: Path, command: str, options: tuple[str, ...]) -> None:
    arguments = [command, "models.py:stack", "--input", "1x3x64x64", "--device", "all", *options]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2
    assert f"{options[0]} with --device all" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
