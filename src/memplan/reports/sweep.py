"""Report of a sweep, and its chart by matplotlib."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from memplan._bytes import format_bytes
from memplan.reports.chart import plain, unit_of
from memplan.reports.document import Document, Field, Line, Part, Section, Table, document, notes, table_of
from memplan.studies.sweeps.fits import Row, place_of, rows_along, shown
from memplan.studies.sweeps.points import PARTS
from memplan.studies.sweeps.sweep import Sweep

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SHOWN = 12
"""Lines printed of failure reasons, fits and crossings each; the JSON has all."""
_DROP = {"rounding": 8, "inputs": 7, "temporaries": 6, "optimizer": 5, "weights": 4, "workspace": 3, "gradients": 2}


def report(sweep: Sweep, most: int = _SHOWN) -> Document:
    """Return a table of the points, failures, fitted growth and largest categories; of each but the points at most
    ``most`` lines, 0 for all."""
    sections = {"Fixed part and slope": sweep.fits, "Largest part": sweep.crossings, "Engines": sweep.engine_changes}
    return document(
        f"{sweep.title} on {sweep.device}: {len(sweep.rows)} points of {', '.join(sweep.axes)}",
        [_table(sweep), *_failures(sweep, most)],
        *(Section(tuple(_bullets(lines, most)), title) for title, lines in sections.items()),
        notes(sweep.notes, "dim"),
    )


def _bullets(lines: Sequence[object], most: int) -> Iterator[Part]:
    """Yield the first ``most`` lines as a list (0: all), and how many were left out."""
    shown = lines[: most or None]
    yield from (f"- {line}" for line in shown)
    if len(lines) > len(shown):
        yield f"- ... {len(lines) - len(shown)} more, all of them with --json"


def _failures(sweep: Sweep, most: int) -> Iterator[Part]:
    """Yield how many points are missing, and why points failed, those with the same reason together."""
    if sweep.interrupted:
        left = sweep.points - len(sweep.rows)
        yield Line(f"Interrupted: {left} of {sweep.points} points were not recorded.", "warning")
    reasons: dict[str, list[str]] = {}
    for row in sweep.rows:
        if row["status"] == "failed":
            reasons.setdefault(row["reason"], []).append(_point(sweep, row))
    shown = list(reasons.items())[: most or None]
    for reason, points in shown:
        more = f" and {len(points) - 3} more" if len(points) > 3 else ""
        yield f"Failed at {'; '.join(points[:3])}{more}: {reason}."
    if len(reasons) > len(shown):
        yield f"... {len(reasons) - len(shown)} more reasons, all of them with --json."
    if any(row["status"] == "ok" and row["peak_high"] != row["peak"] for row in sweep.rows):
        yield "Workspaces: from none to the largest that cuDNN's algorithms are known to take; peak: with none."


def _table(sweep: Sweep) -> Table:
    """Return a row for each point: axis values, peak, reserved bytes, the peak by category, and fragmentation."""
    fields = [_axis_field(sweep, name) for name in sweep.axes]
    # failed points have no bytes; they sort below all others
    fields.append(Field("peak", _peak, right=True, number=lambda row: row.get("peak", -1)))
    if sweep.device != "cpu":
        fields.append(
            Field(
                "reserved",
                lambda row: _interval(row, "reserved"),
                right=True,
                drop=9,
                number=lambda row: row.get("reserved", -1),
            )
        )
    for part, causes in PARTS.items():
        if part == "workspace":  # which has a low and a high case
            cell, number = _workspace, lambda row: row.get("workspace", 0)
        else:
            cell, number = partial(_sum, causes=causes), partial(_bytes, causes=causes)
        if any(cell(row) not in ("", "0 B") for row in sweep.rows):
            fields.append(Field(part, cell, right=True, drop=_DROP.get(part, 1), number=number))
    if any(row.get("fragmentation") for row in sweep.rows):
        fields.append(Field("fragments", partial(_sum, causes=("fragmentation",)), right=True, drop=5))
    return table_of(sweep.rows, fields)


def _axis_field(sweep: Sweep, name: str) -> Field:
    """Return a column of an axis's values, sorted as numbers if all of them are."""
    numeric = all(isinstance(value, (int, float)) for value in sweep.axes[name])
    return Field(
        _header(name), lambda row: shown(row[name]), right=True, number=(lambda row: row[name]) if numeric else None
    )


def _bytes(row: Mapping[str, Any], causes: Sequence[str]) -> int:
    return sum(row.get(cause, 0) for cause in causes)


def _workspace(row: Mapping[str, Any]) -> str:
    """Return the bytes of workspaces of a point, from the low to the high case."""
    return _interval({**row, "workspace": row.get("workspace_low", 0)}, "workspace")


def _peak(row: Mapping[str, Any]) -> str:
    return "failed" if row["status"] != "ok" else format_bytes(row["peak"])


def _sum(row: Mapping[str, Any], causes: Sequence[str]) -> str:
    return format_bytes(sum(row[cause] for cause in causes)) if row["status"] == "ok" else ""


def _interval(row: Mapping[str, Any], name: str) -> str:
    """Return "1.5-3.0 MiB" from ``row[name]`` and its high case, or a single size if they print the same; "" for a
    failed point."""
    if row["status"] != "ok":
        return ""
    low, high = format_bytes(row[name]), format_bytes(row[f"{name}_high"])
    if low == high:
        return low
    number, unit = low.split()
    same_unit = high.endswith(f" {unit}") or row[name] == 0
    return f"{number if same_unit else low}-{high}"


def _header(name: str) -> str:
    """Return the column header of an axis; "layers.attribute", a varied attribute, is split into two lines."""
    pattern, dot, attribute = name.rpartition(".")
    return f"{pattern}\n{dot}{attribute}" if dot else attribute


def _point(sweep: Sweep, row: Mapping[str, Any]) -> str:
    """Return the values of a point on all axes, such as "batch 8, layers 4"."""
    return ", ".join(f"{name} {shown(row[name])}" for name in sweep.axes)


def draw(sweep: Sweep) -> Figure:
    """Return a stacked bar chart of the peaks by category, with the largest workspaces as dashed bars on top.

    The axis with the most values is the x axis; there is a panel for each combination of the other axes' values.
    """
    from matplotlib.figure import Figure

    axis = max(sweep.axes, key=lambda name: len(sweep.axes[name]))
    panels = rows_along(axis, sweep.axes, sweep.rows)
    largest = max((row["peak_high"] for _, rows in panels for row in rows), default=1)
    unit, unit_name = unit_of(largest)
    columns = min(3, max(1, len(panels)))
    lines = max(1, math.ceil(len(panels) / columns))
    figure = Figure(figsize=(4 * columns + 2, 3.2 * lines + 0.6), dpi=120, layout="constrained")
    subplots = figure.subplots(lines, columns, squeeze=False, sharey=True).flatten()
    handles: dict[str, Any] = {}
    for subplot, (fixed, rows) in zip(subplots, panels, strict=False):
        _bars(subplot, axis, fixed, rows, unit, handles)
        subplot.set_ylabel(f"predicted peak ({unit_name})")
    for unused in subplots[len(panels) :]:
        unused.set_visible(False)
    figure.suptitle(plain(f"{sweep.title} on {sweep.device}"))
    figure.legend(handles.values(), handles.keys(), loc="outside right upper")
    return figure


def _bars(subplot: Any, axis: str, fixed: dict[str, Any], rows: list[Row], unit: int, handles: dict[str, Any]) -> None:
    """Draw a panel of the chart: a stacked bar for each row, with axis ``axis`` as x. ``fixed`` has the panel's values
    of the other axes, ``unit`` the bytes of a unit of the y axis; ``handles`` receives a bar of each category, for the
    legend."""
    bottom = [0.0] * len(rows)
    for number, (part, causes) in enumerate(PARTS.items()):
        heights = [sum(row[cause] for cause in causes) / unit for row in rows]
        if any(heights):
            handles[part] = subplot.bar(range(len(rows)), heights, bottom=bottom, color=f"C{number}")
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    workspaces = [row["peak_high"] / unit - low for row, low in zip(rows, bottom, strict=True)]
    if any(height > 0 for height in workspaces):
        look = {"fill": False, "linestyle": "--", "edgecolor": "gray"}
        handles["workspace, at most"] = subplot.bar(range(len(rows)), workspaces, bottom=bottom, **look)
    subplot.set_xticks(range(len(rows)), [plain(shown(row[axis])) for row in rows])
    subplot.set_xlabel(plain(place_of(axis, fixed)))
    subplot.grid(alpha=0.3, axis="y")
