"""A line on the terminal while something takes long, and nothing in a pipe."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

from memplan._text import printable

AFTER = 1.0
"""Seconds before the line appears: what is quicker needs none."""


@contextmanager
def progress(text: str) -> Iterator[None]:
    """Show ``text``, what memplan's logger says is being done, and the seconds passed on stderr after the first second,
    if stderr is a terminal.

    What the user's code prints meanwhile goes to stderr, so that stdout holds the report alone.
    """
    with _shown(text, AFTER) as update, _heard(lambda now: update(description=printable(f"{text}: {now}"))):
        yield


@contextmanager
def line(text: str) -> Iterator[Callable[[str], None]]:
    """Show a line as `progress` does at once; yield a function that takes what is being done now."""
    with _shown(text) as update:
        yield lambda now: update(description=printable(f"{text}: {now}"))


@contextmanager
def bar(text: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on stderr, if that is a terminal; yield a function that takes the points done and their total."""
    with _shown(text, count=True) as update:
        yield lambda done, total: update(completed=done, total=total)


@contextmanager
def _heard(say: Callable[[str], None]) -> Iterator[None]:
    """Say what memplan's logger is told, where a terminal shows it."""
    if not sys.stderr.isatty():
        yield
        return
    logger, handler = logging.getLogger("memplan"), _Said(say)
    level = logger.level
    logger.addHandler(handler)
    if logger.getEffectiveLevel() > logging.INFO:
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class _Said(logging.Handler):
    """Hands on what is being done; warnings go where they would without it."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.INFO:
            self._say(record.getMessage())
        elif logging.lastResort is not None and not logging.getLogger().handlers:
            logging.lastResort.handle(record)


@contextmanager
def _shown(text: str, after: float = 0.0, *, count: bool = False) -> Iterator[Callable[..., Any]]:
    """Show a task after some seconds, until the block ends; yield the function that updates it."""
    with redirect_stdout(sys.stderr):
        if not sys.stderr.isatty():
            yield lambda **changes: None
            return
        from rich import progress as rich
        from rich.console import Console

        text_column, elapsed = rich.TextColumn("{task.description}", markup=False), rich.TimeElapsedColumn()
        bar_columns = (text_column, rich.BarColumn(), rich.MofNCompleteColumn(), elapsed)
        columns = bar_columns if count else (rich.SpinnerColumn(), text_column, elapsed)
        shown = rich.Progress(*columns, console=Console(stderr=True), transient=True)
        task = shown.add_task(printable(text), total=None)
        timer = threading.Timer(after, shown.start)  # at once where it is 0
        timer.daemon = True
        timer.start()
        try:
            yield lambda **changes: shown.update(task, **changes)
        finally:
            timer.cancel()
            timer.join()
            shown.stop()
