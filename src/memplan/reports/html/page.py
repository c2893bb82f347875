"""Results as one HTML file that opens anywhere, without a network: jinja2's template, plotly's script inlined."""

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
"""What could end a script element, or a line of it, in JSON."""


def check_installed(option: str) -> None:
    """Check that pages can be made, before the work for it is done.

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
    """Return the page of results, side by side where there are several; the same text for the same results.

    Example:
        >>> page_of([step_result(explanation)]).startswith("<!doctype html>")
        True
    """
    charts: list[dict[str, Any]] = []
    for result in results:
        for section in result.sections:
            charts += [{"kind": part.kind, **part.data} for part in section.parts if isinstance(part, Chart)]
    names = names_of(results)
    beside = _beside(results, names)
    if beside is not None:
        charts.insert(0, {"kind": beside[1].kind, **beside[1].data})
    drawn = bool(charts)
    return _environment().get_template("page.html.j2").render(
        results=results,
        names=names,
        beside=beside,
        title=results[0].title if len(results) == 1 else f"{len(results)} results",
        version=__version__,
        styles=_asset("page.css"),
        themes=THEMES,
        scripts=[_plotly(), _asset("charts.js")] if drawn else [],
        tables=_asset("page.js"),
        data=_json({"charts": charts, "looks": looks()}) if drawn else "",
        kind_of=_kind_of,
    )  # fmt: skip


def names_of(results: Sequence[Result]) -> list[str]:
    """Return what results are told apart by on one page: their titles, where these differ, else their files.

    Of several files of one name the whole paths; what is shown twice gets its place among them.
    """
    titles = [one.title for one in results]
    files = [os.path.basename(one.source) or one.title for one in results]
    paths = [one.source or one.title for one in results]
    for names in (titles, files, paths):
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({place})" for place, name in enumerate(paths, 1)]


def _beside(results: Sequence[Result], names: Sequence[str]) -> tuple[str, Chart, Table] | None:
    """Return several results that have a peak, side by side: in one sentence, as a picture and as a table."""
    shown = [(name, one, one.causes) for name, one in zip(names, results, strict=True) if one.causes is not None]
    if len(shown) < 2:
        return None
    causes = [cause for cause in LOOKS if any(found.get(cause) for _, _, found in shown)]
    peaks = [one.peak or sum(found.values()) for _, one, found in shown]
    data = {
        "names": [name for name, _, _ in shown],
        "causes": {cause: [found.get(cause, 0) for _, _, found in shown] for cause in causes},
        "capacities": [one.capacity for _, one, _ in shown],
    }
    rows = [
        (text(name), size(peak), *(size(found.get(cause, 0)) for cause in causes))
        for (name, _, found), peak in zip(shown, peaks, strict=True)
    ]
    headers = ("result", "peak", *(LABELS[cause] for cause in causes))
    most, least = peaks.index(max(peaks)), peaks.index(min(peaks))
    ends = " and the least ".join(f"{format_bytes(peaks[at])} ({shown[at][0]})" for at in (most, least))
    sentence = (
        f"The highest peak is {ends}." if peaks[most] > peaks[least] else f"All peak at {format_bytes(peaks[0])}."
    )
    return sentence, Chart("beside", "Peaks side by side, by cause", data), table("Side by side", headers, rows)


def _kind_of(part: Any) -> str:
    return {Table: "table", Chart: "chart", Paragraphs: "text", Code: "code"}[type(part)]


def _json(value: Any) -> str:
    """Return JSON that may stand in a script element."""
    plain = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False, default=dict)
    if "\\u" in plain or not plain.isprintable():
        plain = json.dumps(_printable(value), separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return "".join(_UNSAFE.get(one, one) for one in plain) if any(one in plain for one in _UNSAFE) else plain


def _printable(value: Any) -> Any:
    """Return a value for JSON without characters that are not printable: control characters, changes of direction."""
    if isinstance(value, str):
        return printable_lines(value)
    if isinstance(value, Mapping):
        return {_printable(key): _printable(part) for key, part in value.items()}
    return [_printable(part) for part in value] if isinstance(value, (list, tuple)) else value


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader(_ASSETS), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, finalize=lambda value: printable_lines(value) if type(value) is str else value,
    )  # fmt: skip
    made.filters["bytes"] = format_bytes
    return made


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


@cache
def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()
