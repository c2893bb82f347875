"""What a recording takes for granted of values and kernels that it does not know."""

from __future__ import annotations

from memplan.errors import DataDependentError
from memplan.trace.recording.place import Line, format_frame, user_frame
from memplan.trace.records import Assumption

_ENDLESS = 100_000
"""Reads of a value at one line after which the step is taken for a loop without end."""
_SELECTS = "{op} SELECTS BY VALUE: {taken:,} of {most:,} are taken to be selected, {why}"
_COUNTED = "{op} is AS LARGE AS VALUES SAY: {taken:,} elements of {most:,} at most are taken, {why}"


class Assumed:
    """Assumptions by kind, text and line of the user's, each counted."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, Line | None], int] = {}

    def add(self, kind: str, text: str, line: Line | None = None) -> None:
        """Count an assumption, made at a line or where the user's code is.

        Raises:
            DataDependentError: it was made so often that a loop goes on for ever.
        """
        key = (kind, text, line or user_frame())
        self._found[key] = self._found.get(key, 0) + 1
        if self._found[key] > _ENDLESS:
            raise DataDependentError(
                f"a value was read {_ENDLESS} times at one line, most likely by a loop that its stand-in never ends",
                expected="a loop that ends after a number of rounds known from shapes",
                do="Run memplan.measure(build) instead: it really runs the step",
                where=format_frame(key[2]),
            )

    def rows(self) -> tuple[Assumption, ...]:
        """Return what was assumed: branches first, then in the order of their first use."""
        rows = [
            Assumption(kind, text, format_frame(frame), count)  # pyright: ignore[reportArgumentType]  # kinds below
            for (kind, text, frame), count in self._found.items()
        ]
        return tuple(sorted(rows, key=lambda row: row.kind not in ("branch", "bound")))

    def chosen(self, op: str, reason: str) -> None:
        """Note that an op takes one of several kernels on the card, for a reason."""
        self.add("kernel", f"{op}: {reason}")

    def used(self, how: str) -> None:
        """Note that something is made of a value that is not followed, but is hardly a size."""
        self.add("scalar", f"a number that is read {how}")

    def selected(self, op: str, taken: int, most: int, *, known: bool, counted: bool) -> None:
        """Note how many elements an op is taken to select, or to have by numbers that it counts.

        Args:
            op: its name.
            taken: elements that are taken.
            most: elements that there can be.
            known: other shapes say how many.
            counted: it selects nothing, but is as large as numbers say.
        """
        why = "the most there can be" if taken == most else "as the shapes beside it say" if known else "as was assumed"
        form = _COUNTED if counted else _SELECTS
        self.add("bound", form.format(op=op.removeprefix("_"), taken=taken, most=most, why=why))

    def granted(self, text: str) -> None:
        """Note what was taken for granted of a result that depends on values."""
        self.add("sparse", text)

    def foreign(self, op: str) -> None:
        """Note that an op is a library's or the user's."""
        name = op.rpartition(".")[0].replace(".", "::")
        self.add("library", f"{name}: what its kernel takes besides its results is not known and NOT COUNTED")

    def apart(self, op: str) -> None:
        """Note that an op reads tensors on the card and of the host."""
        name = op.removeprefix("aten.").split(".")[0]
        self.add("host", f"{name} READS A TENSOR OF THE HOST beside one on the card: on CUDA it raises an error")
