"""The line on a terminal, and nothing elsewhere."""

from __future__ import annotations

import io
import sys

import pytest

from memplan.integrations.watching.live_line import LiveLine, line_of
from memplan.integrations.watching.rows import Row

ROW = Row(7, 0.1, 3 << 30, 1 << 30, 2 << 30, 5 << 30, "allocator")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, file: io.StringIO, quiet: bool = False) -> str:
    monkeypatch.setattr(sys, "stderr", file)
    monkeypatch.setattr("time.monotonic", lambda: 100.0)
    line = LiveLine(quiet=quiet)
    line.show(ROW, 1)
    line.show(ROW, 2)  # a moment later: not drawn
    line.close()
    return file.getvalue()


def test_a_terminal_shows_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    text = shown(monkeypatch, Terminal())
    assert "memplan: step 7, peak 3.0 GiB, predicted 2.0 GiB, held 1.0 GiB, 1 leak(s)" in text
    assert "2 leak(s)" not in text


def test_a_pipe_ci_and_the_quiet_show_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    assert shown(monkeypatch, io.StringIO()) == ""
    assert shown(monkeypatch, Terminal(), quiet=True) == ""
    monkeypatch.setenv("CI", "true")
    assert shown(monkeypatch, Terminal()) == ""


def test_what_is_not_measured_is_left_out() -> None:
    assert line_of(Row(7, 0.1, None, None, None, 5 << 30), 0) == "memplan: step 7, resident 5.0 GiB"
