"""Print documents: as wide as the terminal and in its encoding, or as plain text in a pipe and for ``str``."""

from __future__ import annotations

import io
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TextIO

from rich.box import Box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as Drawn
from rich.text import Text

from memplan._text import inert, printable, printable_lines
from memplan.reports.columns import fit
from memplan.reports.document import Code, Column, Document, Facts, Line, Part, Style, Table

PIPE_WIDTH = 80
_BAR = 24
_INDENT = 4
_BOX = Box("    \n    \n ── \n    \n ── \n    \n    \n    \n")  # rules below the header and above the sums
_STYLES: dict[Style, str] = {"good": "bold green", "warning": "bold yellow", "bad": "bold red"}
_ASCII = str.maketrans("─█", "-#")
_UNIT = re.compile(r"(?<=\d) (?=(?:%|[KMGT]?i?B|m?s)(?!\w))")
_BOUND = "\ue000"  # rich breaks lines at every kind of space, a no-break space too


def show(document: Document, file: TextIO | None = None) -> None:
    """Print a document to a file, stdout by default, in the file's encoding.

    On a terminal it is as wide as that and in colours, elsewhere as `text_of` writes it.
    """
    console = _console(file=file)
    ascii_only = not console.encoding.lower().startswith("utf")
    if console.is_terminal:
        for part in _Drawing(console.width, ascii_only).document(document):
            console.print(part, crop=False)
        return
    text = text_of(document, ascii_only=ascii_only)
    out = sys.stdout if file is None else file
    out.write((text + "\n" if text else "").encode(console.encoding, "replace").decode(console.encoding))


def text_of(document: Document, width: int = PIPE_WIDTH, *, ascii_only: bool = False) -> str:
    """Return a document as plain text without a line break at its end."""
    console = _console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as capture:
        for part in _Drawing(width, ascii_only).document(document):
            console.print(part, crop=False)
    # rich pads lines with spaces, and may wrap a text so that a line begins with a CI command such as ::error
    return "\n".join(inert(line.rstrip()) for line in capture.get().split("\n")[:-1])


def _console(**options: object) -> Console:
    # in a notebook rich would also display what it prints
    return Console(highlight=False, markup=False, emoji=False, force_jupyter=False, **options)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True, slots=True)
class _Drawing:
    """Draws parts for a width in characters; ``ascii_only`` if the encoding has no others."""

    width: int
    ascii_only: bool

    def document(self, document: Document) -> Iterator[RenderableType]:
        """Yield rich's objects for a document: its title, and its sections with an empty line between them."""
        if document.title is not None:
            yield from self.part(document.title)
        for index, section in enumerate(document.sections):
            if index:
                yield ""
            if section.title:
                yield from self.part(Line(section.title, "bold"))
            for part in section.parts:
                yield from self.part(part)

    def part(self, part: Part) -> Iterator[RenderableType]:
        """Yield rich's objects for a part."""
        match part:
            case str():
                yield from self.paragraph(part, self.width)
            case Line():
                lines = self.paragraph(part.text, self.width - part.indent, _STYLES.get(part.style, part.style))
                yield Padding(Group(*lines), (0, 0, 0, part.indent))
            case Facts():
                facts = Drawn.grid(padding=(0, 2, 0, 0))
                for label, value in part.rows.items():
                    facts.add_row(Text(printable(label)), Text(printable(value)))
                yield facts
            case Code():  # lines to be copied are not wrapped; rich would wrap a Text that is printed by itself
                lines = (" " * _INDENT + printable(line) for line in part.text.split("\n"))
                yield Group(*(Text(line, no_wrap=True, overflow="ignore") for line in lines))
            case Table(below=()):
                table = replace(self, width=max(1, self.width - part.indent)).table(part)
                yield Padding(table, (0, 0, 0, part.indent)) if part.indent else table
            case Table():
                yield from self.interleaved(part)

    def paragraph(self, text: str, width: int, style: str = "") -> Iterator[Text]:
        """Yield the lines of a text, with no line break between a number and its unit."""
        bound = Text(_UNIT.sub(_BOUND, printable(text)), style)  # a character instead of the space between them
        for line in bound.wrap(_console(file=io.StringIO()), max(1, width)):
            yield Text(line.plain.replace(_BOUND, " "), style)

    def table(self, table: Table) -> Drawn:
        """Draw the columns that fit into the width, with a rule above the totals."""
        columns, gap = fit([self.column(column) for column in table.columns], self.width, self.ellipsis)
        box = _BOX if not self.ascii_only else Box(str(_BOX).translate(_ASCII), ascii=True)
        drawn = Drawn(box=box, show_edge=False, pad_edge=False, padding=(0, gap - 1, 0, 0), header_style="bold")
        for column in columns:
            justify = "right" if column.right else "left"
            drawn.add_column(column.header, justify=justify, no_wrap=True, overflow="crop", vertical="bottom")
        for index, row in enumerate(zip(*(column.cells for column in columns), strict=True)):
            is_sum = table.sums_from is not None and index >= table.sums_from
            if index == table.sums_from:
                drawn.add_section()
            drawn.add_row(*(Text(cell, "bold" if is_sum else "") for cell in row))
        return drawn

    @property
    def ellipsis(self) -> str:
        return "..." if self.ascii_only else "…"

    def column(self, column: Column) -> Column:
        """Return the column with printable texts, and with bars as texts. Totals below the rows have no bar."""
        cells = tuple(map(printable, column.cells))
        if column.bars:
            block = "#" if self.ascii_only else "█"
            bars = (" " * round(_BAR * begin) + block * round(_BAR * (end - begin)) for begin, end in column.bars)
            cells = (*bars, *cells[len(column.bars) :])
        return replace(column, header=printable_lines(column.header), cells=cells)

    def interleaved(self, table: Table) -> Iterator[RenderableType]:
        """Draw a table with the texts of ``below`` after its rows, as wide as the page: rich has no such rows."""
        console = _console(file=io.StringIO(), width=self.width, color_system=None)
        with console.capture() as capture:
            console.print(self.table(table))
        header, _, *lines = capture.get().splitlines()
        rule = Text(("-" if self.ascii_only else "─") * self.width)
        yield from (Text(header.rstrip(), "bold"), rule)
        for index, line in enumerate(lines):
            is_sum = table.sums_from is not None and index > table.sums_from
            yield rule if index == table.sums_from else Text(line.rstrip(), "bold" if is_sum else "")
            if index < len(table.below) and table.below[index]:
                for text in textwrap.wrap(printable(table.below[index]), self.width - _INDENT):
                    yield Text(" " * _INDENT + text, "dim")
