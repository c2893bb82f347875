"""Pages and tables of all reports: width, encoding, and plain text in a pipe."""

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


def _nothing(rows: Sequence[Any]) -> str:
    return ""


@dataclass(frozen=True)
class Field:
    """A column of a table of rows: its text for one row, and for several together."""

    header: str
    cell: Callable[[Any], str]
    total: Callable[[Sequence[Any]], str] = _nothing
    right: bool = field(default=False, kw_only=True)
    shrinks_to: int | None = field(default=None, kw_only=True)
    from_left: bool = field(default=False, kw_only=True)
    drop: int = field(default=0, kw_only=True)


def name_field(
    header: str, cell: Callable[[Any], str], shrinks_to: int | None = 16, *, from_left: bool = True
) -> Field:
    """Return the first field of a table: names, which can be cut at their beginning."""
    return Field(header, cell, shrinks_to=shrinks_to, from_left=from_left)


def number_field(
    header: str,
    number: Callable[[Any], Any],
    shown: Callable[[Any], str] = format_bytes,
    *,
    cell: Callable[[Any], str] | None = None,
    drop: int = 0,
) -> Field:
    """Return a field of numbers, bytes where ``shown`` says nothing else; of several rows it has the sum."""
    one = cell or (lambda row: shown(number(row)))
    return Field(header, one, lambda rows: shown(sum(map(number, rows))), right=True, drop=drop)


@dataclass(frozen=True, slots=True)
class Page:
    """Width of a report in columns of text, and whether its encoding has ASCII alone."""

    width: int = PIPE_WIDTH
    ascii_only: bool = False

    def narrower(self, columns: int) -> Page:
        """Return the page for a part that is indented."""
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
            fields: the columns; the first one names a row.
            top: how many rows to list; the others share a line with their number and totals. 0 for all.
            total: name of a last line, with the totals of all rows; None for no such line.
            total_of: rows that it sums up, where these are others.
        """
        shown = rows[:top] if top else rows
        hidden = rows[len(shown) :]
        columns: list[Column] = []
        for place, one in enumerate(fields):
            cells = [one.cell(row) for row in shown]
            if hidden:
                cells.append(one.total(hidden) if place else f"... {len(hidden)} more")
            if total is not None:
                cells.append(one.total(rows if total_of is None else total_of) if place else total)
            columns.append(Column(one.header, tuple(cells), one.right, one.shrinks_to, one.from_left, one.drop))
        return self.table(columns, None if total is None else len(columns[0].cells) - 1)

    def table(self, columns: Sequence[Column], sums_from: int | None = None) -> Table:
        """Return a table of the columns that fit, with a rule above the rows that add others up."""
        columns = [
            replace(one, header=printable_lines(one.header), cells=tuple(map(printable_lines, one.cells)))
            for one in columns
        ]
        kept, gap = fit(columns, self.width, "..." if self.ascii_only else "…")
        table = Table(box=_BOX, show_edge=False, pad_edge=False, padding=(0, gap - 1, 0, 0), header_style="bold")
        for column in kept:
            justify = "right" if column.right else "left"
            table.add_column(column.header, justify=justify, no_wrap=True, overflow="crop", vertical="bottom")
        for index, row in enumerate(zip(*(column.cells for column in kept), strict=True)):
            is_sum = sums_from is not None and index >= sums_from
            if index == sums_from:
                table.add_section()
            table.add_row(*(Text(cell, "bold" if is_sum else "") for cell in row))
        return table

    def lines(self, table: Table) -> list[str]:
        """Return the lines of a table as text, for a report that puts others between them."""
        console = Console(file=io.StringIO(), width=self.width, color_system=None)
        with console.capture() as capture:
            console.print(table)
        return [line.rstrip() for line in capture.get().splitlines()]


def facts_table(facts: Mapping[str, str]) -> Table:
    """Draw labels and their values, a line each."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for label, value in facts.items():
        table.add_row(Text(printable(label)), Text(printable(value)))
    return table


class _SafeConsole(Console):
    """Prints texts without what would steer a terminal: they can come from a file, or from another library's error."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        if isinstance(renderable, str):
            renderable = printable_lines(renderable)
        elif isinstance(renderable, Text) and not renderable.plain.isprintable():
            renderable = renderable.copy()
            renderable.plain = printable_lines(renderable.plain)
        return super().render(renderable, options)


def print_parts(parts: Callable[[Page], Iterable[RenderableType]], file: TextIO | None = None) -> None:
    """Print the parts of a report: as wide as the terminal, or 80 columns without colours where there is none.

    Args:
        parts: makes them for a page.
        file: where to; stdout by default.
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
    # rich fills lines up with spaces, and breaks them where a command could begin
    text = "".join(f"{inert(line.rstrip())}\n" for line in capture.get().split("\n")[:-1])
    out = sys.stdout if file is None else file
    out.write(text.encode(console.encoding, "replace").decode(console.encoding))
