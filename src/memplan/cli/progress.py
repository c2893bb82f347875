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
"""Seconds before the line appears."""


@contextmanager
def progress(text: str) -> Iterator[None]:
    """After a second show a line on stderr, if that is a terminal: ``text``, the latest message of memplan's logger,
    and the elapsed time.

    Output of the user's code within this context goes to stderr, so that stdout has nothing but the report.
    """
    with (
        _task(text, AFTER) as update,
        _forward_log(lambda message: update(description=printable(f"{text}: {message}"))),
    ):
        yield


@contextmanager
def line(text: str) -> Iterator[Callable[[str], None]]:
    """Show a line as `progress` does, but at once; yield a function that sets its message."""
    with _task(text) as update:
        yield lambda message: update(description=printable(f"{text}: {message}"))


@contextmanager
def bar(text: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on stderr, if that is a terminal; yield a function of the points done and their total."""
    with _task(text, count=True) as update:
        yield lambda done, total: update(completed=done, total=total)


@contextmanager
def _forward_log(show: Callable[[str], None]) -> Iterator[None]:
    """Pass the INFO messages of memplan's logger to ``show``, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    logger, handler = logging.getLogger("memplan"), _ForwardInfo(show)
    level = logger.level
    logger.addHandler(handler)
    if logger.getEffectiveLevel() > logging.INFO:
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class _ForwardInfo(logging.Handler):
    """Passes INFO messages to ``show``. Warnings go where they would go without this handler."""

    def __init__(self, show: Callable[[str], None]) -> None:
        """``show(text)`` sets the message of the progress line."""
        super().__init__()
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        """Pass an INFO message to ``show``. Print a warning if no other handler would, as Python does."""
        if record.levelno == logging.INFO:
            self._show(record.getMessage())
        elif logging.lastResort is not None and not logging.getLogger().handlers:
            logging.lastResort.handle(record)


@contextmanager
def _task(text: str, delay: float = 0.0, *, count: bool = False) -> Iterator[Callable[..., Any]]:
    """Show a task after ``delay`` seconds, until the context exits; yield the function that updates it."""
    with redirect_stdout(sys.stderr):
        if not sys.stderr.isatty():
            yield lambda **changes: None
            return
        from rich import progress as rich
        from rich.console import Console

        text_column, elapsed = rich.TextColumn("{task.description}", markup=False), rich.TimeElapsedColumn()
        bar_columns = (text_column, rich.BarColumn(), rich.MofNCompleteColumn(), elapsed)
        columns = bar_columns if count else (rich.SpinnerColumn(), text_column, elapsed)
        display = rich.Progress(*columns, console=Console(stderr=True), transient=True)
        task = display.add_task(printable(text), total=None)
        timer = threading.Timer(delay, display.start)
        timer.daemon = True
        timer.start()
        try:
            yield lambda **changes: display.update(task, **changes)
        finally:
            timer.cancel()
            timer.join()
            display.stop()
