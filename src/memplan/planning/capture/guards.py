"""Guards: flags that forward() reads only to raise, as ``if not valid.all(): raise``. A planned step computes them too,
and where one says otherwise than when it was planned, the model runs as it is written, and raises its own exception."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from memplan import _torch
from memplan.trace.recording.place import Line, format_frame, raised_by_statement, user_frame

_MOST = 32
"""Flags at most that are tried the other way: each takes a forward pass."""


@dataclass(frozen=True)
class Guard:
    """A flag that forward() reads, and the answer with which it goes on."""

    answer: bool
    where: str | None
    """``file:line`` of the user's code."""


@dataclass(frozen=True)
class _Seen:
    """A flag that a real run read."""

    line: Line | None
    answer: bool
    is_guard: bool
    """Whether the other answer ends in a ``raise`` or an ``assert``."""


class Guards:
    """Answers to the flags that are read while a model is traced, in the order in which a real run reads them.

    A real run with the other answer really runs what is behind the flag, up to its ``raise``: a message that is logged
    there is logged.
    """

    def __init__(self) -> None:
        self.found: list[Guard] = []
        """Guards of the last trace."""
        self.flags: list[torch.Tensor] = []
        """Their values in it."""
        self._seen: tuple[_Seen, ...] | None = None
        self._next = 0

    def learn(self, run: Callable[[], Any]) -> bool:
        """Run the model as it is, and again with the other answer to each flag. Return whether a guard is known now
        that was not before."""
        if self._seen is not None:
            return False
        reads = _reads(run)
        self._seen = tuple(
            _Seen(line, answer, at < _MOST and _ends_in_raise(run, at)) for at, (line, answer) in enumerate(reads)
        )
        return any(one.is_guard for one in self._seen)

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Answer the reads of guards in this context. It is entered for each pass of the trace."""
        self.found, self.flags, self._next = [], [], 0
        with _answered_by(self._answered):
            yield

    def _answered(self, flag: torch.Tensor, read: Callable[[], bool]) -> bool:
        at, self._next = self._next, self._next + 1
        try:
            return read()
        except _torch.DATA_DEPENDENT:
            line = user_frame()
            seen = self._seen[at] if self._seen and at < len(self._seen) else None
            if seen is None or not seen.is_guard or seen.line != line:
                raise
        self.flags.append(flag)
        self.found.append(Guard(seen.answer, format_frame(line)))
        return seen.answer


@contextmanager
def _answered_by(answer: Callable[[torch.Tensor, Callable[[], bool]], bool]) -> Iterator[None]:
    """Hand each read of a single flag in this thread to a function, with the read itself.

    The methods are replaced, since a mode does not see what torch's own functions read.
    """

    inside = False

    def read_by(method: Callable[[torch.Tensor], Any]) -> Callable[..., Any]:
        def read(tensor: torch.Tensor) -> Any:
            nonlocal inside
            if inside or tensor.dtype != torch.bool:  # a read of a traced tensor reads what is in it
                return method(tensor)
            inside = True
            try:
                return answer(tensor, lambda: method(tensor))
            finally:
                inside = False

        return _torch.here_alone(read, method)

    reads = {name: read_by(getattr(torch.Tensor, name)) for name in ("__bool__", "item")}
    with _torch.patched(torch.Tensor, **reads):
        yield


def _reads(run: Callable[[], Any], other: int | None = None) -> list[tuple[Line | None, bool]]:
    """Run, and return where each flag was read and what it was; one of them is answered the other way."""
    found: list[tuple[Line | None, bool]] = []

    def answered(flag: torch.Tensor, read: Callable[[], bool]) -> bool:
        answer = read()
        found.append((user_frame(), answer))
        return answer if len(found) - 1 != other else not answer

    with _answered_by(answered):
        run()
    return found


def _ends_in_raise(run: Callable[[], Any], other: int) -> bool:
    try:
        _reads(run, other)
    except (Exception, SystemExit) as error:
        return isinstance(error, SystemExit) or raised_by_statement(error)
    return False
