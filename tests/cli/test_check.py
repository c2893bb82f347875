"""`memplan check` as a user runs it: exit codes, JSON, ignores, and its one line for every mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from memplan.cli import main

pytestmark = pytest.mark.usefixtures("models")
MODELS = """
from torch import nn


def stack(padding: int = 0):
    return nn.Sequential(*[nn.Conv2d(1, 1, 3, padding=padding) for _ in range(4)])


def shifted():
    return nn.Conv2d(1, 1, 3, 2, 1)
"""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["check", *arguments, "--device", "cpu"])


def test_a_finding_makes_the_exit_code_1() -> None:
    done = run("models.py:stack", "--input", "1x1x32x32")
    assert done.exit_code == 1
    assert "models.py:stack: 1 warning" in done.output
    assert "4 pixels on each side, 8 per dimension" in " ".join(done.output.split())


def test_without_one_it_is_0() -> None:
    done = run("models.py:stack", "--arg", "padding=1", "--input", "1x1x32x32")
    assert (done.exit_code, done.output) == (0, "models.py:stack: nothing found\n")


@pytest.mark.parametrize(("level", "code"), [("never", 0), ("info", 1)])
def test_fail_on(level: str, code: int) -> None:
    assert run("models.py:stack", "--input", "1x1x32x32", "--fail-on", level).exit_code == code


def test_notes_fail_only_if_asked() -> None:
    assert run("models.py:shifted", "--input", "1x1x16x16").exit_code == 0
    assert run("models.py:shifted", "--input", "1x1x16x16", "--fail-on", "info").exit_code == 1


def test_ignored_or_declared_as_context_it_is_none() -> None:
    assert run("models.py:stack", "--input", "1x1x32x32", "--ignore", "border-erosion:[0-3]").exit_code == 0
    assert run("models.py:stack", "--input", "1x1x32x32", "--context", "4").exit_code == 0
    assert run("models.py:stack", "--input", "1x1x32x32", "--context", "3").exit_code == 1


def test_json(models: Path) -> None:
    run("models.py:stack", "--input", "1x1x32x32", "--json", "found.json")
    alone = run("models.py:stack", "--input", "1x1x32x32", "--json", "-")
    data = json.loads((models / "found.json").read_text())
    assert json.loads(alone.output) == data
    (finding,) = data["findings"]
    assert finding["id"] == "border-erosion"
    assert finding["details"]["lost"] == [[4, 4], [4, 4]]


def test_a_trace_is_a_target(models: Path) -> None:
    explained = ["explain", "models.py:stack", "--input", "1x1x32x32", "--trace", "step.json", "--device", "cpu"]
    CliRunner().invoke(main, explained)
    done = CliRunner().invoke(main, ["check", "step.json"])
    assert done.exit_code == 1
    of_the_model = run("models.py:stack", "--input", "1x1x32x32", "--device", "cpu")
    warned = "warning border-erosion"  # with the bytes behind it
    assert [line for line in done.output.splitlines() if warned in line] == [
        line for line in of_the_model.output.splitlines() if warned in line
    ]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["models.py:nothing", "--input", "1x1x32x32"], "has no 'nothing'"),
        (["models.py:stack"], "was given no input"),
        (["models.py:stack", "--input", "1x1x32x32", "--ignore", "x"], "names no check"),
        (["models.py:stack", "--input", "1x1x32x32", "--context", "-1"], "--context"),
        (["models.py:stack", "--input", "1x1x32x32", "--fail-on", "error"], "--fail-on"),
        (["models.py:stack", "--input", "1x1x2x2"], "inputs that the model takes"),
        (["models.py:stack", "--input", "1x1x32x32", "--json", "no/such/file.json"], "there is no folder"),
        (["models.py:stack", "--input", "1x1x32x32", "--settings", "x:1"], "--settings"),
    ],
)
def test_one_line_for_every_mistake(arguments: list[str], text: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert text in done.output
    assert done.output.count("\n") == 1
