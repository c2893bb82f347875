"""`memplan sweep` as a user runs it: the table, the files, failed points, and its one line for every mistake."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import memplan
from memplan.cli import main
from memplan.studies.sweeps import parallel
from memplan.studies.sweeps.points import Outcome, record_point

pytestmark = pytest.mark.usefixtures("models")
MODELS = """
import torch
from torch import nn


def stack(width, depth: int = 2):
    return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), *[nn.Conv2d(width, width, 1) for _ in range(depth)])


def build(size: int = 8):
    model = nn.Linear(size, 4)
    data = torch.randn(2, size)
    return lambda: model(data).sum().backward()
"""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["sweep", *arguments, "--jobs", "1", "--device", "cpu"])


IMAGE = ("models.py:stack", "--input", "2x3x8x8")


def test_points_are_those_that_explain_gives(models: Path) -> None:
    done = run(*IMAGE, "--batch", "1,3", "--vary", "width=4,8", "--json", "a.json")
    assert done.exit_code == 0, done.output
    namespace: dict[str, object] = {}
    exec(MODELS, namespace)
    stack = namespace["stack"]
    rows = json.loads((models / "a.json").read_text())["rows"]
    assert [(row["batch"], row["width"]) for row in rows] == [(1, 4), (1, 8), (3, 4), (3, 8)]
    for row in rows:
        made = memplan.explain(lambda row=row: stack(row["width"]), f"{row['batch']}x3x8x8", device="cpu")  # pyright: ignore[reportCallIssue]
        assert row["peak"] == made.timeline.peak_allocated
        apart = {"workspace", "gathered_weight", "communication"}
        assert {cause: row[cause] for cause in made.by_cause if cause not in apart} == {
            cause: size for cause, size in made.by_cause.items() if cause not in apart
        }
    assert "4 points of batch, width" in done.output
    assert re.search(r"batch \(width 8\), 1 to 3: (fixed|no fixed part)", " ".join(done.output.split()))


def test_an_argument_of_a_build() -> None:
    done = run("models.py:build", "--vary", "size=8:32:8")
    assert done.exit_code == 0, done.output
    assert "4 points of size" in done.output


def test_what_fails_is_kept_with_its_reason() -> None:
    done = run(*IMAGE, "--arg", "width=4", "--set", "1.in_channels=4,6")
    assert done.exit_code == 0, done.output
    text = " ".join(done.output.split())
    assert "Failed at 1.in_channels 6: step 1 raised RuntimeError" in text
    assert "2 points" in text


def test_json_alone_on_stdout_and_a_chart(models: Path) -> None:
    pytest.importorskip("matplotlib")
    done = run(*IMAGE, "--vary", "width=4,8", "--json", "-", "--chart", "chart.png")
    assert len(json.loads(done.stdout)["rows"]) == 2
    assert (models / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_interrupted_it_prints_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def stopped(*task: object) -> Outcome:
        if len(seen) == 2:
            raise KeyboardInterrupt
        seen.append(1)
        return record_point(*task)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(parallel, "record_point", stopped)
    done = run(*IMAGE, "--vary", "width=1,2,3,4")
    assert done.exit_code == 130
    assert "Interrupted: 2 of 4 points were not recorded." in done.output
    assert "interrupted after 2 of 4 points, which were kept" in done.output
    assert "width, 1 to 2: fixed" in done.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*IMAGE, "--arg", "width=4"), "no axis to sweep over"),
        ((*IMAGE, "--arg", "width=4", "--size", "64:32:8"), "--size 64:32:8 is reversed, and so empty"),
        ((*IMAGE, "--arg", "width=4", "--size", ""), "--size '' has an empty value"),
        ((*IMAGE, "--arg", "width=4", "--sequence", "3"), "stack has no sequence to vary"),
        ((*IMAGE, "--arg", "width=4", "--vary", "widht=1,2"), "no argument 'widht'"),
        ((*IMAGE, "--arg", "width=4", "--vary", "width=1,2"), "--vary width and --arg width. Expected one of them"),
        ((*IMAGE, "--vary", "depth=1,2"), "needs width, without a default"),
        ((*IMAGE, "--arg", "width=4", "--set", "kernel_size=3"), "--set 'kernel_size=3'. Expected --set LAYERS.NAME"),
        ((*IMAGE, "--arg", "width=4", "--set", "9.kernel_size=3"), "Sequential has no layer '9'"),
        ((*IMAGE, "--arg", "width=4", "--precision", "fp8"), "precision 'fp8'. Expected one of fp32, bf16"),
        ((*IMAGE, "--arg", "width=4", "--batch", "0,1"), "batch 0. Expected a whole number above 0"),
        (
            (*IMAGE, "--vary", "width=0.5,0.25"),
            "none of the 2 points can be recorded; the first, at width 0.5: build raised",
        ),
        ((*IMAGE, "--arg", "width=4", "--batch", "2", "--chart", "a.txt"), "--chart a.txt. Expected a name that ends"),
        (("models.py:build", "--batch", "1,2"), "no --input with a leading dimension"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments: tuple[str, ...], words: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2, done.output
    assert words in done.output
    assert len(done.output.strip().splitlines()) == 1


def test_help_has_a_worked_example() -> None:
    text = CliRunner().invoke(main, ["sweep", "--help"]).output
    assert "memplan sweep examples/resnet18.py:make --input 8x3x224x224 --batch 1,2,4,8,16" in text
    assert text.count("--batch VALUES") == 1
    assert "--batch INTEGER" not in text
