"""Records when each line of a followed function runs: functions that `memplan.profile` decorates, and requested ones.

The recording thread is traced by `sys.settrace`. Calls from a line, such as a module's forward, belong to that line.
"""

from __future__ import annotations

import ast
import dis
import inspect
import linecache
import os
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, NamedTuple

from memplan.errors import InputError
from memplan.trace.recording.place import format_frame
from memplan.trace.records import FunctionLines, LineSpan

_MODULE = "<module>"


@dataclass(frozen=True)
class Followed:
    """A function of a file, or all of the file's functions and its module-level lines."""

    file: str
    """Absolute path, without links."""
    function: str | None = None
    """``name`` or ``Class.name``."""

    def has(self, code: CodeType, path: str) -> bool:
        """Return whether ``code``, from the file ``path``, is followed."""
        if path != self.file:
            return False
        if self.function is None:  # comprehensions and lambdas belong to the enclosing line; class bodies run no step
            is_function = not code.co_name.startswith("<") and code.co_flags & inspect.CO_OPTIMIZED
            return code.co_name == _MODULE or bool(is_function)
        return self.function in (code.co_name, code.co_qualname.replace(".<locals>", ""))


class _FollowedFunction:
    """A followed function, with the spans of its lines."""

    def __init__(self, code: CodeType) -> None:
        """``code``: of the function, or of a module."""
        self._code = code
        self._first_of = _first_lines_of_statements(code.co_filename)
        """Line of a statement with several lines -> its first line."""
        self.spans: dict[tuple[int, int, int, bool], int] = {}
        """(line, start tick, end tick, whether the watch ended within it) -> how often it ran: iterations without
        allocations share an entry."""

    def line(self, number: int | None) -> int:
        """Return the first line of the statement that contains line ``number``."""
        return self._first_of.get(number or 0, number or 0)

    def is_long(self, line: int) -> bool:
        """Return whether the statement that begins at a line has several lines."""
        return line in self._first_of

    def add(self, line: int, start: int, end: int, hits: int, *, cut: bool) -> None:
        """Add a span of a line from tick ``start`` to ``end``. ``hits``: 1, or 0 where the line resumes; ``cut``:
        whether the watch ended within it."""
        key = line, start, end, cut
        self.spans[key] = self.spans.get(key, 0) + hits

    def row(self) -> FunctionLines:
        """Return the function's source and spans as a record. Of a module, the source is the lines with code."""
        code = self._code
        numbers = sorted({line for *_, line in code.co_lines() if line})
        if code.co_name != _MODULE:
            numbers = list(range(code.co_firstlineno, max([*numbers, *_nested_lines(code)]) + 1))
        text = textwrap.dedent("".join(linecache.getline(code.co_filename, number) or "\n" for number in numbers))
        source = tuple(zip(numbers, map(str.rstrip, text.splitlines()), strict=True))
        file = (format_frame((code.co_filename, 0)) or "").rpartition(":")[0]
        spans = tuple(LineSpan(line, start, end, hits, cut) for (line, start, end, cut), hits in self.spans.items())
        return FunctionLines(code.co_qualname.replace(".<locals>", ""), file, source, spans)


def _nested_lines(code: CodeType) -> Iterator[int]:
    """Yield the lines of functions nested in ``code``."""
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from (line for *_, line in part.co_lines() if line)
            yield from _nested_lines(part)


def _first_lines_of_statements(file: str) -> dict[int, int]:
    """Return line -> first line, for the lines of statements and block headers that span several lines."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):  # a notebook's cell with magics
        return {}
    first: dict[int, int] = {}
    for node in ast.walk(tree):  # nested statements come later and overwrite
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)  # a block's header ends before it
            last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
            if last > node.lineno:
                first.update(dict.fromkeys(range(node.lineno, last + 1), node.lineno))
    return first


class _RunningLine(NamedTuple):
    """The line that a frame is running."""

    function: _FollowedFunction
    line: int
    start: int
    """Time of the clock when it began."""
    hits: int
    """How often it has begun."""


@dataclass
class LineWatch:
    """Records when lines of followed functions begin and end, on a monotonic clock."""

    clock: Callable[[], int]
    _open: dict[int, _RunningLine] = field(default_factory=dict)
    """id() of a frame -> the line that it is running."""
    _watched: dict[CodeType, _FollowedFunction | None] = field(default_factory=dict)
    """By code that has run: its function if that is followed, else None."""
    _previous: Any = None
    """Trace function to restore."""
    _tracing: bool = False
    _thread: int = field(default_factory=threading.get_ident)

    def start(self) -> None:
        """Start tracing the thread that constructed this watch; on another thread, do nothing."""
        if not self._tracing and threading.get_ident() == self._thread:
            self._tracing, self._previous = True, sys.gettrace()
            sys.settrace(self._trace_call)

    def stop(self) -> None:
        """Stop tracing, and end the spans of running lines."""
        if self._tracing:
            self._tracing = False
            sys.settrace(self._previous)
        now = self.clock() if self._open else 0
        for frame in list(self._open):
            self._end_span(frame, now, cut=True)

    def rows(self) -> tuple[FunctionLines, ...]:
        """Return the functions that ran, in the order of their first calls. To be called after `stop`."""
        return tuple(watched.row() for watched in self._watched.values() if watched is not None and watched.spans)

    def _trace_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Trace function of `sys.settrace` for calls: returns `_trace_line` for a followed function, else None."""
        code = frame.f_code
        if code not in self._watched:
            self._watched[code] = _FollowedFunction(code) if _is_followed(code) else None
        watched = self._watched[code]
        if watched is None or not self._tracing:
            return None
        if _resumes(frame):
            self._open[id(frame)] = _RunningLine(watched, watched.line(frame.f_lineno), self.clock(), hits=0)
        return self._trace_line

    def _trace_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Trace function within a followed function: a new line or a return ends the span of the previous line."""
        watched = self._watched[frame.f_code]
        if watched is None or not self._tracing:
            return None
        last = self._open.get(id(frame))
        if event == "line":
            line = watched.line(frame.f_lineno)
            if last is None or last.line != line or not watched.is_long(line):
                now = self.clock()
                self._end_span(id(frame), now)
                self._open[id(frame)] = _RunningLine(watched, line, now, hits=1)
        elif event == "return" and last is not None:  # also on yield, or on an exception
            self._end_span(id(frame), self.clock())
        return self._trace_line

    def _end_span(self, frame: int, now: int, *, cut: bool = False) -> None:
        """End the span of the line that a frame (its id()) is running, if any. ``cut``: see `LineSpan.cut`."""
        last = self._open.pop(frame, None)
        if last is not None:
            last.function.add(last.line, last.start, now, last.hits, cut=cut)


def _resumes(frame: FrameType) -> bool:
    """Return whether a call event is a generator or coroutine that resumes after a yield or await.

    Then its instruction is a RESUME whose argument has low bits other than 0, which mean the start of a function.
    """
    code, at = frame.f_code.co_code, frame.f_lasti
    return at >= 0 and dis.opname[code[at]] == "RESUME" and code[at + 1] & 3 != 0


_decorated: set[CodeType] = set()
_requested: list[Followed] = []
_requested_codes: list[CodeType] = []
_watches: list[LineWatch | None] = []


def decorate(code: CodeType) -> None:
    """Follow a function in every `watching` context in which `start_watch` has been called."""
    _decorated.add(code)


def start_watch() -> None:
    """Start the innermost `watching` context: a decorated function is about to run.

    Tracing every Python call doubles the time of a recording, so a recording is traced only from the first call of a
    decorated function on.
    """
    watch = _watches[-1] if _watches else None
    if watch is not None:
        watch.start()


def code_of(function: Any, what: str) -> CodeType:
    """Return the code of a function or method, unwrapping decorators. ``what`` names it in an error. Raises InputError
    if ``function`` is not written in Python."""
    unwrapped = inspect.unwrap(getattr(function, "__func__", function)) if callable(function) else None
    code = getattr(unwrapped, "__code__", None)
    if not isinstance(code, CodeType):
        raise InputError(
            f"{what}: {function!r:.60}",
            expected="a function or a method written in Python",
            do="Name one, such as the model's forward",
        )
    return code


@contextmanager
def following(functions: Sequence[Followed], codes: Sequence[CodeType] = ()) -> Iterator[None]:
    """Within this context, line watches also record the lines of these functions and code objects."""
    _requested.extend(functions)
    _requested_codes.extend(codes)
    try:
        yield
    finally:
        del _requested[len(_requested) - len(functions) :]
        del _requested_codes[len(_requested_codes) - len(codes) :]


@contextmanager
def watching(clock: Callable[[], int]) -> Iterator[LineWatch]:
    """Within this context, record the lines of requested functions on ``clock``, and of decorated ones that run."""
    watch = LineWatch(clock)
    _watches.append(watch)
    if _requested or _requested_codes:
        watch.start()
    try:
        yield watch
    finally:
        _forget(watch)
        watch.stop()


@contextmanager
def unwatched() -> Iterator[None]:
    """Within this context, record no lines; a call of a decorated function starts no watch either."""
    _watches.append(None)
    try:
        yield
    finally:
        _forget(None)


def _forget(watch: LineWatch | None) -> None:
    """Remove the last occurrence of ``watch`` from the stack, above which another thread may have pushed a watch."""
    del _watches[max(at for at, other in enumerate(_watches) if other is watch)]


def is_watched() -> bool:
    """Return whether a `watching` or `unwatched` context is active, in which a decorated function starts no watch."""
    return bool(_watches)


def _is_followed(code: CodeType) -> bool:
    """Return whether `memplan.profile` decorates a function, or `following` requests its lines."""
    if code in _decorated or code in _requested_codes:
        return True
    path = os.path.realpath(code.co_filename) if _requested else ""
    return any(followed.has(code, path) for followed in _requested)
