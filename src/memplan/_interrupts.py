"""Signals during a call of memplan: their handlers run between ops, or once everything is as before.

Python runs the handler of a signal between any two instructions of the main thread, and what it raises comes out there:
in the middle of putting torch back, of an import, or in a function that torch's C++ calls and that may not raise. So
while a call runs (`deferred`), the handlers of Python's that are installed are replaced by one that notes the signal.
The user's handler is called

* at the next `safe_point`: before each op that is recorded, and between the parts of a search or a proof;
* at once where the user's own code runs, which can raise anything anyway;
* where neither comes for `LONGEST` seconds, wherever the program is, imports excepted;
* at the latest when the outermost call ends, after all handlers are back.

Each signal that Python hears of is passed on, so that a handler that counts goes on counting.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import FrameType, TracebackType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]

LONGEST = 5.0
"""Seconds after which a signal does not wait for a safe point any more: what runs may never end."""
_POLL = 0.25
_TRIES = 100
"""How often putting the handlers back may be interrupted by what those that are back raise."""
_IMPORTS = frozenset({"importlib._bootstrap", "importlib._bootstrap_external"})
_LIBRARIES = frozenset({"memplan", "torch", "contextlib", "numpy", "scipy", "sympy", "mpmath", "networkx", "triton"})
"""Packages in which nothing is raised: what they replace, or have half done, would stay so."""


class _Carried(BaseException):
    """What a handler raised, on its way through code that catches every `Exception`."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class _Signals:
    """Signals of this process while calls of memplan run in its main thread."""

    def __init__(self) -> None:
        self.queue: deque[int] = deque()
        """Signals that have arrived and whose handlers were not called yet."""
        self.handlers: dict[int, Handler] = {}
        """The user's handlers by signal, also after a call: code that reads `_handler` as the installed handler may
        install it again later."""
        self.outside: list[Callable[[], AbstractContextManager[Any]]] = []
        """Contexts to enter around a handler; see `outside_of`."""
        self.waits = 0
        """Number of `waiting` contexts that are entered."""
        self._installed: list[int] = []
        """Signals whose handlers are replaced now."""
        self._depth = self._spans = 0
        """Number of `deferred` contexts that are entered, and of those around the user's code."""
        self._process = 0
        """Id of the process in which the outermost call began: a forked child does not see its end."""
        self._since = 0.0
        """When the oldest signal in the queue arrived."""
        self._entry: FrameType | None = None
        """Frame that made the outermost call."""
        self._delivering = self._polling = False
        """Whether `deliver` is running, and whether a thread runs `_poll`."""
        self._woken: int | None = None
        """Signal that `_poll` sent to wake the main thread: it does not count as another arrival."""
        self._handler: Handler = self._on_signal
        """`_on_signal` as one object: each access to the method makes another, which ``is`` would not recognize."""

    @property
    def is_here(self) -> bool:
        """Return whether a call runs in this thread, which is the main thread of the process that made it: a process
        forked meanwhile is another."""
        return (
            self._depth > 0 and threading.get_ident() == threading.main_thread().ident and os.getpid() == self._process
        )

    def enter(self, entry: FrameType | None, *, span: bool) -> None:
        """Begin to note signals; within another call, which notes them already, only count.

        ``entry`` is the frame that made the call, ``span`` whether it is the user's code that runs within.
        """
        if os.getpid() != self._process:  # forked within a call, whose end this process does not see
            self._depth = self._spans = self.waits = 0
            self._polling = False
            self.queue.clear()
            self._process = os.getpid()
        if self._depth == 0:
            self._entry = entry
            self._depth = 1  # before `_install`: a handler that is installed notes signals from now on
            try:
                self._install()
            except BaseException:
                self._depth = 0
                self._restore_handlers()
                self._drain()
                raise
        else:
            self._depth += 1
        self._spans += span

    def leave(self, error: BaseException | None, *, span: bool) -> None:
        """End a call. At the end of the outermost call put the handlers back and pass on the signals that wait.

        ``error`` is the exception that the call ends with, ``span`` as for `enter`.
        """
        if os.getpid() != self._process or self._depth == 0:
            return
        self._spans -= span
        # only the main thread may set handlers
        if self._depth > 1 or threading.get_ident() != threading.main_thread().ident:
            self._depth -= 1
            return
        self._restore_handlers()
        self._depth, self._entry = 0, None
        self._drain()
        if isinstance(error, _Carried):
            raise error.error

    def deliver(self, frame: FrameType | None) -> None:
        """Call the user's handlers of all signals that wait, each within the contexts that undo memplan's changes.

        ``frame`` is passed to them as the interrupted frame. If the call has code of memplan's below the user's, what
        they raise is wrapped in a BaseException, which no ``except Exception`` on the way catches.
        """
        if self._delivering:
            return
        self._delivering = True
        try:
            while self.queue:
                handler = self.handlers[kind := self.queue.popleft()]
                self._since = time.monotonic()
                if handler is signal.default_int_handler:  # it raises, and looks at nothing
                    handler(kind, frame)
                with ExitStack() as outside:
                    for step_out in reversed(self.outside):
                        outside.enter_context(step_out())
                    handler(kind, frame)
        except Exception as error:
            if self._depth == self._spans:
                raise
            raise _Carried(error) from None
        finally:
            self._delivering = False

    def _install(self) -> None:
        """Replace every handler in Python by `_handler`, which notes the signal."""
        for kind in signal.valid_signals():
            handler = signal.getsignal(kind)
            if callable(handler) and handler is not self._handler:
                self.handlers[kind] = handler
                self._installed.append(kind)
                signal.signal(kind, self._handler)

    def _restore_handlers(self) -> None:
        """Install the user's handlers again, except where the user's code has set others meanwhile.

        A handler that is back already may be called in here and raise: the other handlers are installed all the same,
        and then the error is raised.
        """
        raised, tries = None, 0
        while self._installed and tries < _TRIES:
            try:
                kind = self._installed[-1]
                if signal.getsignal(kind) is self._handler:
                    signal.signal(kind, self.handlers[kind])
                self._installed.pop()
            except BaseException as error:
                raised, tries = error, tries + 1
        if raised is not None:
            self._depth, self._entry = 0, None
            self._drain()
            raise raised

    def _drain(self) -> None:
        """Call the handlers of all signals that wait. If a handler raises, those of the later signals are called before
        its error comes out."""
        while self.queue:
            kind = self.queue.popleft()
            try:
                self.handlers[kind](kind, sys._getframe())
            except BaseException:
                self._drain()
                raise

    def _on_signal(self, kind: int, frame: FrameType | None) -> None:
        """Handle a signal during a call: note it, and call the user's handler if it may raise in this frame."""
        if not self.is_here:
            self.handlers[kind](kind, frame)
            return
        if self._woken == kind:  # sent by `_poll` for a signal that is in the queue
            self._woken = None
        else:
            if not self.queue:
                self._since = time.monotonic()
            self.queue.append(kind)
            if not self._polling:
                self._polling = True
                _thread.start_new_thread(self._poll, ())  # not one of `threading`, whose threads a recording follows
        if self.queue and self._may_raise(frame):
            self.deliver(frame)

    def _poll(self) -> None:
        """Interrupt a main thread that blocks in C while a signal waits for more than `LONGEST` seconds.

        Runs in a thread of its own. It sends the signal again, so that `_on_signal` runs.
        """
        main = threading.main_thread().ident
        assert main is not None, "it runs"
        while self._depth:
            time.sleep(min(_POLL, LONGEST))
            if self.queue and self._woken is None and time.monotonic() - self._since > LONGEST:
                self._woken = self.queue[0]
                if hasattr(signal, "pthread_kill"):
                    signal.pthread_kill(main, self._woken)
                else:
                    signal.raise_signal(self._woken)
        self._polling = False

    def _may_raise(self, frame: FrameType | None) -> bool:
        """Return whether an exception may come out of a frame: in the user's code, while memplan waits for a process,
        or once a signal is overdue; never within an import or a ``__del__``."""
        overdue = time.monotonic() - self._since > LONGEST
        in_users_code = None  # until the innermost frame that is not of the standard library
        while frame is not None and frame is not self._entry:
            name = str(frame.f_globals.get("__name__"))
            if name in _IMPORTS or frame.f_code.co_name == "__del__":
                return False
            package = name.partition(".")[0]
            if in_users_code is None and (package in _LIBRARIES or package not in sys.stdlib_module_names):
                in_users_code = package not in _LIBRARIES and name != "None"
            frame = frame.f_back
        return overdue or self.waits > 0 or bool(in_users_code)


_signals = _Signals()


class deferred:
    """A context within which the handlers of signals are called at safe points only. It does nothing in other threads
    than the main thread.

    Args:
        span: whether the user's code runs in the context: it may catch what its own handlers raise.
    """

    def __init__(self, *, span: bool = False) -> None:
        self._span = span
        self._here = False
        """Whether it was entered in the main thread."""

    def __enter__(self) -> None:
        self._here = threading.get_ident() == threading.main_thread().ident
        if self._here:
            _signals.enter(sys._getframe().f_back, span=self._span)

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._here:
            _signals.leave(error, span=self._span)


def safe_point() -> None:
    """Call the handlers of the signals that wait; raises what they raise."""
    if _signals.queue and _signals.is_here:
        _signals.deliver(sys._getframe())


@contextmanager
def outside_of(step_out: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Within this context, enter ``step_out()`` around each call of a user's signal handler.

    ``step_out()`` undoes what memplan has replaced in torch, so that the handler runs as if memplan did not.
    """
    here = threading.get_ident() == threading.main_thread().ident
    if here:
        _signals.outside.append(step_out)
    try:
        yield
    finally:
        if here:
            _signals.outside.remove(step_out)


@contextmanager
def in_place_of(replace: Callable[[], None], put_back: Callable[[], None]) -> Iterator[None]:
    """Within this context something of the user's is replaced, except while a signal handler of the user's runs.

    For example, a handler that saves the model has to save the user's tensors.

    Args:
        replace: called when the context begins, and after each handler.
        put_back: called before each handler, and when the context ends.
    """

    @contextmanager
    def users_version() -> Iterator[None]:
        put_back()
        try:
            yield
        finally:
            replace()

    with outside_of(users_version):
        try:
            replace()
            yield
        finally:
            put_back()


@contextmanager
def waiting() -> Iterator[None]:
    """Within this context, in which memplan waits for another process, call signal handlers at once."""
    here = _signals.is_here
    _signals.waits += here
    try:
        safe_point()
        yield
    finally:
        _signals.waits -= here
