"""The frontier as a table and as a picture: every point where it belongs, and the same bytes for the same points."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from reports.outcomes import FRONTIER, MIB

from memplan.errors import InputError, UsageError
from memplan.reports import frontier
from memplan.reports.chart import check_drawable, picture
from memplan.reports.document import document
from memplan.reports.terminal import text_of
from memplan.verification.fitting.frontier import Frontier, Point


def printed(shown: Frontier) -> list[str]:
    text = text_of(document(None, *frontier.parts(shown)))
    return [" ".join(line.split()) for line in text.splitlines()]


def test_the_table_has_a_row_for_each_point_and_marks_the_budget() -> None:
    header, _, *rows = printed(FRONTIER)
    assert header == "Frontier of eager added time of the step"
    assert rows == [
        "590.0 MiB 98 % 0 ms 0.0 %",
        "390.0 MiB 65 % 20 ms 6.7 % the first in the budget",
        "200.0 MiB 33 % 150 ms 50.0 % the floor",
    ]


def test_a_budget_that_only_the_floor_meets_or_nothing() -> None:
    assert printed(replace(FRONTIER, budget=250 * MIB))[-1].endswith("50.0 % the first in the budget, the floor")
    assert not any("budget" in line for line in printed(replace(FRONTIER, budget=100 * MIB)))


def test_without_costs_there_is_no_share_of_the_step() -> None:
    rows = printed(replace(FRONTIER, step_seconds=None, budget=None))
    assert rows[0] == "Frontier of eager added time"
    assert rows[-1] == "200.0 MiB 33 % 150 ms the floor"


def test_the_picture_shows_the_points_in_their_units() -> None:
    pytest.importorskip("matplotlib")
    axes = frontier.draw(FRONTIER).axes[0]
    planned, eager, budget = (np.asarray(line.get_xydata()).T for line in axes.get_lines())
    np.testing.assert_allclose(planned, [[590, 390, 200], [0.3, 0.32, 0.45]])
    np.testing.assert_allclose(eager, [[600], [0.3]])
    np.testing.assert_allclose(budget[0], [400, 400])
    assert axes.get_xlabel() == "predicted peak (MiB)"


def test_a_budget_above_everything_does_not_stretch_the_picture() -> None:
    pytest.importorskip("matplotlib")
    axes = frontier.draw(replace(FRONTIER, budget=1 << 50)).axes[0]
    assert len(axes.get_lines()) == 2


@pytest.mark.parametrize(("peak", "unit"), [(100, "bytes"), (5 << 10, "KiB"), (7 << 30, "GiB")])
def test_units_follow_the_size(peak: int, unit: str) -> None:
    pytest.importorskip("matplotlib")
    axes = frontier.draw(Frontier("t", (Point(peak, 0.0),), peak)).axes[0]
    assert axes.get_xlabel() == f"predicted peak ({unit})"
    assert axes.get_ylabel() == "predicted seconds added"


@pytest.mark.parametrize(("name", "begins"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("A.PDF", b"%PDF")])
def test_a_picture_is_the_same_bytes_each_time(name: str, begins: bytes) -> None:
    pytest.importorskip("matplotlib")
    odd = replace(FRONTIER, title="$x_{$ of net.py:make_\x1b")  # a title is text, not mathematics
    first = picture(lambda: frontier.draw(odd), name)
    assert first.startswith(begins)
    assert picture(lambda: frontier.draw(odd), name) == first != picture(lambda: frontier.draw(FRONTIER), name)


def test_a_name_that_no_picture_has() -> None:
    with pytest.raises(InputError, match=r"--frontier out\.txt\. Expected a name that ends in \.png, \.svg, \.pdf\."):
        check_drawable("out.txt", "--frontier")


def test_without_matplotlib_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"not installed.*pip install 'memplan\[charts\]'"):
        check_drawable(str(tmp_path / "out.png"), "--frontier")
