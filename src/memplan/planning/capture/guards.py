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

_MAX_FLAGS = 32
"""Most flags whose other answer is tried, each in a forward pass."""


@dataclass(frozen=True)
class Guard:
    """A flag that forward() reads, and the answer for which it does not raise."""

    answer: bool
    where: str | None
    """``file:line`` of the user's code."""


@dataclass(frozen=True)
class _FlagRead:
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
        """The flags of the last trace that are read only to raise, in order of their reads, with the answers for which
        forward() goes on."""
        self.flags: list[torch.Tensor] = []
        """The traced boolean tensor that each of ``guards`` read."""
        self._real_reads: tuple[_FlagRead, ...] | None = None
        """All flags that forward() reads in order, by the run with real data in `learn`; None before it."""
        self._flags_read = 0
        """How many flags the current trace has read: index into ``_real_reads``."""

    def learn(self, run: Callable[[], Any]) -> bool:
        """Run the model, then again for each flag with its answer negated, to see which flags lead to a ``raise``.

        Returns whether there are such flags, so that a trace with them as guards may succeed; False in later calls.
        """
        if self._real_reads is not None:
            return False
        self._real_reads = tuple(
            _FlagRead(line, answer, index < _MAX_FLAGS and _ends_in_raise(run, index))
            for index, (line, answer) in enumerate(_run_and_log_reads(run))
        )
        return any(read.is_guard for read in self._real_reads)

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Within this context, a pass of the trace, flags that are guards have the values of the real run."""
        self.guards, self.flags, self._flags_read = [], [], 0
        with _intercepting_flag_reads(self._answer):
            yield

    def _answer(self, flag: torch.Tensor, read: Callable[[], bool]) -> bool:
        """Return the value of a flag that the model reads; ``read()`` reads it.

        A traced tensor has no value. If the same read in the real run is a guard, the value there is returned and the
        guard is recorded. Otherwise torch's error ends the trace.
        """
        index, self._flags_read = self._flags_read, self._flags_read + 1
        try:
            return read()
        except _torch.DATA_DEPENDENT:
            line = user_frame()
            real_read = self._real_reads[index] if self._real_reads and index < len(self._real_reads) else None
            if real_read is None or not real_read.is_guard or real_read.line != line:
                raise
        self.flags.append(flag)
        self.guards.append(Guard(real_read.answer, format_frame(line)))
        return real_read.answer


@contextmanager
def _intercepting_flag_reads(answer: Callable[[torch.Tensor, Callable[[], bool]], bool]) -> Iterator[None]:
    """Within this context, each read of a boolean scalar in this thread returns ``answer(flag, read)``; ``read()``
    returns the real value. Methods of Tensor are patched: a mode does not see the reads of torch's own functions."""
    in_read = False

    def intercepting(method: Callable[[torch.Tensor], Any]) -> Callable[..., Any]:
        """Return the replacement of a method of Tensor that reads a scalar."""

        def read(tensor: torch.Tensor) -> Any:
            """Read a scalar; a flag by ``answer``, which may read it by the original method."""
            nonlocal in_read
            # in_read: a read within a read, as a traced tensor reads the tensor that it wraps
            if in_read or tensor.dtype != torch.bool:
                return method(tensor)
            in_read = True
            try:
                return answer(tensor, lambda: method(tensor))
            finally:
                in_read = False

        return _torch.only_in_this_thread(read, method)

    replacements = {name: intercepting(getattr(torch.Tensor, name)) for name in ("__bool__", "item")}
    with _torch.patched(torch.Tensor, **replacements):
        yield


def _run_and_log_reads(run: Callable[[], Any], negated: int | None = None) -> list[tuple[Line | None, bool]]:
    """Call ``run()``, and return (line, value) of each read of a flag. ``negated``: index of the read that returns the
    opposite value."""
    reads: list[tuple[Line | None, bool]] = []

    def log_read(flag: torch.Tensor, read: Callable[[], bool]) -> bool:
        """Log the read of a flag with its line. Returns its value, or the opposite for the read to negate."""
        answer, index = read(), len(reads)
        reads.append((user_frame(), answer))
        return not answer if index == negated else answer

    with _intercepting_flag_reads(log_read):
        run()
    return reads


def _ends_in_raise(run: Callable[[], Any], negated: int) -> bool:
    """Return whether ``run()`` raises by a ``raise`` or ``assert`` statement, or exits, if the read of a flag at the
    index ``negated`` returns the opposite value."""
    try:
        _run_and_log_reads(run, negated)
    except (Exception, SystemExit) as error:
        return isinstance(error, SystemExit) or raised_by_statement(error)
    return False
