from __future__ import annotations

import io
import sys
import time

import pytest

from memplan.cli import progress as module
from memplan.cli.progress import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO, seconds: float) -> str:
    monkeypatch.setattr(module, "AFTER", 0.05)
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    before = sys.stdout
    with progress("recording [a] model"):
        time.sleep(seconds)
        print("from the model")
    assert sys.stdout is before
    return stderr.getvalue()


def test_a_line_appears_on_a_terminal_when_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "recording [a] model" in run(monkeypatch, Terminal(), 0.5)


def test_nothing_appears_when_it_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, Terminal(), 0) == "from the model\n"


def test_nothing_appears_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, io.StringIO(), 0.3) == "from the model\n"
