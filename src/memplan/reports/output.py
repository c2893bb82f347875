"""Tables and printing for all reports: fitted to the terminal's width and encoding, plain text in a pipe."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TextIO

from rich.box import Box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from memplan._bytes import format_bytes
from memplan._text import inert, printable, printable_lines
from memplan.reports.columns import Column, fit

PIPE_WIDTH = 80
_BOX = Box("    \n    \n ── \n    \n ── \n    \n    \n    \n")  # rules below the header and above the sums


@dataclass(frozen=True)
class Field:
    """A column of a table: ``cell`` gives its text for a row, ``total`` for several rows together.

    The other fields are those of `Column`.
    """

    header: str
    cell: Callable[[Any], str]
    total: Callable[[Sequence[Any]], str] = lambda rows: ""
    right: bool = field(default=False, kw_only=True)
    shrinks_to: int | None = field(default=None, kw_only=True)
    from_left: bool = field(default=False, kw_only=True)
    drop: int = field(default=0, kw_only=True)


def name_field(
    header: str, cell: Callable[[Any], str], shrinks_to: int | None = 16, *, from_left: bool = True
) -> Field:
    """Return a column of names, to be the first of a table; they are cut to ``shrinks_to`` at least."""
    return Field(header, cell, shrinks_to=shrinks_to, from_left=from_left)


def number_field(
    header: str,
    number: Callable[[Any], Any],
    shown: Callable[[Any], str] = format_bytes,
    *,
    cell: Callable[[Any], str] | None = None,
    drop: int = 0,
) -> Field:
    """Return a column of numbers with the sum as its total. ``shown`` formats numbers, as bytes by default; ``cell``
    gives the text of a row where that is not the formatted number."""
    cell = cell or (lambda row: shown(number(row)))
    return Field(header, cell, lambda rows: shown(sum(map(number, rows))), right=True, drop=drop)


def format_share(part: float, whole: float) -> str:
    """Return a percentage such as "12 %"; "<1 %" for small shares."""
    percent = 100 * part / whole if whole else 0.0
    return "<1 %" if 0 < percent < 0.5 else f"{percent:.0f} %"


def size_or_dash(size: int) -> str:
    """Return bytes as text, "-" for 0."""
    return format_bytes(size) if size else "-"


@dataclass(frozen=True, slots=True)
class Page:
    """Where a report is printed: the width in characters, and whether the encoding is limited to ASCII."""

    width: int = PIPE_WIDTH
    ascii_only: bool = False

    def narrower(self, columns: int) -> Page:
        """Return the page for a part that is indented by some columns of text."""
        return replace(self, width=max(1, self.width - columns))

    def rows(
        self,
        rows: Sequence[Any],
        fields: Sequence[Field],
        top: int = 0,
        total: str | None = None,
        total_of: Sequence[Any] | None = None,
    ) -> Table:
        """Draw rows as a table.

        Args:
            rows: in order.
            fields: the columns; the first names the row.
            top: rows to list, 0 for all. A line with their number and totals stands for the others.
            total: label of a last line with the totals; None for no such line.
            total_of: the rows to add up in that line, if not ``rows``.
        """
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
                Column(column.header, tuple(cells), column.right, column.shrinks_to, column.from_left, column.drop)
            )
        return self.table(columns, None if total is None else len(columns[0].cells) - 1)

    def table(self, columns: Sequence[Column], sums_from: int | None = None) -> Table:
        """Draw the columns that fit into the page's width, with a rule above row ``sums_from``, where totals begin."""
        columns = [
            replace(column, header=printable_lines(column.header), cells=tuple(map(printable_lines, column.cells)))
            for column in columns
        ]
        fitting, gap = fit(columns, self.width, "..." if self.ascii_only else "…")
        table = Table(box=_BOX, show_edge=False, pad_edge=False, padding=(0, gap - 1, 0, 0), header_style="bold")
        for column in fitting:
            justify = "right" if column.right else "left"
            table.add_column(column.header, justify=justify, no_wrap=True, overflow="crop", vertical="bottom")
        for index, row in enumerate(zip(*(column.cells for column in fitting), strict=True)):
            is_sum = sums_from is not None and index >= sums_from
            if index == sums_from:
                table.add_section()
            table.add_row(*(Text(cell, "bold" if is_sum else "") for cell in row))
        return table

    def lines(self, table: Table) -> list[str]:
        """Return a table as lines of text, for reports that print other text between its rows."""
        console = Console(file=io.StringIO(), width=self.width, color_system=None)
        with console.capture() as capture:
            console.print(table)
        return [line.rstrip() for line in capture.get().splitlines()]


def facts_table(facts: Mapping[str, str]) -> Table:
    """Draw two columns, labels and values, without a header."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for label, value in facts.items():
        table.add_row(Text(printable(label)), Text(printable(value)))
    return table


class _SafeConsole(Console):
    """Removes terminal control sequences from texts, which can come from untrusted files or errors of libraries."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        if isinstance(renderable, str):
            renderable = printable_lines(renderable)
        elif isinstance(renderable, Text) and not renderable.plain.isprintable():
            renderable = renderable.copy()
            renderable.plain = printable_lines(renderable.plain)
        return super().render(renderable, options)


def print_parts(parts: Callable[[Page], Iterable[RenderableType]], file: TextIO | None = None) -> None:
    """Print a report: as wide as the terminal, or in 80 columns without colours if ``file`` is no terminal.

    Args:
        parts: gives the renderables of the report for a page.
        file: where to print; stdout by default.
    """
    console = _SafeConsole(file=file, highlight=False, markup=False, emoji=False)
    ascii_only = not console.encoding.lower().startswith("utf")
    if console.is_terminal:
        for part in parts(Page(console.width, ascii_only)):
            console.print(part)
        return
    console = _SafeConsole(file=file, highlight=False, markup=False, emoji=False, width=PIPE_WIDTH, color_system=None)
    with console.capture() as capture:
        for part in parts(Page(PIPE_WIDTH, ascii_only)):
            console.print(part)
    # rich pads lines with spaces, and may wrap a text so that a line begins with a CI command such as ::error
    text = "".join(f"{inert(line.rstrip())}\n" for line in capture.get().split("\n")[:-1])
    out = sys.stdout if file is None else file
    out.write(text.encode(console.encoding, "replace").decode(console.encoding))
