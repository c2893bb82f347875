"""Ctrl-C, and whatever other signals raise, while functions of torch are replaced: never in the middle of putting back.

An exception of a signal handler comes between any two instructions. Inside of `__exit__`, or of a ``finally``, it would
leave half of what was replaced. So for its time `held_off` stands before the handlers of this process: where the main
thread is within such code, a signal is sent again a moment later, until it is not.
"""

from __future__ import annotations

import _thread
import ast
import functools
import linecache
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol, TypeVar

_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2")
_WHOLE = frozenset({"__enter__", "__exit__", "enter_context", "__del__", "_on_death", "_forget", "_mark"})
"""Functions that have to come to their end: they replace something, or put it back; or they are called where a weak
reference dies, and Python drops what they raise."""
_MOMENT = 0.005
_LONGEST = 5.0
"""Seconds after which a signal is let through nevertheless: what takes so long may never end."""


@contextmanager
def held_off() -> Iterator[None]:
    """Let no signal raise an exception in here where that would leave something replaced. Of the main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held = _Held(_body(sys._getframe()))
    kinds = [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]
    before = {kind: signal.getsignal(kind) for kind in kinds}
    for kind, handler in before.items():
        if callable(handler) and not isinstance(handler, _Held):
            held.handlers[kind] = handler
            signal.signal(kind, held)
    try:
        yield
    finally:
        for kind, handler in held.handlers.items():
            if signal.getsignal(kind) is held:  # else the user's code has set another one
                signal.signal(kind, handler)
        for kind in held.end():
            signal.raise_signal(kind)


class Undoable(Protocol):
    """What replaces something until it is undone, which may happen twice."""

    def undo(self) -> None: ...


Made = TypeVar("Made", bound=Undoable)


@contextmanager
def undone(make: Callable[[], Made]) -> Iterator[Made]:
    """Make something in the moment in which the context is entered, and undo it where that is left."""
    made = make()
    try:
        yield made
    finally:
        made.undo()


def _body(frame: FrameType | None) -> FrameType | None:
    """Return the frame whose ``with`` block is entered: the first that neither is contextlib's nor called by it."""
    while frame is not None and frame.f_back is not None:
        if "contextlib" not in (frame.f_globals.get("__name__"), frame.f_back.f_globals.get("__name__")):
            break
        frame = frame.f_back
    return frame


class _Held:
    """A handler before those that were there."""

    def __init__(self, outside: FrameType | None) -> None:
        self.handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._outside = outside
        """The frame from which on what runs is none of ours."""
        self._waiting: dict[int, float] = {}
        """Signals that are sent again -> when each came."""

    def __call__(self, kind: int, frame: FrameType | None) -> None:
        """Call the handler that was there; later, where something is being replaced or put back."""
        since = self._waiting.setdefault(kind, time.monotonic())
        if time.monotonic() - since < _LONGEST and self._is_in_whole(frame):
            _thread.start_new_thread(self._again, (kind,))  # not one of `threading`, whose threads a recording follows
            return
        del self._waiting[kind]
        self.handlers[kind](kind, frame)

    def end(self) -> list[int]:
        """Stop sending signals again; return those that still wait."""
        self._outside = None
        waiting = list(self._waiting)
        self._waiting.clear()
        return waiting

    def _again(self, kind: int) -> None:
        time.sleep(_MOMENT)
        if kind not in self._waiting:
            return
        if hasattr(signal, "pthread_kill"):  # wakes the main thread where it waits for a lock
            signal.pthread_kill(_main(), kind)
        else:
            signal.raise_signal(kind)

    def _is_in_whole(self, frame: FrameType | None) -> bool:
        while frame is not None and frame is not self._outside:
            code = frame.f_code
            if code.co_name in _WHOLE or any(
                first <= frame.f_lineno <= last for first, last in _finallys(code.co_filename)
            ):
                return True
            frame = frame.f_back
        return False


def _main() -> int:
    ident = threading.main_thread().ident
    assert ident is not None, "it runs"
    return ident


@functools.cache
def _finallys(file: str) -> tuple[tuple[int, int], ...]:
    """Return the first and the last line of each ``finally`` block of a file."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ()
    bodies = [node.finalbody for node in ast.walk(tree) if isinstance(node, ast.Try) and node.finalbody]
    return tuple((body[0].lineno, body[-1].end_lineno or body[-1].lineno) for body in bodies)
