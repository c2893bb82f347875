"""Counts a recording's assumptions about unknown values and about the kernels that CUDA would choose."""

from __future__ import annotations

from memplan.errors import DataDependentError
from memplan.trace.recording.place import Line, format_frame, user_frame
from memplan.trace.records import Assumption

_MAX_READS = 100_000
"""More scalar reads than this at a line mean an endless loop."""
_SELECTS = "{op} SELECTS BY VALUE: {taken:,} of {most:,} are taken to be selected, {why}"
_COUNTED = "{op} is AS LARGE AS VALUES SAY: {taken:,} elements of {most:,} at most are taken, {why}"


class Assumed:
    """Counts assumptions by kind, text and user line."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, Line | None], int] = {}
        """Number of times by (kind, text, line)."""

    def add(self, kind: str, text: str, line: Line | None = None) -> None:
        """Count an assumption at a line, by default the user's current line. Raises DataDependentError if the
        assumption was made so often at this line that the step must be in an endless loop."""
        key = (kind, text, line or user_frame())
        self._counts[key] = self._counts.get(key, 0) + 1
        if self._counts[key] > _MAX_READS:
            raise DataDependentError(
                f"a value was read {_MAX_READS} times at one line, most likely by a loop that its stand-in never ends",
                expected="a loop that ends after a number of rounds known from shapes",
                do="Run memplan.measure(build) instead: it really runs the step",
                where=format_frame(key[2]),
            )

    def rows(self) -> tuple[Assumption, ...]:
        """Return the assumptions: branches and bounds first, then in the order of their first use."""
        rows = [
            Assumption(kind, text, format_frame(frame), count)  # pyright: ignore[reportArgumentType]  # kinds below
            for (kind, text, frame), count in self._counts.items()
        ]
        return tuple(sorted(rows, key=lambda row: row.kind not in ("branch", "bound")))

    def kernel_chosen(self, op: str, reason: str) -> None:
        """Count an op for which CUDA has several kernels, with the reason for the assumed choice."""
        self.add("kernel", f"{op}: {reason}")

    def selected(self, op: str, size: int, most: int, *, known: bool, counted: bool) -> None:
        """Count an op whose result size depends on values.

        Args:
            op: its name.
            size: assumed number of elements.
            most: largest possible number of elements.
            known: whether ``size`` was inferred from other shapes.
            counted: whether the values of an operand are sizes, as in `repeat_interleave`, instead of selecting
                elements.
        """
        why = "as the shapes beside it say" if known else "as was assumed"
        if size == most:
            why = "the most there can be"
        form = _COUNTED if counted else _SELECTS
        self.add("bound", form.format(op=op.removeprefix("_"), taken=size, most=most, why=why))
