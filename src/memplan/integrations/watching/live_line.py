"""A status line on the terminal that shows the last step; nothing in a pipe or in CI."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from memplan._bytes import format_bytes
from memplan._text import printable_lines
from memplan.integrations.watching.rows import Row

_INTERVAL = 0.5
"""Seconds between two refreshes, so that drawing costs a step next to nothing."""


class LiveLine:
    """Shows the last step on stderr if that is a terminal."""

    def __init__(self, *, quiet: bool) -> None:
        self._display: Any = None
        """rich's live display; None before the first line and after the last."""
        self._next = 0.0
        """Monotonic time before which the line is not updated again."""
        self.is_shown = not quiet and "CI" not in os.environ and sys.stderr.isatty()
        """Whether the line is drawn at all."""

    def show(self, row: Row, leaks: int) -> None:
        """Show a step and the number of leaks, unless the line was refreshed less than 0.5 s ago."""
        if not self.is_shown or time.monotonic() < self._next:
            return
        from rich.text import Text

        if self._display is None:
            self._display = _start_display()
        self._display.update(Text(line_of(row, leaks), no_wrap=True, overflow="ellipsis"), refresh=True)
        self._next = time.monotonic() + _INTERVAL

    def say(self, text: str) -> None:
        """Print a message to stderr, above the status line."""
        self.close()
        print(f"memplan: {printable_lines(text)}", file=sys.stderr)

    def close(self) -> None:
        """Remove the status line."""
        live, self._display = self._display, None
        if live is not None:
            live.stop()


def _start_display() -> Any:
    """Return a live display of rich on stderr."""
    from rich.console import Console
    from rich.live import Live

    live = Live(
        console=Console(stderr=True), auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
    )
    live.start()
    return live


def line_of(row: Row, leaks: int) -> str:
    """Return the status line of a step: its known figures and the number of leaks."""
    figures = (
        ("peak", row.peak), ("predicted", row.predicted), ("held", row.held),
        ("resident", row.resident if row.held is None else None),
    )  # fmt: skip
    known = [f"{name} {format_bytes(size)}" for name, size in figures if size is not None]
    return ", ".join([f"memplan: step {row.step}", *known, *([f"{leaks} leak(s)"] if leaks else [])])
