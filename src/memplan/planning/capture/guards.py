"""Guards: flags that forward() reads only to raise, as in ``if not valid.all(): raise``.

A planned step computes the flags, too. If one differs from the plan, the model runs unplanned and raises its own
exception.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from memplan import _torch
from memplan.trace.recording.place import Line, format_frame, raised_by_statement, user_frame

_MOST = 32
"""Most flags whose other answer is tried, each in a forward pass."""


@dataclass(frozen=True)
class Guard:
    """A flag that forward() reads, and the answer for which it does not raise."""

    answer: bool
    where: str | None
    """``file:line`` of the user's code."""


@dataclass(frozen=True)
class _Seen:
    """A flag that a real run read."""

    line: Line | None
    answer: bool
    is_guard: bool
    """Whether the other answer leads to a ``raise`` or an ``assert``."""


class Guards:
    """Answers the flags that a traced model reads, in the order in which a real run reads them.

    To recognize guards the model runs with the other answer, too: side effects before its ``raise`` happen.
    """

    def __init__(self) -> None:
        self.guards: list[Guard] = []
        """Guards of the last trace."""
        self.flags: list[torch.Tensor] = []
        """Their values in the last trace."""
        self._seen: tuple[_Seen, ...] | None = None
        self._next = 0

    def learn(self, run: Callable[[], Any]) -> bool:
        """Run the model, and again with the other answer to each flag. Return whether new guards were recognized."""
        if self._seen is not None:
            return False
        reads = enumerate(_reads(run))
        self._seen = tuple(_Seen(line, flag, at < _MOST and _ends_in_raise(run, at)) for at, (line, flag) in reads)
        return any(seen.is_guard for seen in self._seen)

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Answer the reads of guards within this context, for one pass of the trace."""
        self.guards, self.flags, self._next = [], [], 0
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
        self.guards.append(Guard(seen.answer, format_frame(line)))
        return seen.answer


@contextmanager
def _answered_by(answer: Callable[[torch.Tensor, Callable[[], bool]], bool]) -> Iterator[None]:
    """Call ``answer(flag, read)`` for each read of a boolean scalar in this thread.

    The methods are patched, since a mode does not see the reads of torch's own functions.
    """
    inside = False

    def read_by(method: Callable[[torch.Tensor], Any]) -> Callable[..., Any]:
        def read(tensor: torch.Tensor) -> Any:
            nonlocal inside
            if inside or tensor.dtype != torch.bool:  # a traced tensor reads the tensor that it wraps
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
    """Run, and return (line, value) of each read of a flag. ``other``: index of the flag to negate."""
    reads: list[tuple[Line | None, bool]] = []

    def answered(flag: torch.Tensor, read: Callable[[], bool]) -> bool:
        answer = read()
        reads.append((user_frame(), answer))
        return answer if len(reads) - 1 != other else not answer

    with _answered_by(answered):
        run()
    return reads


def _ends_in_raise(run: Callable[[], Any], other: int) -> bool:
    try:
        _reads(run, other)
    except (Exception, SystemExit) as error:
        return isinstance(error, SystemExit) or raised_by_statement(error)
    return False
