"""Reports of line profiles on the terminal: a table for each function."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TextIO

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from memplan._text import printable
from memplan.explanation.line_profile import COLUMNS, LineProfile
from memplan.reports.columns import Column
from memplan.reports.output import Page, print_parts

LEGEND = (
    "held: allocated after the line. added, freed: what it leaves, and what it ends, of that. peak: the most while it "
    "ran. Of several hits, the most of any."
)
_CODE = 12


def print_lines(profiles: Sequence[LineProfile], file: TextIO | None = None) -> None:
    """Print the tables of line profiles to a file, stdout by default."""
    print_parts(lambda page: list(render(profiles, page))[1:], file)


def render(profiles: Sequence[LineProfile], page: Page) -> Iterator[RenderableType]:
    """Yield a heading and a table for each function, then the legend."""
    for profile in profiles:
        yield ""
        yield Text(profile.title, "bold")
        yield _table(profile, page)
        yield from (Text(f"note: {printable(note)}") for note in profile.notes)
    if profiles:
        yield ""
        yield Text(LEGEND, "dim")


def _table(profile: LineProfile, page: Page) -> Table:
    columns: list[Column] = []
    for column in COLUMNS:
        cells, code = tuple(column.cell(row) for row in profile.rows), column.name == "source"
        columns.append(Column(column.header, cells, right=not code, shrinks_to=_CODE if code else None))
    return page.table(columns)
