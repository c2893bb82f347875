"""The content of a page as plain data, independent of HTML. All sizes are bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from memplan._bytes import format_bytes
from memplan._text import format_seconds

Mood = Literal["good", "bad", "plain"]


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table: its text, and the number to sort by (None: sort by the text).

    ``life`` draws a bar from one share of the cell's width to another, between 0 and 1.
    """

    text: str
    sort: float | None = None
    life: tuple[float, float] | None = None
    layer: str | None = None
    """For the name of a layer: the node of the layer chart that a click opens."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table. ``numeric`` has the indices of right-aligned columns."""

    name: str
    headers: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    numeric: frozenset[int] = frozenset()
    more: str = ""
    """Text below the table about rows that are left out."""

    @property
    def searched(self) -> bool:
        """Whether the table is long enough to get a search field."""
        return len(self.rows) > _SEARCHED


_SEARCHED = 12


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart: ``kind`` is the function of ``charts.js`` that draws ``data``, ``label`` the caption."""

    kind: str
    label: str
    data: Mapping[str, Any]
    controls: tuple[tuple[str, str], ...] = ()
    """Buttons to switch between figures: (key, label)."""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Paragraphs:
    """Paragraphs of text."""

    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Code:
    """Monospaced text, collapsed under its title."""

    title: str
    text: str


Part = Table | Chart | Paragraphs | Code


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and the content below it."""

    title: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """The page content of a result, beginning with the verdict.

    A page of several results compares their ``peak`` by ``causes``, with ``capacity``; None if the result has none.
    """

    kind: str
    title: str
    verdict: str
    mood: Mood
    facts: tuple[tuple[str, str], ...]
    sections: tuple[Section, ...]
    lines: tuple[str, ...] = ()
    """Paragraphs below the verdict."""
    source: str = ""
    causes: Mapping[str, int] | None = None
    peak: int | None = None
    capacity: int | None = None
    remarks: tuple[str, ...] = field(default=())


def text(value: object) -> Cell:
    """Return a cell of text, a dash for None and ""."""
    shown = "" if value is None else str(value)
    return Cell(shown or "–")


def size(number: int | None) -> Cell:
    """Return a cell of bytes, a dash for None."""
    return Cell("–", -1) if number is None else Cell(format_bytes(number), number)


def seconds(number: float | None) -> Cell:
    """Return a cell of seconds, a dash for None."""
    return Cell("–", -1) if number is None else Cell(format_seconds(number), number)


def number(value: float | None) -> Cell:
    """Return a cell of a plain number, a dash for None."""
    return Cell("–", -1) if value is None else Cell(f"{value:,}", value)


def table(
    name: str, headers: Sequence[str], rows: Sequence[Sequence[Cell]], most: int = 0, more: str = "{} smaller ones"
) -> Table:
    """Return a table of at most ``most`` rows, 0 for all; ``more`` is the text about the others.

    Columns of numbers are right-aligned.
    """
    shown = rows[:most] if most else rows
    numeric = frozenset(
        index
        for index in range(len(headers))
        if rows and all(row[index].sort is not None and row[index].life is None for row in rows)
    )
    hidden = len(rows) - len(shown)
    return Table(
        name, tuple(headers), tuple(tuple(row) for row in shown), numeric, more.format(hidden) if hidden else ""
    )
