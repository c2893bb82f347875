"""HTML of results for notebooks, with the tables of the terminal reports.

It has no scripts, colours or backgrounds, so that it is readable in light and dark themes and in untrusted notebooks.
Every text is escaped.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from html import escape

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memplan._text import printable_lines
from memplan.checks.finding import Finding
from memplan.explanation.line_profile import LineProfile
from memplan.explanation.model import Explanation
from memplan.explanation.why import Why
from memplan.exporting.exported import Exported
from memplan.planning.plan.plan import Plan
from memplan.reports import check, compare, explain, largest, line_tables, plan, quantize, replay, sweep, why
from memplan.reports.columns import shortened
from memplan.reports.exports import export as exports
from memplan.reports.output import Page
from memplan.simulation.replays.replayed import Replay
from memplan.studies.capacity.largest import Largest
from memplan.studies.comparisons.comparison import Comparison
from memplan.studies.quantization.quantized import Quantized
from memplan.studies.sweeps.sweep import Sweep
from memplan.verification.fitting.fit import Fitted

_PAGE = Page(240)
_ROWS, _CELL, _TEXT = 300, 300, 4000
"""Limits of rows of a table, and of characters of a cell and a paragraph: notebooks save their output."""


def html_of(result: object) -> str:
    """Return a result as HTML, under 200 kB; the same text for the same result."""
    return f'<div style="overflow-x:auto">{"".join(map(_html, _parts(result)))}</div>'


def _parts(result: object) -> Iterable[RenderableType]:
    match result:
        case Explanation():
            return explain.render(result, _PAGE)
        case LineProfile():
            return line_tables.render([result], _PAGE)
        case Comparison():
            return compare.render(result, _PAGE)
        case Plan():
            return plan.render(result, _PAGE)
        case Fitted():
            return _fitted_parts(result)
        case Sweep():
            return sweep.parts(result, _PAGE)
        case Largest():
            return largest.parts(result, _PAGE)
        case Quantized():
            return quantize.render(result, _PAGE)
        case Replay():
            return replay.render(replay.Cases(result, result, (), None), _PAGE)
        case Why():
            return why.render(result, _PAGE)
        case Exported():
            return exports.render(result, _PAGE)
        case Finding():
            return check.render(result.layer or "step", [result], _PAGE)
        case _:
            return [Text(str(result))]


def _fitted_parts(fitted: Fitted) -> Iterator[RenderableType]:
    yield Text(str(fitted).splitlines()[0], "bold")
    yield from plan.render(fitted.plan, _PAGE)
    yield Text(str(fitted.proof))
    yield from (Text(f"note: {note}") for note in fitted.notes)


def _html(part: RenderableType) -> str:
    match part:
        case Table():
            return _table(part)
        case Padding():
            return f'<div style="margin-left:2em">{_html(part.renderable)}</div>'
        case Text() | str():
            text = shortened(printable_lines(str(part)).strip("\n"), _TEXT, from_left=False)
            body = escape(text).replace("\n", "<br>")
            bold = isinstance(part, Text) and "bold" in str(part.style)
            return f"<div>{f'<b>{body}</b>' if bold else body}</div>" if body else "<br>"
        case _:
            console = Console(file=io.StringIO(), width=_PAGE.width, color_system=None)
            with console.capture() as capture:
                console.print(part)
            return f"<pre>{escape(printable_lines(capture.get()))}</pre>"


def _table(table: Table) -> str:
    columns = [(column, "right" if column.justify == "right" else "left") for column in table.columns]
    head = "".join(f'<th align="{side}">{_cell(column.header)}</th>' for column, side in columns)
    rows = list(zip(*(column.cells for column in table.columns), strict=True))
    shown = rows if len(rows) <= _ROWS else [*rows[: _ROWS - 1], rows[-1]]
    body = [
        "<tr>" + "".join(f'<td align="{side}">{_cell(cell)}</td>' for cell, (_, side) in zip(row, columns, strict=True))
        + "</tr>"
        for row in shown
    ]  # fmt: skip
    if len(shown) < len(rows):
        body.insert(-1, f'<tr><td colspan="{len(columns)}">... {len(rows) - len(shown)} more rows</td></tr>')
    head = f"<thead><tr>{head}</tr></thead>" if table.show_header else ""
    return f'<table style="font-family:monospace">{head}<tbody>{"".join(body)}</tbody></table>'


def _cell(cell: RenderableType) -> str:
    text = escape(shortened(str(cell), _CELL, from_left=False)).replace("\n", "<br>").replace("  ", "&nbsp; ")
    return f"<b>{text}</b>" if isinstance(cell, Text) and "bold" in str(cell.style) else text
