"""Render results into a single HTML file that works offline: a jinja2 template with plotly's script inlined."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memplan._bytes import format_bytes
from memplan._text import printable_lines
from memplan._version import __version__
from memplan.errors import UsageError
from memplan.explanation.model import LABELS
from memplan.reports.html.page_parts import Chart, Code, Paragraphs, Result, Table, size, table, text
from memplan.reports.html.palette import LOOKS, THEMES, looks

if TYPE_CHECKING:
    from jinja2 import Environment

_ASSETS = Path(__file__).parent / "assets"
_UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
"""Characters of JSON that could end a script element or a line in it, with their escapes."""


def check_installed(option: str) -> None:
    """Check early that the libraries for HTML pages are installed.

    Raises:
        UsageError: jinja2 or plotly is not installed.
    """
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
    charts: list[dict[str, Any]] = []
    for result in results:
        for section in result.sections:
            charts += [{"kind": part.kind, **part.data} for part in section.parts if isinstance(part, Chart)]
    names = names_of(results)
    comparison = _comparison(results, names)
    if comparison is not None:
        chart = comparison[1]
        charts.insert(0, {"kind": chart.kind, **chart.data})
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
        kind_of=_kind_of,
    )  # fmt: skip


def names_of(results: Sequence[Result]) -> list[str]:
    """Return a distinct name for each result: its title, else the name of its file, else the path, else the path
    with a number."""
    titles = [result.title for result in results]
    files = [os.path.basename(result.source) or result.title for result in results]
    paths = [result.source or result.title for result in results]
    for names in (titles, files, paths):
        if len(set(names)) == len(names):
            return names
    return [f"{path} ({number})" for number, path in enumerate(paths, 1)]


def _comparison(results: Sequence[Result], names: Sequence[str]) -> tuple[str, Chart, Table] | None:
    """Return a sentence, a chart and a table that compare results by peak; None if fewer than two have a peak."""
    compared = [
        (name, result, result.causes) for name, result in zip(names, results, strict=True) if result.causes is not None
    ]
    if len(compared) < 2:
        return None
    causes = [cause for cause in LOOKS if any(sizes.get(cause) for _, _, sizes in compared)]
    peaks = [result.peak or sum(sizes.values()) for _, result, sizes in compared]
    data = {
        "names": [name for name, _, _ in compared],
        "causes": {cause: [sizes.get(cause, 0) for _, _, sizes in compared] for cause in causes},
        "capacities": [result.capacity for _, result, _ in compared],
    }
    rows = [
        (text(name), size(peak), *(size(sizes.get(cause, 0)) for cause in causes))
        for (name, _, sizes), peak in zip(compared, peaks, strict=True)
    ]
    headers = ("result", "peak", *(LABELS[cause] for cause in causes))
    most, least = peaks.index(max(peaks)), peaks.index(min(peaks))
    extremes = " and the least ".join(f"{format_bytes(peaks[at])} ({compared[at][0]})" for at in (most, least))
    if peaks[most] > peaks[least]:
        sentence = f"The highest peak is {extremes}."
    else:
        sentence = f"All peak at {format_bytes(peaks[0])}."
    return sentence, Chart("beside", "Peaks side by side, by cause", data), table("Side by side", headers, rows)


def _kind_of(part: Any) -> str:
    return {Table: "table", Chart: "chart", Paragraphs: "text", Code: "code"}[type(part)]


def _json_in_script(value: Any) -> str:
    """Return compact JSON that is safe inside a script element."""
    plain = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False, default=dict)
    if "\\u" in plain or not plain.isprintable():
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
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()
