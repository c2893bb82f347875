"""Check that a step reads the same values in each pass of a capture, and that later calls can compare them."""

from __future__ import annotations

import weakref

from torch import nn

from memplan.errors import RecordingError
from memplan.planning.capture.reads.executed import Executed
from memplan.planning.capture.reads.readable import Readable, Reads
from memplan.planning.capture.reads.walk import Snapshot, recipe_of


class Passes:
    """Values that forward() reads in each pass of a capture: tracing runs it more than once."""

    def __init__(self, model: nn.Module, executed: Executed) -> None:
        self.executed = executed
        self._model = model
        self._readable: Readable | None = None
        """Reads the values that the code of the first pass names; None before the end of that pass."""
        self._first_snapshot: Snapshot | None = None
        """Values after the first pass."""
        self._changed_reads: list[str] = []
        """Names of values that changed since then."""

    def end_pass(self) -> None:
        """Compare the values that the code reads with those of the first pass, and note the ones that changed."""
        with self.executed.pause():
            if self._first_snapshot is None or self._readable is None:
                self._readable = Readable(self._model, recipe_of(self.executed))
                self._first_snapshot = self._readable.take_snapshot()
            elif not self._changed_reads:
                self._changed_reads = self._first_snapshot.differences(self._readable.take_snapshot())

    def refuse(self) -> None:
        """Raise RecordingError if values change with each call or cannot be compared."""
        if self.executed.external_effect is not None:
            does, where = self.executed.external_effect
            raise RecordingError(
                f"forward() {does}: a planned step would not do that again",
                expected="code that reads its arguments, attributes and globals",
                do="Do that outside of forward(), and pass what comes out as an input",
                where=where,
            )
        if self._changed_reads:
            raise RecordingError(
                f"forward() changes what it reads: the {self._changed_reads[0]}",
                expected="the same values in each call: a planned step does not run forward() again",
                do="Keep what changes in a buffer (register_buffer(), changed in place), or change it outside of "
                "forward()",
            )
        unseen = self.reads().snapshot.unseen
        if unseen:
            raise RecordingError(
                f"forward() reads {unseen[0]}",
                expected="values that can be compared before each planned call",
                do="Read it outside of forward(), and pass what comes out as an input",
            )

    def reads(self) -> Reads:
        """Return guards on the values that were read."""
        readable = Readable(self._model, recipe_of(self.executed))
        return Reads(readable, read_in_backward=self.executed.backward_reads_state)


_reads_by_error: weakref.WeakKeyDictionary[BaseException, Reads] = weakref.WeakKeyDictionary()


def note_reads(error: BaseException, reads: Reads) -> None:
    """Attach the values that a failed capture had read to its error."""
    _reads_by_error[error] = reads


def reads_of(error: BaseException) -> Reads | None:
    """Return the values attached to an error or to one of its causes, else None."""
    cause: BaseException | None = error
    while cause is not None and cause not in _reads_by_error:
        cause = cause.__cause__
    return None if cause is None else _reads_by_error[cause]
