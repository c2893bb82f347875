"""Captures and counts the lines that the user's code prints while it is imported, and during a recording, whose values
are placeholders."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

from memplan._patched import patched

_NOTED_LINES = 5
"""Last lines that are added to an error."""
_DEBUGGERS = ("pdb", "cmd", "bdb", "ipdb", "IPython", "pudb")
_is_shown = ContextVar("_is_shown", default=False)


@contextmanager
def output_shown() -> Iterator[None]:
    """Within this context, recordings show what is printed."""
    token = _is_shown.set(True)
    try:
        yield
    finally:
        _is_shown.reset(token)


class CapturedOutput:
    """Captures the output of the user's code, and counts its lines."""

    def __init__(self) -> None:
        self.lines = 0
        """How many lines were captured."""
        self._last = deque[str](maxlen=_NOTED_LINES)
        """The last of them."""
        self._open: dict[int, str] = {}
        """id() of a stream -> its unfinished line."""
        self._threads: set[int] = set()
        """Identifiers of the threads whose output is captured."""

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Within this context, capture this thread's output; an exception gets the last lines as a note.

        It patches ``write`` of stdout and stderr, so that logging handlers and progress bars that hold these streams
        are captured, too.
        """
        if _is_shown.get():
            yield
            return
        with ExitStack() as stack:
            streams = {id(stream): stream for stream in (sys.stdout, sys.stderr)}  # which may be the same
            for stream in streams.values():
                if hasattr(stream, "__dict__"):  # else its attributes cannot be patched
                    stack.enter_context(patched(stream, write=self._capturing_write(stream.write, id(stream))))
            stack.enter_context(self.in_thread())
            try:
                yield
            except Exception as error:
                self._count_unfinished_lines()
                if self._last:
                    error.add_note("it printed last:\n" + "\n".join(self._last))
                raise
        self._count_unfinished_lines()

    @contextmanager
    def in_thread(self) -> Iterator[None]:
        """Within this context, capture what this thread writes, too."""
        thread = threading.get_ident()
        self._threads.add(thread)
        try:
            yield
        finally:
            self._threads.discard(thread)

    def note(self) -> tuple[str, ...]:
        """Return the note about captured lines, none if nothing was printed."""
        if not self.lines:
            return ()
        lines = "1 line that it printed is" if self.lines == 1 else f"{self.lines} lines that it printed are"
        return (f"{lines} not shown: values are stand-ins (--show-output, show_output=True)",)

    def _capturing_write(self, write: Callable[[str], Any], stream: int) -> Callable[[str], Any]:
        """Return a replacement for a stream's ``write`` that captures what the threads within `in_thread` write, by
        lines. Debuggers and other threads write as before.

        ``stream``: id() of the stream, whose unfinished line continues with the next text.
        """

        def capture(text: str) -> Any:
            """Count the lines of ``text``; write it only for other threads and debuggers."""
            package = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
            if threading.get_ident() not in self._threads or package in _DEBUGGERS:
                return write(text)
            *lines, unfinished = (self._open.get(stream, "") + text).split("\n")
            for line in lines:
                self._count_line(line)
            self._open[stream] = unfinished.rpartition("\r")[2] or unfinished  # a progress bar redraws its line
            return len(text)

        return capture

    def _count_unfinished_lines(self) -> None:
        """Count lines without an end, as the user's code writes no more."""
        for line in self._open.values():
            self._count_line(line)
        self._open.clear()

    def _count_line(self, line: str) -> None:
        """Count a line, unless it is blank. Of a progress bar, which redraws its line, the last state is noted."""
        if line.strip():
            self.lines += 1
            self._last.append(line.rpartition("\r")[2].rstrip() or line.strip())
