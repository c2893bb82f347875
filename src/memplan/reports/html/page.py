"""Render results into a single HTML file that works offline: a jinja2 template with plotly's script inlined."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memplan._bytes import format_bytes
from memplan._text import printable_lines
from memplan._version import __version__
from memplan.errors import UsageError
from memplan.explanation.model import LABELS
from memplan.reports.document import Part, Table, name_field, number_field, table_of
from memplan.reports.html.charts import Chart, bars_side_by_side
from memplan.reports.html.page_parts import Result
from memplan.reports.html.palette import LOOKS, THEMES, looks

if TYPE_CHECKING:
    from jinja2 import Environment

_ASSETS = Path(__file__).parent / "assets"
_UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
"""Characters of JSON that could end a script element or a line in it, with their escapes."""


def check_installed(option: str) -> None:
    """Check early that the libraries for HTML pages are installed. Raises UsageError."""
    missing = [name for name in ("jinja2", "plotly") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"{option} needs {' and '.join(missing)}, which is not installed",
            expected="memplan's extra report",
            do="Install it: pip install 'memplan[report]'",
        )


def page_of(results: Sequence[Result]) -> str:
    """Return the HTML page of results, with a comparison of their peaks if there are several.

    The same results give the same text.

    Example:
        >>> page_of([step_result(explanation)]).startswith("<!doctype html>")
        True
    """
    names = names_of(results)
    comparison = _comparison(results, names)
    drawn = [chart for result in results for chart in result.charts]
    if comparison is not None:
        drawn.insert(0, comparison[1])
    charts = [{"kind": chart.kind, **chart.data} for chart in drawn]
    return _environment().get_template("page.html.j2").render(
        results=results,
        names=names,
        comparison=comparison,
        title=results[0].title if len(results) == 1 else f"{len(results)} results",
        version=__version__,
        styles=_asset("page.css"),
        themes=THEMES,
        scripts=[_plotly(), _asset("charts.js")] if charts else [],
        tables=_asset("page.js"),
        data=_json_in_script({"charts": charts, "looks": looks()}) if charts else "",
        kind_of=_kind,
        rows_of=_rows,
        listed=_sortable_rows,
    )  # fmt: skip


def names_of(results: Sequence[Result]) -> list[str]:
    """Return a distinct name for each result: its title, else its file's name, else the path, with a number."""
    titles = [result.title for result in results]
    files = [os.path.basename(result.source) or result.title for result in results]
    paths = [result.source or result.title for result in results]
    for names in (titles, files, paths):
        if len(set(names)) == len(names):
            return names
    return [f"{path} ({number})" for number, path in enumerate(paths, 1)]


def _comparison(results: Sequence[Result], names: Sequence[str]) -> tuple[str, Chart, Table] | None:
    """Return a sentence, a chart and a table that compare results by peak; None if fewer than two have a peak."""
    compared = [(name, result) for name, result in zip(names, results, strict=True) if result.causes is not None]
    if len(compared) < 2:
        return None
    sizes = {name: result.causes or {} for name, result in compared}
    peaks = {name: result.peak or sum(sizes[name].values()) for name, result in compared}
    causes = [cause for cause in LOOKS if any(column.get(cause) for column in sizes.values())]
    chart = bars_side_by_side(
        "Peaks side by side, by cause",
        list(sizes),
        {cause: [column.get(cause, 0) for column in sizes.values()] for cause in causes},
        [result.capacity for _, result in compared],
    )
    fields = [name_field("result", str), number_field("peak", lambda name: peaks[name])]
    fields += [number_field(LABELS[cause], lambda name, cause=cause: sizes[name].get(cause, 0)) for cause in causes]
    most, least = max(peaks, key=lambda name: peaks[name]), min(peaks, key=lambda name: peaks[name])
    if peaks[most] > peaks[least]:
        extremes = " and the least ".join(f"{format_bytes(peaks[name])} ({name})" for name in (most, least))
        sentence = f"The highest peak is {extremes}."
    else:
        sentence = f"All peak at {format_bytes(peaks[most])}."
    return sentence, chart, table_of(list(sizes), fields)


@dataclass(frozen=True, slots=True)
class _Cell:
    """A cell as the template draws it."""

    text: str
    number: float | None
    bar: tuple[float, float] | None
    layer: bool
    below: str = ""


def _rows(table: Table) -> list[list[_Cell]]:
    """Return a table's cells row by row, as the template draws them; totals have no number to sort by and no bar."""
    rows: list[list[_Cell]] = []
    for index in range(len(table.columns[0].cells)):
        cells = [
            _Cell(
                text=column.cells[index],
                number=column.numbers[index] if index < len(column.numbers) else None,
                bar=column.bars[index] if index < len(column.bars) else None,
                layer=column.layers,
            )
            for column in table.columns
        ]
        if index < len(table.below):
            cells[0] = replace(cells[0], below=table.below[index])
        rows.append(cells)
    return rows


def _sortable_rows(table: Table) -> int:
    """Return the number of rows at the top that a reader can sort. Below are totals, or a row that sums up the rest."""
    lengths = [len(column.numbers or column.bars) for column in table.columns if column.numbers or column.bars]
    end = len(table.columns[0].cells) if table.sums_from is None else table.sums_from
    return min([*lengths, end])


def _kind(part: Part) -> str:
    """Return the kind by which the template draws a part of a report: text, line, facts, code or table."""
    return "text" if isinstance(part, str) else type(part).__name__.lower()


def _json_in_script(value: Any) -> str:
    """Return compact JSON that is safe inside a script element."""
    plain = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False, default=dict)
    if "\\u" in plain or not plain.isprintable():  # rare: a copy of all values takes long
        plain = json.dumps(_printable(value), separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return "".join(_UNSAFE.get(char, char) for char in plain) if any(char in plain for char in _UNSAFE) else plain


def _printable(value: Any) -> Any:
    """Return a JSON value without unprintable characters in its strings, such as control and bidirectional ones."""
    if isinstance(value, str):
        return printable_lines(value)
    if isinstance(value, Mapping):
        return {_printable(key): _printable(part) for key, part in value.items()}
    return [_printable(part) for part in value] if isinstance(value, (list, tuple)) else value


@cache
def _environment() -> Environment:
    """Return the jinja2 environment of the templates, which escapes HTML and unprintable characters."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_ASSETS), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, finalize=lambda value: printable_lines(value) if type(value) is str else value,
    )  # fmt: skip
    environment.filters["bytes"] = format_bytes
    return environment


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


@cache
def _plotly() -> str:
    """Return plotly's script, which the page contains: it needs no network."""
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()
