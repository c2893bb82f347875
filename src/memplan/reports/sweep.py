"""A sweep on the terminal, as JSON, and as a picture by matplotlib."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from memplan._bytes import format_bytes
from memplan._text import printable
from memplan.reports.chart import plain, unit_of
from memplan.reports.output import Field, Page, print_parts
from memplan.studies.sweeps.fits import Row, place_of, rows_along, shown
from memplan.studies.sweeps.points import PARTS
from memplan.studies.sweeps.sweep import Sweep

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SHOWN = 12
"""Lines of reasons, fits and crossings; the rest is in the JSON file."""
_DROP = {"rounding": 8, "inputs": 7, "temporaries": 6, "optimizer": 5, "weights": 4, "workspace": 3, "gradients": 2}


def print_sweep(sweep: Sweep, file: TextIO | None = None) -> None:
    """Print a sweep to a file, stdout by default. See `print_parts`."""
    print_parts(lambda page: parts(sweep, page), file)


def parts(sweep: Sweep, page: Page) -> Iterator[RenderableType]:
    """Yield the report: a row for each point, what is fixed and what grows, what is largest where."""
    title = f"{sweep.title} on {sweep.device}: {len(sweep.rows)} points of {', '.join(sweep.axes)}"
    yield Text(printable(title), "bold")
    yield table(sweep, page)
    if sweep.interrupted:
        left = sweep.points - len(sweep.rows)
        yield Text(f"Interrupted: {left} of {sweep.points} points were not recorded.", "bold yellow")
    failed = [row for row in sweep.rows if row["status"] == "failed"]
    reasons: dict[str, list[str]] = {}
    for row in failed:
        reasons.setdefault(row["reason"], []).append(_point(sweep, row))
    for reason, points in list(reasons.items())[:_SHOWN]:
        more = f" and {len(points) - 3} more" if len(points) > 3 else ""
        yield Text(f"Failed at {'; '.join(points[:3])}{more}: {printable(reason)}.")
    if len(reasons) > _SHOWN:
        yield Text(f"... {len(reasons) - _SHOWN} more reasons, all of them with --json.")
    if any(row["status"] == "ok" and row["peak_high"] != row["peak"] for row in sweep.rows):
        yield Text("Workspaces: from none to the largest that cuDNN's algorithms are known to take; peak: with none.")
    sections = (
        ("Fixed part and slope", sweep.fits),
        ("Largest part", sweep.crossings),
        ("Engines", sweep.engine_changes),
    )
    for title, lines in sections:
        if lines:
            yield Text(f"\n{title}", "bold")
            yield from (Text(f"- {printable(str(line))}") for line in lines[:_SHOWN])
            if len(lines) > _SHOWN:
                yield Text(f"- ... {len(lines) - _SHOWN} more, all of them with --json")
    if sweep.notes:
        yield Text("")
        yield from (Text(f"note: {printable(note)}", "dim") for note in sweep.notes)


def table(sweep: Sweep, page: Page) -> Table:
    """Return a row for each point: values, peak, reserved, the parts of the peak, and what lies between peak and
    reserved."""
    fields = [_axis_field(name) for name in sweep.axes]
    fields.append(Field("peak", _peak, right=True))
    if sweep.device != "cpu":
        fields.append(Field("reserved", lambda row: _interval(row, "reserved"), right=True, drop=9))
    for part, causes in PARTS.items():
        cell = _workspace if part == "workspace" else partial(_sum, causes=causes)
        if any(cell(row) not in ("", "0 B") for row in sweep.rows):
            fields.append(Field(part, cell, right=True, drop=_DROP.get(part, 1)))
    if any(row.get("fragmentation") for row in sweep.rows):
        fields.append(Field("fragments", partial(_sum, causes=("fragmentation",)), right=True, drop=5))
    return page.rows(sweep.rows, fields)


def _axis_field(name: str) -> Field:
    return Field(_header(name), lambda row: printable(shown(row[name])), right=True)


def _workspace(row: Mapping[str, Any]) -> str:
    return _interval({**row, "workspace": row.get("workspace_low", 0)}, "workspace")


def _peak(row: Mapping[str, Any]) -> str:
    return "failed" if row["status"] != "ok" else format_bytes(row["peak"])


def _sum(row: Mapping[str, Any], causes: Sequence[str]) -> str:
    return format_bytes(sum(row[cause] for cause in causes)) if row["status"] == "ok" else ""


def _interval(row: Mapping[str, Any], name: str) -> str:
    """Write ``1.5-3.0 MiB``; one size where both are the same."""
    if row["status"] != "ok":
        return ""
    low, high = format_bytes(row[name]), format_bytes(row[f"{name}_high"])
    if low == high:
        return low
    (number, unit), (_, other) = low.split(), high.split()
    return f"{number if unit == other or row[name] == 0 else low}-{high}"


def _header(name: str) -> str:
    """Return the name of an axis; that of layers' attributes in two lines."""
    pattern, dot, attribute = printable(name).rpartition(".")
    return f"{pattern}\n{dot}{attribute}" if dot else attribute


def _point(sweep: Sweep, row: Mapping[str, Any]) -> str:
    return printable(", ".join(f"{name} {shown(row[name])}" for name in sweep.axes))


def draw(sweep: Sweep) -> Figure:
    """Return the picture: the parts of each point's peak on each other along the axis with most values, workspaces'
    most as a frame on top; a panel for each choice of the other axes."""
    from matplotlib.figure import Figure

    axis = max(sweep.axes, key=lambda name: len(sweep.axes[name]))
    panels = rows_along(axis, sweep.axes, sweep.rows)
    largest = max((row["peak_high"] for _, rows in panels for row in rows), default=1)
    unit, unit_name = unit_of(largest)
    columns = min(3, max(1, len(panels)))
    count = -(-max(1, len(panels)) // columns)
    figure = Figure(figsize=(4 * columns + 2, 3.2 * count + 0.6), dpi=120, layout="constrained")
    places = figure.subplots(count, columns, squeeze=False, sharey=True).flat
    handles: dict[str, Any] = {}
    for place, panel in zip(places, [*panels, *[None] * (count * columns - len(panels))], strict=True):
        if panel is None:
            place.set_visible(False)
            continue
        _bars(place, axis, *panel, unit, handles)
        place.set_ylabel(f"predicted peak ({unit_name})")
    figure.suptitle(plain(f"{sweep.title} on {sweep.device}"))
    figure.legend(handles.values(), handles.keys(), loc="outside right upper")
    return figure


def _bars(place: Any, axis: str, at: dict[str, Any], rows: list[Row], unit: int, handles: dict[str, Any]) -> None:
    bottom = [0.0] * len(rows)
    for number, (part, causes) in enumerate(PARTS.items()):
        heights = [sum(row[cause] for cause in causes) / unit for row in rows]
        if any(heights):
            handles[part] = place.bar(range(len(rows)), heights, bottom=bottom, color=f"C{number}")
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    most = [row["peak_high"] / unit - low for row, low in zip(rows, bottom, strict=True)]
    if any(height > 0 for height in most):
        look = {"fill": False, "linestyle": "--", "edgecolor": "gray"}
        handles["workspace, at most"] = place.bar(range(len(rows)), most, bottom=bottom, **look)
    place.set_xticks(range(len(rows)), [plain(shown(row[axis])) for row in rows])
    place.set_xlabel(plain(place_of(axis, at)))
    place.grid(alpha=0.3, axis="y")
