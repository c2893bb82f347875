"""The memory of a function line by line, and its table."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from memplan._bytes import format_bytes
from memplan._display import Displayed
from memplan._json import Saved
from memplan._text import printable

WORDS = {"recorded": "predicted", "measured": "measured", "dry": "measured on an emulated card"}


@dataclass(frozen=True, slots=True)
class LineRow:
    """A line of a function. All sizes are bytes; for a line that ran more than once, the largest of any run.

    ``held`` is allocated after the line, ``peak`` is the most allocated while it ran, including earlier allocations.
    ``added`` was allocated by the line and still is after it; ``freed`` was allocated before it and no longer is after
    it. For a single run: held after = held before + added - freed.
    """

    line: int
    hits: int
    held: int
    added: int
    freed: int
    peak: int
    source: str


@dataclass(frozen=True, slots=True, repr=False)
class LineProfile(Saved, Displayed):
    """Memory of a function, line by line. Calls belong to their line, so ``loss.backward()`` has all of backward.

    ``rows`` are its lines in order; lines that never ran have 0 ``hits``. ``origin`` is that of the Trace.

    Example:
        >>> def build():
        ...     layer, data = nn.Linear(256, 256), torch.randn(64, 256)
        ...
        ...     @memplan.profile
        ...     def step():
        ...         layer(data).sum().backward()
        ...
        ...     return step
        >>> memplan.explain(build, device="h100").lines[0].function
        'build.step'
    """

    FORMAT: ClassVar[str] = "memplan.lines"
    DERIVED: ClassVar[tuple[str, ...]] = ("peak",)

    function: str
    file: str
    device: str
    origin: str
    rows: tuple[LineRow, ...]
    notes: tuple[str, ...] = ()

    @property
    def peak(self) -> int:
        """The most bytes allocated while any of its lines ran."""
        return max((row.peak for row in self.rows), default=0)

    @property
    def title(self) -> str:
        """Return the heading of the table: function, file, whether predicted or measured, and device."""
        name = self.file if self.function == "<module>" else f"{self.function} ({self.file})"
        return printable(f"{name}, line by line, {WORDS.get(self.origin, self.origin)} on {self.device}")

    def __repr__(self) -> str:
        return f"<LineProfile of {self.function}: {format_bytes(self.peak)} peak, {len(self.rows)} lines>"


def merge_profiles(profiles: Iterable[LineProfile]) -> tuple[LineProfile, ...]:
    """Merge the profiles of the same function from several runs: hits add up, and the largest of each size counts."""
    by_function: dict[tuple[str, str, int], LineProfile] = {}
    for profile in profiles:
        key = profile.file, profile.function, profile.rows[0].line if profile.rows else 0
        earlier = by_function.get(key)
        by_function[key] = profile if earlier is None else _merge_pair(earlier, profile)
    return tuple(by_function.values())


def _merge_pair(first: LineProfile, second: LineProfile) -> LineProfile:
    """Merge two profiles of the same function."""
    rows = tuple(_merge_rows(pair) for pair in zip(first.rows, second.rows, strict=True))
    return dataclasses.replace(first, rows=rows, notes=tuple(dict.fromkeys((*first.notes, *second.notes))))


def _merge_rows(rows: Sequence[LineRow]) -> LineRow:
    """Merge rows of the same line: hits add up, and the largest of each size counts."""
    sizes = {name: max(getattr(row, name) for row in rows) for name in ("held", "added", "freed", "peak")}
    return dataclasses.replace(rows[0], hits=sum(row.hits for row in rows), **sizes)
