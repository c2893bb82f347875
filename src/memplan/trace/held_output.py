"""What the user's code prints while it is recorded, held back and counted: its values are stand-ins."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

from memplan import _torch

_LAST = 5
"""Lines that an error brings along."""
_DEBUGGERS = ("pdb", "cmd", "bdb", "ipdb", "IPython", "pudb")
_is_shown = ContextVar("_is_shown", default=False)


@contextmanager
def output_shown() -> Iterator[None]:
    """Show in here what is printed during recordings."""
    token = _is_shown.set(True)
    try:
        yield
    finally:
        _is_shown.reset(token)


class Printed:
    """Lines that were held back."""

    def __init__(self) -> None:
        self.lines = 0
        self._last = deque[str](maxlen=_LAST)
        self._open: dict[int, str] = {}
        """Line that is still being written, by stream."""
        self._threads: set[int] = set()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold back in here what this thread writes to stdout and stderr, by handlers of logging and progress bars that
        were made before, too. An error takes the last lines along.

        It is the streams' own ``write`` that is replaced: whoever holds a stream calls that.
        """
        if _is_shown.get():
            yield
            return
        with ExitStack() as stack:
            for stream in {id(one): one for one in (sys.stdout, sys.stderr) if hasattr(one, "__dict__")}.values():
                stack.enter_context(_torch.patched(stream, write=self._instead(stream.write, id(stream))))
            stack.enter_context(self.in_thread())
            try:
                yield
            except Exception as error:
                self._end_lines()
                if self._last:
                    error.add_note("it printed last:\n" + "\n".join(self._last))
                raise
        self._end_lines()

    @contextmanager
    def in_thread(self) -> Iterator[None]:
        """Hold back what this thread writes, too."""
        here = threading.get_ident()
        self._threads.add(here)
        try:
            yield
        finally:
            self._threads.discard(here)

    def note(self) -> tuple[str, ...]:
        """Return what has to be said of it, if there is anything."""
        if not self.lines:
            return ()
        lines = "1 line that it printed is" if self.lines == 1 else f"{self.lines} lines that it printed are"
        return (f"{lines} not shown: values are stand-ins (--show-output, show_output=True)",)

    def _instead(self, write: Callable[[str], Any], stream: int) -> Callable[[str], Any]:
        def write_here(text: str) -> Any:
            asked_by = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
            if threading.get_ident() not in self._threads or asked_by in _DEBUGGERS:
                return write(text)
            *whole, rest = (self._open.get(stream, "") + text).split("\n")
            for line in whole:
                self._count(line)
            self._open[stream] = rest.rpartition("\r")[2] or rest  # a progress bar draws itself anew
            return len(text)

        return write_here

    def _end_lines(self) -> None:
        for line in self._open.values():
            self._count(line)
        self._open.clear()

    def _count(self, line: str) -> None:
        if line.strip():
            self.lines += 1
            self._last.append(line.rpartition("\r")[2].rstrip() or line.strip())
