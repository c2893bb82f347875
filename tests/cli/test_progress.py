from __future__ import annotations

import io
import logging
import sys
import time
from collections.abc import Callable

import pytest

from memplan.cli import progress as module
from memplan.cli.progress import progress


def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds, a minute at most."""
    end = time.monotonic() + 60
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO, after: float, shown: str = "") -> str:
    """Return what is written while a task runs until ``shown`` is there. The line appears after ``after`` seconds."""
    monkeypatch.setattr(module, "AFTER", after)
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    before = sys.stdout
    with progress("recording [a] model"):
        until(lambda: shown in stderr.getvalue())
        print("from the model")
    assert sys.stdout is before
    return stderr.getvalue()


def test_a_line_appears_on_a_terminal_when_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "recording [a] model" in run(monkeypatch, Terminal(), 0.05, "recording [a] model")


def test_nothing_appears_when_it_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, Terminal(), 3600) == "from the model\n"


def test_nothing_appears_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, io.StringIO(), 0) == "from the model\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_the_line_says_what_is_being_done(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, terminal: bool
) -> None:
    stderr, logger = Terminal() if terminal else io.StringIO(), logging.getLogger("memplan")
    monkeypatch.setattr(module, "AFTER", 0.05)
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    before = logger.level, list(logger.handlers)
    with progress("fitting"):
        logger.info("planning for 1 GiB")
        logger.warning("a warning")
        until(lambda: not terminal or "fitting: planning" in stderr.getvalue())
    assert (logger.level, logger.handlers) == before
    assert ("fitting: planning for 1 GiB" in stderr.getvalue()) == terminal
    assert "a warning" in caplog.text


def test_a_bar_and_a_line_say_what_is_done_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for stderr, shown in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stderr)
        with module.bar("recording [a] model") as progress:
            progress(3, 4)
            print("from the model")
        with module.line("looking") as now:
            now("batch [8]")
        text = stderr.getvalue()
        assert "from the model\n" in text
        assert ("3/4" in text, "looking: batch [8]" in text) == (shown, shown)
