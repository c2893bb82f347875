"""A line on the terminal while something takes long, and nothing in a pipe."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

AFTER = 1.0
"""Seconds before the line appears: what is quicker needs none."""


@contextmanager
def progress(text: str) -> Iterator[None]:
    """Show ``text`` and the seconds passed on stderr, from the first second on, if stderr is a terminal.

    What the user's code prints meanwhile goes to stderr, so that stdout holds the report alone.
    """
    with redirect_stdout(sys.stderr):
        if not sys.stderr.isatty():
            yield
            return
        line = _Line(text)
        try:
            yield
        finally:
            line.stop()


@contextmanager
def line(text: str) -> Iterator[Callable[[str], None]]:
    """A function to be told what is being done now: a line on stderr, if that is a terminal.

    What the user's code prints meanwhile goes to stderr, so that stdout holds the report alone.
    """
    with redirect_stdout(sys.stderr):
        if not sys.stderr.isatty():
            yield lambda now: None
            return
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
        with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
            task = shown.add_task(text)
            yield lambda now: shown.update(task, description=f"{text}: {now}")


@contextmanager
def bar(text: str) -> Iterator[Callable[[int, int], None]]:
    """A function to be told how many points are done, of how many: a bar on stderr, if that is a terminal.

    What the user's code prints meanwhile goes to stderr, so that stdout holds the report alone.
    """
    with redirect_stdout(sys.stderr):
        if not sys.stderr.isatty():
            yield lambda done, total: None
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
            task = shown.add_task(text, total=None)
            yield lambda done, total: shown.update(task, completed=done, total=total)


class _Line:
    def __init__(self, text: str) -> None:
        self._text = text
        self._lock = threading.Lock()
        self._shown: Progress | None = None
        self._stopped = False
        self._timer = threading.Timer(AFTER, self._show)
        self._timer.daemon = True
        self._timer.start()

    def _show(self) -> None:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
        with self._lock:
            if self._stopped:
                return
            shown = self._shown = Progress(*columns, console=Console(stderr=True), transient=True)
            shown.add_task(self._text)
            shown.start()

    def stop(self) -> None:
        """Take the line away."""
        self._timer.cancel()
        with self._lock:
            self._stopped = True
            if self._shown is not None:
                self._shown.stop()
