"""What a model prints while it is planned."""

from __future__ import annotations

import logging
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from verification.fitting.quick import fit, plan

from memplan.errors import RecordingError

X = torch.linspace(-1, 1, 64 * 16).reshape(64, 16)
NOTE = "what forward() prints is not shown while it is traced"


class Talks(nn.Module):
    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.net, self.fails = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.GELU(), nn.Linear(64, 16)), fails

    def forward(self, x: Tensor) -> Tensor:
        print("in forward", type(x).__name__)
        print("progress", end="\r", file=sys.stderr)
        logging.getLogger("users").warning("a log of the user's")
        if self.fails:
            raise ZeroDivisionError("mine")
        return self.net(x)


def test_a_plan_prints_nothing_of_the_models_and_says_so(capsys: pytest.CaptureFixture[str], caplog: Any) -> None:
    handler = logging.StreamHandler(sys.stderr)  # made before, as a training's is
    logging.getLogger("users").addHandler(handler)
    try:
        made = plan(Talks(), X, budget="85%")
    finally:
        logging.getLogger("users").removeHandler(handler)
    assert capsys.readouterr() == ("", "")
    assert sum(NOTE in note for note in made.notes) == 1
    print("after")
    assert capsys.readouterr().out == "after\n"


def test_a_quiet_model_has_no_such_note() -> None:
    made = plan(Talks().net, X, budget="85%")
    assert not any(NOTE in note for note in made.notes)


def test_fit_shows_what_real_calls_print_and_planned_ones_print_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    fitted = fit(Talks(), X, budget="85%", pairs=0)
    assert fitted.changed
    assert set(capsys.readouterr().out.splitlines()) == {"in forward Tensor"}  # never a stand-in
    fitted.model(X).sum().backward()
    assert capsys.readouterr().out == ""
    assert any(NOTE in note for note in fitted.plan.notes)


def test_an_error_brings_the_last_lines_along(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((RecordingError, ZeroDivisionError)) as caught:
        plan(Talks(fails=True), X, budget="85%")
    errors = [caught.value, caught.value.__cause__]
    assert any("in forward" in note for error in errors for note in getattr(error, "__notes__", []))
    assert capsys.readouterr().out == ""
