"""Results as one HTML file that opens anywhere, without a network: jinja2's template, plotly's script inlined."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memplan._bytes import format_bytes
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
    beside = _beside(results)
    if beside is not None:
        charts.insert(0, {"kind": beside[0].kind, **beside[0].data})
    drawn = bool(charts)
    return _environment().get_template("page.html.j2").render(
        results=results,
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


def _beside(results: Sequence[Result]) -> tuple[Chart, Table] | None:
    """Return several results that have a peak, side by side."""
    shown = [one for one in results if one.causes is not None]
    if len(shown) < 2:
        return None
    causes = [cause for cause in LOOKS if any((one.causes or {}).get(cause) for one in shown)]
    data = {
        "names": [_label(one) for one in shown],
        "causes": {cause: [(one.causes or {}).get(cause, 0) for one in shown] for cause in causes},
        "capacities": [one.capacity for one in shown],
    }
    rows = [
        (text(_label(one)), size(one.peak), *(size((one.causes or {}).get(cause, 0)) for cause in causes))
        for one in shown
    ]
    headers = ("result", "peak", *(LABELS[cause] for cause in causes))
    return Chart("beside", "Peaks side by side, by cause", data), table("Side by side", headers, rows)


def _label(result: Result) -> str:
    return f"{result.title} ({result.source})" if result.source else result.title


def _kind_of(part: Any) -> str:
    return {Table: "table", Chart: "chart", Paragraphs: "text", Code: "code"}[type(part)]


def _json(value: Any) -> str:
    """Return JSON that may stand in a script element."""
    plain = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False, default=dict)
    return "".join(_UNSAFE.get(one, one) for one in plain) if any(one in plain for one in _UNSAFE) else plain


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader(_ASSETS), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    made.filters["bytes"] = format_bytes
    return made


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


@cache
def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()
