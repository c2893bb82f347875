"""Draw documents as HTML for notebooks.

It has no scripts, colours or backgrounds, so that it is readable in light and dark themes and in untrusted notebooks.
Every text is escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from memplan._text import printable, printable_lines
from memplan.reports.columns import shortened
from memplan.reports.document import Code, Document, Facts, Line, Part, Section, Table

_ROWS, _CELL, _TEXT = 300, 300, 4000
"""Limits of rows of a table, and of characters of a cell and a paragraph: notebooks save their output."""


def html_of(document: Document) -> str:
    """Return a document as HTML; its size is bounded."""
    title = "" if document.title is None else _line(document.title.text, bold=True)
    return f'<div style="overflow-x:auto">{title}{"<br>".join(map(_section, document.sections))}</div>'


def _section(section: Section) -> str:
    title = _line(section.title, bold=True) if section.title else ""
    return title + "".join(map(_part, section.parts))


def _part(part: Part) -> str:
    """Return a part of a document as HTML."""
    match part:
        case str():
            return _line(part)
        case Line():
            return _indented(_line(part.text, bold=part.style == "bold"), part.indent)
        case Code():
            return f"<pre>{escape(printable_lines(part.text)[:_TEXT])}</pre>"
        case Facts():
            rows = "".join(f"<tr>{_cell(label)}{_cell(value)}</tr>" for label, value in part.rows.items())
            return f'<table style="font-family:monospace"><tbody>{rows}</tbody></table>'
        case Table():
            return _indented(_table(part), part.indent)


def _indented(html: str, indent: int) -> str:
    return f'<div style="margin-left:2em">{html}</div>' if indent else html


def _line(text: str, *, bold: bool = False) -> str:
    body = escape(shortened(printable(text), _TEXT, from_left=False))
    return f"<div>{f'<b>{body}</b>' if bold else body}</div>"


def _table(table: Table) -> str:
    """Return a table as HTML, without its bars; of too many rows the first and the last, which can be a sum."""
    columns = [column for column in table.columns if not column.bars]
    sides = ["right" if column.right else "left" for column in columns]
    headers = [escape(printable_lines(column.header)).replace("\n", "<br>") for column in columns]
    head = "".join(f'<th align="{side}">{header}</th>' for header, side in zip(headers, sides, strict=True))
    rows = list(zip(*(column.cells for column in columns), strict=True))
    sums_from = len(rows) if table.sums_from is None else table.sums_from
    body: list[str] = []
    for index in range(min(len(rows), _ROWS)):
        body.append(_row(rows[index], sides, bold=index >= sums_from))
        if index < len(table.below) and table.below[index]:
            body.append(f"<tr>{_cell(table.below[index], span=len(columns))}</tr>")
    if len(rows) > _ROWS:
        body[-1:] = [  # in the place of the last row within the limit
            f'<tr><td colspan="{len(columns)}">... {len(rows) - _ROWS} more rows</td></tr>',
            _row(rows[-1], sides, bold=sums_from < len(rows)),
        ]
    return f'<table style="font-family:monospace"><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table>'


def _row(cells: Sequence[str], sides: Sequence[str], *, bold: bool) -> str:
    return f"<tr>{''.join(_cell(cell, side, bold=bold) for cell, side in zip(cells, sides, strict=True))}</tr>"


def _cell(text: str, side: str = "left", *, bold: bool = False, span: int = 1) -> str:
    """Return a table cell as HTML, aligned to a side and ``span`` columns wide."""
    body = escape(shortened(printable(text), _CELL, from_left=False)).replace("  ", "&nbsp; ")
    body = f"<b>{body}</b>" if bold else body
    colspan = f' colspan="{span}"' if span > 1 else ""
    return f'<td align="{side}"{colspan}>{body}</td>'
