"""See that what a step reads is the same in each pass of a capture, and that it can be compared in later calls."""

from __future__ import annotations

import weakref

from torch import nn

from memplan.errors import RecordingError
from memplan.planning.capture.reads.executed import Executed
from memplan.planning.capture.reads.readable import Readable, Reads
from memplan.planning.capture.reads.walk import Found, recipe_of


class Passes:
    """What forward() can have read in each pass of a capture, which runs it more than once."""

    def __init__(self, model: nn.Module, executed: Executed) -> None:
        self.executed = executed
        self._model = model
        self._readable: Readable | None = None
        self._first: Found | None = None
        self._changing: list[str] = []

    def ended(self) -> None:
        """Note that a pass has ended."""
        with self.executed.pause():
            if self._first is None or self._readable is None:
                self._readable = Readable(self._model, recipe_of(self.executed))
                self._first = self._readable.now()
            else:
                self._changing = self._changing or self._first.differing(self._readable.now())

    def refuse(self) -> None:
        """Raise RecordingError where what was read is not the same in the next call, or cannot be compared."""
        if self.executed.outside is not None:
            does, where = self.executed.outside
            raise RecordingError(
                f"forward() {does}: a planned step would not do that again",
                expected="code that reads its arguments, attributes and globals",
                do="Do that outside of forward(), and pass what comes out as an input",
                where=where,
            )
        if self._changing:
            raise RecordingError(
                f"forward() changes what it reads: the {self._changing[0]}",
                expected="the same values in each call: a planned step does not run forward() again",
                do="Keep what changes in a buffer (register_buffer(), changed in place), or change it outside of "
                "forward()",
            )
        unseen = self.reads().found.unseen
        if unseen:
            raise RecordingError(
                f"forward() reads {unseen[0]}",
                expected="values that can be compared before each planned call",
                do="Read it outside of forward(), and pass what comes out as an input",
            )

    def reads(self) -> Reads:
        """Return what was read, and its present values."""
        return Reads(Readable(self._model, recipe_of(self.executed)), late=self.executed.reads_late)


_of_errors: weakref.WeakKeyDictionary[BaseException, Reads] = weakref.WeakKeyDictionary()


def note_reads(error: BaseException, reads: Reads) -> None:
    """Note what had been read when a capture failed."""
    _of_errors[error] = reads


def reads_of(error: BaseException) -> Reads | None:
    """Return what had been read when the capture failed that an error is about; None where that is not known."""
    seen: BaseException | None = error
    while seen is not None:
        if seen in _of_errors:
            return _of_errors[seen]
        seen = seen.__cause__
    return None
