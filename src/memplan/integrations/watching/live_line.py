"""A line on the terminal that follows the steps; nothing in a pipe, and nothing in CI."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from memplan._bytes import format_bytes
from memplan._text import printable_lines
from memplan.integrations.watching.rows import Row

_EVERY = 0.5
"""Seconds between two refreshes: a watch may cost a step next to nothing."""


class LiveLine:
    """Shows the last step on stderr, where that is a terminal."""

    def __init__(self, *, quiet: bool) -> None:
        self._live: Any = None
        self._next = 0.0
        self.is_shown = not quiet and "CI" not in os.environ and sys.stderr.isatty()

    def show(self, row: Row, leaks: int) -> None:
        """Show a step, unless another one was shown a moment ago."""
        if not self.is_shown or time.monotonic() < self._next:
            return
        from rich.text import Text

        if self._live is None:
            self._live = _started()
        self._live.update(Text(line_of(row, leaks), no_wrap=True, overflow="ellipsis"), refresh=True)
        self._next = time.monotonic() + _EVERY

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self.close()
        print(f"memplan: {printable_lines(text)}", file=sys.stderr)

    def close(self) -> None:
        """Take the line away."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()


def _started() -> Any:
    from rich.console import Console
    from rich.live import Live

    live = Live(
        console=Console(stderr=True), auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
    )
    live.start()
    return live


def line_of(row: Row, leaks: int) -> str:
    """Write a step for people: what is known of it, and how many leaks there are."""
    figures = (
        ("peak", row.peak), ("predicted", row.predicted), ("held", row.held),
        ("resident", row.resident if row.held is None else None),
    )  # fmt: skip
    known = [f"{name} {format_bytes(size)}" for name, size in figures if size is not None]
    return ", ".join([f"memplan: step {row.step}", *known, *([f"{leaks} leak(s)"] if leaks else [])])
