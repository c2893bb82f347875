"""Reports as data: paragraphs, facts, tables and code in sections. `terminal` and `html` draw them.

Texts are as they are in the result, which can come from a file: what draws them makes them printable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from memplan._bytes import format_bytes

Style = Literal["", "bold", "dim", "good", "warning", "bad"]


@dataclass(frozen=True, slots=True)
class Line:
    """A paragraph; ``indent`` in characters."""

    text: str
    style: Style = ""
    indent: int = 0


@dataclass(frozen=True, slots=True)
class Facts:
    """Labels and their values, each on a line."""

    rows: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Code:
    """Monospaced text, indented."""

    text: str


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    ``shrinks_to`` is the least width to which its texts may be cut, None if they may not; ``from_left`` cuts their
    beginning, for names that differ at the end. If the table is too wide, columns are left out by descending
    ``drop``, those with 0 never.
    """

    header: str
    cells: tuple[str, ...]
    right: bool = False
    shrinks_to: int | None = None
    from_left: bool = False
    drop: int = 0
    numbers: tuple[float, ...] = ()
    """Keys by which a page sorts the rows; () to sort by the texts."""
    bars: tuple[tuple[float, float], ...] = ()
    """Drawn instead of texts: bars from one share of the cell's width to another."""
    layers: bool = False
    """Whether the texts are names of layers, which the charts of a page know."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table; its first column names the rows, and its header the table.

    Rows from ``sums_from`` on are totals. ``below`` has a text for each row, which is printed below it.
    """

    columns: tuple[Column, ...]
    sums_from: int | None = None
    below: tuple[str, ...] = ()
    indent: int = 0


Part = str | Line | Facts | Code | Table
"""A text is a `Line` without a style."""


@dataclass(frozen=True, slots=True)
class Section:
    """Parts below an optional heading. An empty line separates sections."""

    parts: tuple[Part, ...]
    title: str = ""


@dataclass(frozen=True, slots=True)
class Document:
    """A report: its heading, and its sections. The first section continues the heading."""

    title: Line | None
    sections: tuple[Section, ...]

    @property
    def heading(self) -> str:
        """Text of the title, "" without a title."""
        return "" if self.title is None else self.title.text

    def __add__(self, other: Document) -> Document:
        """Return the sections of both documents; the title of ``other`` becomes a line of its first section."""
        first, *others = other.sections
        if other.title is not None:
            first = Section((other.title, *first.parts))
        return replace(self, sections=(*self.sections, *([first] if first.parts else []), *others))


def document(title: str | Line | None, *sections: Section | Iterable[Part]) -> Document:
    """Return a document of the sections that are not empty; its heading is bold if it has no style.

    The first section stays even if it is empty: it continues the heading, and what follows is separated from it.
    """
    ready = [section if isinstance(section, Section) else Section(tuple(section)) for section in sections]
    first, *others = ready or [Section(())]
    heading = Line(title, "bold") if isinstance(title, str) else title
    return Document(heading, (first, *(section for section in others if section.parts)))


def notes(texts: Iterable[str], style: Style = "") -> list[Part]:
    """Return a line for each distinct remark."""
    return [Line(f"note: {text}", style) for text in dict.fromkeys(texts)]


@dataclass(frozen=True)
class Field:
    """A column to be: ``cell`` gives its text for a row, ``total`` for several rows together.

    The other fields are those of `Column`, of a row.
    """

    header: str
    cell: Callable[[Any], str]
    total: Callable[[Sequence[Any]], str] = lambda rows: ""
    right: bool = field(default=False, kw_only=True)
    shrinks_to: int | None = field(default=None, kw_only=True)
    from_left: bool = field(default=False, kw_only=True)
    drop: int = field(default=0, kw_only=True)
    number: Callable[[Any], float] | None = field(default=None, kw_only=True)
    bar: Callable[[Any], tuple[float, float]] | None = field(default=None, kw_only=True)
    layers: bool = field(default=False, kw_only=True)


def name_field(
    header: str,
    cell: Callable[[Any], str],
    shrinks_to: int | None = 16,
    *,
    from_left: bool = True,
    layers: bool = False,
) -> Field:
    """Return a column of names ``cell(row)``, to be the first of a table; they are cut to ``shrinks_to`` characters at
    least."""
    return Field(header, cell, shrinks_to=shrinks_to, from_left=from_left, layers=layers)


def number_field(
    header: str,
    number: Callable[[Any], Any],
    shown: Callable[[Any], str] = format_bytes,
    *,
    cell: Callable[[Any], str] | None = None,
    drop: int = 0,
) -> Field:
    """Return a column of numbers, ``number(row)``, with the sum as its total. ``shown`` formats numbers, as bytes by
    default; ``cell`` returns the text of a row where that is not the formatted number."""
    cell = cell or (lambda row: shown(number(row)))
    return Field(header, cell, lambda rows: shown(sum(map(number, rows))), right=True, drop=drop, number=number)


def bar_field(share: Callable[[Any], float], drop: int) -> Field:
    """Return a column of bars as long as a share of its width."""
    return Field("", lambda row: "", bar=lambda row: (0.0, share(row)), drop=drop)


def table_of(
    rows: Sequence[Any],
    fields: Sequence[Field],
    top: int = 0,
    total: str | None = None,
    total_of: Sequence[Any] | None = None,
    *,
    indent: int = 0,
) -> Table:
    """Return rows as a table. ``top`` rows are listed, 0 for all; a line with their number and totals stands for the
    others. A last line labelled ``total`` adds up the rows, or ``total_of``. ``indent`` is in characters."""
    shown = rows[:top] if top else rows
    hidden = rows[len(shown) :]
    columns: list[Column] = []
    for index, column in enumerate(fields):
        cells = [column.cell(row) for row in shown]
        if hidden:
            cells.append(column.total(hidden) if index else f"... {len(hidden)} more")
        if total is not None:
            cells.append(column.total(rows if total_of is None else total_of) if index else total)
        columns.append(
            Column(
                column.header,
                tuple(cells),
                right=column.right,
                shrinks_to=column.shrinks_to,
                from_left=column.from_left,
                drop=column.drop,
                numbers=tuple(map(column.number, shown)) if column.number else (),
                bars=tuple(map(column.bar, shown)) if column.bar else (),
                layers=column.layers,
            )
        )
    return Table(tuple(columns), len(columns[0].cells) - 1 if total is not None else None, indent=indent)


def size_or_dash(size: int) -> str:
    """Return bytes as text, "-" for 0."""
    return format_bytes(size) if size else "-"
