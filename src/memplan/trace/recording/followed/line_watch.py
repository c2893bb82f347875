"""Which line of chosen functions runs, on a clock: the functions that `memplan.profile` decorates, and those asked for.

It is Python's own tracing (`sys.settrace`) of the thread that records; what a function calls, a module's forward or a
backward pass, happens while the line that calls it runs.
"""

from __future__ import annotations

import ast
import dis
import inspect
import linecache
import os
import sys
import textwrap
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
    """Functions of a file: one by its name, or all of them and the file's own lines."""

    file: str
    """Absolute path, without links."""
    function: str | None = None
    """``name`` or ``Class.name``."""

    def has(self, code: CodeType, path: str) -> bool:
        """Return whether code of a file is among them."""
        if path != self.file:
            return False
        if self.function is None:  # comprehensions and lambdas belong to the line around them, classes run no step
            own = not code.co_name.startswith("<") and code.co_flags & inspect.CO_OPTIMIZED
            return code.co_name == _MODULE or bool(own)
        return self.function in (code.co_name, code.co_qualname.replace(".<locals>", ""))


class _Watched:
    """A function that is followed."""

    def __init__(self, code: CodeType) -> None:
        self._code = code
        self._first_of = _statements(code.co_filename)
        self.spans: dict[tuple[int, int, int, bool], int] = {}
        """(line, start, end, cut) -> hits: a loop that allocates nothing takes one entry a line."""

    def line(self, number: int | None) -> int:
        """Return the first line of the statement that a line is part of."""
        return self._first_of.get(number or 0, number or 0)

    def is_long(self, line: int) -> bool:
        """Return whether the statement that begins at a line goes on behind it."""
        return line in self._first_of

    def add(self, line: int, start: int, end: int, hits: int, *, cut: bool) -> None:
        """Note that a line ran."""
        key = line, start, end, cut
        self.spans[key] = self.spans.get(key, 0) + hits

    def row(self) -> FunctionLines:
        """Return it as data."""
        code = self._code
        numbers = sorted({line for *_, line in code.co_lines() if line})
        if code.co_name != _MODULE:
            numbers = list(range(code.co_firstlineno, max([*numbers, *_last_lines(code)]) + 1))
        text = textwrap.dedent("".join(linecache.getline(code.co_filename, number) or "\n" for number in numbers))
        source = tuple(zip(numbers, map(str.rstrip, text.splitlines()), strict=True))
        file = (format_frame((code.co_filename, 0)) or "").rpartition(":")[0]
        spans = tuple(LineSpan(line, start, end, hits, cut) for (line, start, end, cut), hits in self.spans.items())
        return FunctionLines(code.co_qualname.replace(".<locals>", ""), file, source, spans)


def _last_lines(code: CodeType) -> Iterator[int]:
    """Yield the last line of each function within a function."""
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from (line for *_, line in part.co_lines() if line)
            yield from _last_lines(part)


def _statements(file: str) -> dict[int, int]:
    """Return the first line by each line of statements, and of heads of blocks, that take several."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):  # a notebook's cell with magics
        return {}
    first: dict[int, int] = {}
    for node in ast.walk(tree):  # what is inside comes later
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
            if last > node.lineno:
                first.update(dict.fromkeys(range(node.lineno, last + 1), node.lineno))
    return first


class _Running(NamedTuple):
    """A line that runs."""

    function: _Watched
    line: int
    start: int
    hits: int


@dataclass
class LineWatch:
    """Notes when lines of chosen functions begin and end, on a clock that never goes back."""

    clock: Callable[[], int]
    _open: dict[int, _Running] = field(default_factory=dict)
    """By id() of a frame: the line that it runs."""
    _watched: dict[CodeType, _Watched | None] = field(default_factory=dict)
    _before: Any = None
    _tracing: bool = False

    def start(self) -> None:
        """Follow what this thread calls from now on."""
        if not self._tracing:
            self._tracing, self._before = True, sys.gettrace()
            sys.settrace(self._called)

    def stop(self) -> None:
        """Follow nothing more; what runs ends now."""
        if self._tracing:
            self._tracing = False
            sys.settrace(self._before)
        now = self.clock() if self._open else 0
        for frame in list(self._open):
            self._close(frame, now, cut=True)

    def rows(self) -> tuple[FunctionLines, ...]:
        """Return the functions that ran, in the order of their first lines. Call it once it is stopped."""
        return tuple(one.row() for one in self._watched.values() if one is not None and one.spans)

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if code not in self._watched:
            self._watched[code] = _Watched(code) if _is_followed(code) else None
        watched = self._watched[code]
        if watched is None or not self._tracing:
            return None
        if _goes_on(frame):
            self._open[id(frame)] = _Running(watched, watched.line(frame.f_lineno), self.clock(), 0)
        return self._ran

    def _ran(self, frame: FrameType, event: str, argument: Any) -> Any:
        watched = self._watched[frame.f_code]
        if watched is None or not self._tracing:
            return None
        last = self._open.get(id(frame))
        if event == "line":
            line = watched.line(frame.f_lineno)
            if last is None or last.line != line or not watched.is_long(line):
                now = self.clock()
                self._close(id(frame), now)
                self._open[id(frame)] = _Running(watched, line, now, 1)
        elif event == "return" and last is not None:  # also where it yields, or an exception leaves it
            self._close(id(frame), self.clock())
        return self._ran

    def _close(self, frame: int, now: int, *, cut: bool = False) -> None:
        last = self._open.pop(frame, None)
        if last is not None:
            last.function.add(last.line, last.start, now, last.hits, cut=cut)


def _goes_on(frame: FrameType) -> bool:
    """Return whether a generator or coroutine goes on where it had stopped: RESUME's argument says so."""
    code, at = frame.f_code.co_code, frame.f_lasti
    return at >= 0 and dis.opname[code[at]] == "RESUME" and code[at + 1] & 3 > 0


_decorated: set[CodeType] = set()
_asked: list[Followed] = []
_asked_codes: list[CodeType] = []
_watches: list[LineWatch | None] = []


def decorate(code: CodeType) -> None:
    """Follow a function wherever lines are watched."""
    _decorated.add(code)
    if _watches and _watches[-1] is not None:
        _watches[-1].start()


def code_of(function: Any, what: str) -> CodeType:
    """Return the code of a function, a method, or what decorators made of one; ``what`` names it in an error.

    Raises:
        InputError: it is no function written in Python.
    """
    found = inspect.unwrap(getattr(function, "__func__", function)) if callable(function) else None
    code = getattr(found, "__code__", None)
    if not isinstance(code, CodeType):
        raise InputError(
            f"{what}: {function!r:.60}",
            expected="a function or a method written in Python",
            do="Name one, such as the model's forward",
        )
    return code


@contextmanager
def following(asked: Sequence[Followed], codes: Sequence[CodeType] = ()) -> Iterator[None]:
    """Follow these, too, in here."""
    _asked.extend(asked)
    _asked_codes.extend(codes)
    try:
        yield
    finally:
        del _asked[len(_asked) - len(asked) :]
        del _asked_codes[len(_asked_codes) - len(codes) :]


@contextmanager
def watching(clock: Callable[[], int]) -> Iterator[LineWatch]:
    """Watch the lines of what is followed."""
    watch = LineWatch(clock)
    _watches.append(watch)
    if _decorated or _asked or _asked_codes:
        watch.start()
    try:
        yield watch
    finally:
        _forget(watch)
        watch.stop()


@contextmanager
def unwatched() -> Iterator[None]:
    """Run something of which no lines are watched, neither here nor by a decorated function itself."""
    _watches.append(None)
    try:
        yield
    finally:
        _forget(None)


def _forget(watch: LineWatch | None) -> None:
    """Take the last entry of a watch away, which need not be the last of all: another thread may have added one."""
    at = max(at for at, one in enumerate(_watches) if one is watch)
    del _watches[at]


def is_watched() -> bool:
    """Return whether it is settled by whom lines are watched: a decorated function has nothing to do then."""
    return bool(_watches)


def _is_followed(code: CodeType) -> bool:
    if code in _decorated or code in _asked_codes:
        return True
    path = os.path.realpath(code.co_filename) if _asked else ""
    return any(one.has(code, path) for one in _asked)
