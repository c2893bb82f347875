"""Texts that name functions to follow."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memplan.errors import InputError
from memplan.explanation.line_profile import LineProfile
from memplan.integrations.line_profiles.places import parse_lines_option, unused_options
from memplan.trace.recording.followed.line_watch import Followed

SOURCE = "class Net:\n    def forward(self): ...\n\nasync def main():\n    def step(): ...\n"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SOURCE, encoding="utf-8")
    Path("broken.py").write_text("def (", encoding="utf-8")
    return "train.py"


@pytest.mark.parametrize("function", [None, "forward", "Net.forward", "main", "step", "main.step"])
def test_a_file_and_its_functions(file: str, function: str | None) -> None:
    text = file if function is None else f"{file}:{function}"
    assert parse_lines_option(text) == Followed(os.path.realpath(file), function)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "trian.py",
            "--lines trian.py: there is no file trian.py. Expected FILE.py or FILE.py:FUNCTION, such as "
            "train.py:Trainer.step. Name one, such as train.py.",
        ),
        ("no/such.py", "--lines no/such.py: there is no file no/such.py."),
        (
            "train.py:foward",
            "--lines train.py:foward: train.py has no function foward. Expected one that it has, such as Net.forward",
        ),
        ("broken.py", "--lines broken.py: broken.py is not Python."),
    ],
)
def test_what_is_not_there_is_said(file: str, text: str, said: str) -> None:
    with pytest.raises(InputError) as error:
        parse_lines_option(text)
    assert str(error.value).startswith(said)


def test_places_of_which_no_line_ran_are_said() -> None:
    ran = [LineProfile("Net.forward", "sub/train.py", "cpu", "recorded", ())]
    assert list(unused_options(["train.py", "train.py:forward", "train.py:Net.forward"], ran)) == []
    assert list(unused_options(["train.py:main", "other.py"], ran)) == [
        f"--lines {text}: no line of it ran. Expected what the script calls until it is ended. "
        "Name another, or see more steps (--steps)."
        for text in ("train.py:main", "other.py")
    ]
