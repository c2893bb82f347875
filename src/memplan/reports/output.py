"""What every report on the terminal shares: how wide it is, how a table is drawn, plain text where it is a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.box import Box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from memplan.reports.columns import Column, fit

PIPE_WIDTH = 80
_BOX = Box("    \n    \n ── \n    \n ── \n    \n    \n    \n")  # rules below the header and above the sums


@dataclass(frozen=True, slots=True)
class Page:
    """What a report is drawn on: so many columns of text, and an encoding that may have ASCII alone."""

    width: int = PIPE_WIDTH
    ascii_only: bool = False

    def table(self, columns: Sequence[Column], sums_from: int | None = None) -> Table:
        """A table of the columns that fit, with a rule above the rows that add others up."""
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


def print_parts(parts: Callable[[Page], Iterable[RenderableType]], file: TextIO | None = None) -> None:
    """Print the parts of a report: as wide as the terminal, or 80 columns without colours where there is none.

    Args:
        parts: makes them for a page.
        file: where to; stdout by default.
    """
    console = Console(file=file, highlight=False, markup=False, emoji=False)
    ascii_only = not console.encoding.lower().startswith("utf")
    if console.is_terminal:
        for part in parts(Page(console.width, ascii_only)):
            console.print(part)
        return
    console = Console(file=file, highlight=False, markup=False, emoji=False, width=PIPE_WIDTH, color_system=None)
    with console.capture() as capture:
        for part in parts(Page(PIPE_WIDTH, ascii_only)):
            console.print(part)
    text = "".join(f"{line.rstrip()}\n" for line in capture.get().splitlines())  # rich fills lines up with spaces
    out = sys.stdout if file is None else file
    out.write(text.encode(console.encoding, "replace").decode(console.encoding))
