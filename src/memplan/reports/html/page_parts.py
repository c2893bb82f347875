"""What a page is made of: plain data that knows nothing of HTML. All sizes are bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from memplan._bytes import format_bytes
from memplan._text import format_seconds

Mood = Literal["good", "bad", "plain"]


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table: what is shown, and the number that it sorts by, None for its text.

    ``life`` draws a bar between two shares of the width.
    """

    text: str
    sort: float | None = None
    life: tuple[float, float] | None = None
    layer: str | None = None
    """Of a layer's name: the node of the picture that it opens."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows below column headers. ``numeric`` has the places of columns that are set to the right."""

    name: str
    headers: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    numeric: frozenset[int] = frozenset()
    more: str = ""
    """What is said of rows that are left out."""

    @property
    def searched(self) -> bool:
        """Return whether the table is long enough to be searched."""
        return len(self.rows) > _SEARCHED


_SEARCHED = 12


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture: its kind names the function of ``charts.js`` that draws ``data``; ``label`` says what it shows."""

    kind: str
    label: str
    data: Mapping[str, Any]
    controls: tuple[tuple[str, str], ...] = ()
    """Choices of what the picture shows: key and label."""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Paragraphs:
    """Sentences, each a line of its own."""

    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Code:
    """Text in a fixed width, folded."""

    title: str
    text: str


Part = Table | Chart | Paragraphs | Code


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and what is below it."""

    title: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """A saved result as it is shown: the verdict first.

    ``causes`` and ``capacity`` are what results are held side by side by; None where they have none.
    """

    kind: str
    title: str
    verdict: str
    mood: Mood
    facts: tuple[tuple[str, str], ...]
    sections: tuple[Section, ...]
    lines: tuple[str, ...] = ()
    """Sentences below the verdict."""
    source: str = ""
    causes: Mapping[str, int] | None = None
    peak: int | None = None
    capacity: int | None = None
    remarks: tuple[str, ...] = field(default=())


def text(value: object) -> Cell:
    """Return a cell of text."""
    shown = "" if value is None else str(value)
    return Cell(shown or "–")


def size(number: int | None) -> Cell:
    """Return a cell of bytes."""
    return Cell("–", -1) if number is None else Cell(format_bytes(number), number)


def seconds(number: float | None) -> Cell:
    """Return a cell of seconds."""
    return Cell("–", -1) if number is None else Cell(format_seconds(number), number)


def number(value: float | None) -> Cell:
    """Return a cell of a number."""
    return Cell("–", -1) if value is None else Cell(f"{value:,}", value)


def table(
    name: str, headers: Sequence[str], rows: Sequence[Sequence[Cell]], most: int = 0, more: str = "{} smaller ones"
) -> Table:
    """Return a table whose columns of numbers are set to the right; ``most`` rows at most, 0 for all."""
    shown = rows[:most] if most else rows
    numeric = frozenset(
        place
        for place in range(len(headers))
        if rows and all(row[place].sort is not None and row[place].life is None for row in rows)
    )
    left = len(rows) - len(shown)
    return Table(name, tuple(headers), tuple(tuple(row) for row in shown), numeric, more.format(left) if left else "")
