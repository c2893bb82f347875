"""A sweep on the terminal, as JSON, and as a picture by matplotlib."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from memplan._bytes import format_bytes
from memplan._text import printable
from memplan.errors import InputError, UsageError
from memplan.reports.columns import Column
from memplan.reports.frontier import FORMATS
from memplan.reports.output import Page, print_parts
from memplan.studies.sweeps.fits import place_of, shown
from memplan.studies.sweeps.points import PARTS
from memplan.studies.sweeps.sweep import Sweep

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "bytes"))
_SHOWN = 12
"""Lines of reasons, fits and crossings; the rest is in the JSON file."""
_DROP = {"rounding": 8, "inputs": 7, "temporaries": 6, "optimizer": 5, "weights": 4, "workspace": 3, "gradients": 2}


def print_sweep(sweep: Sweep, file: TextIO | None = None) -> None:
    """Print a sweep: as wide as the terminal, or 80 columns without colours where ``file`` is not one."""
    print_parts(lambda page: parts(sweep, page), file)


def parts(sweep: Sweep, page: Page) -> Iterator[RenderableType]:
    """The report: a row for each point, what is fixed and what grows, what is largest where."""
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
    for title, lines in (("Fixed part and slope", sweep.fits), ("Largest part", sweep.crossings)):
        if lines:
            yield Text(f"\n{title}", "bold")
            yield from (Text(f"- {printable(str(line))}") for line in lines[:_SHOWN])
            if len(lines) > _SHOWN:
                yield Text(f"- ... {len(lines) - _SHOWN} more, all of them with --json")
    if sweep.notes:
        yield Text("")
        yield from (Text(f"note: {printable(note)}", "dim") for note in sweep.notes)


def table(sweep: Sweep, page: Page) -> Table:
    """A row for each point: values, peak, reserved, the parts of the peak, and what lies between peak and reserved."""
    rows = sweep.rows
    columns = [
        Column(_header(name), tuple(printable(shown(row[name])) for row in rows), right=True) for name in sweep.axes
    ]
    columns.append(Column("peak", tuple(_peak(row) for row in rows), right=True))
    if sweep.device != "cpu":
        columns.append(Column("reserved", tuple(_interval(row, "reserved") for row in rows), right=True, drop=9))
    for part, causes in PARTS.items():
        if part == "workspace":
            cells = tuple(_interval({**row, "workspace": row.get("workspace_low", 0)}, "workspace") for row in rows)
        else:
            cells = tuple(_sum(row, causes) for row in rows)
        if any(cell not in ("", "0 B") for cell in cells):
            columns.append(Column(part, cells, right=True, drop=_DROP.get(part, 1)))
    if any(row.get("fragmentation") for row in rows):
        columns.append(Column("fragments", tuple(_sum(row, ("fragmentation",)) for row in rows), right=True, drop=5))
    return page.table(columns)


def _peak(row: Mapping[str, Any]) -> str:
    return "failed" if row["status"] != "ok" else format_bytes(row["peak"])


def _sum(row: Mapping[str, Any], causes: Sequence[str]) -> str:
    return format_bytes(sum(row[cause] for cause in causes)) if row["status"] == "ok" else ""


def _interval(row: Mapping[str, Any], name: str) -> str:
    """``1.5-3.0 MiB``; one size where both are the same."""
    if row["status"] != "ok":
        return ""
    low, high = format_bytes(row[name]), format_bytes(row[f"{name}_high"])
    if low == high:
        return low
    (number, unit), (_, other) = low.split(), high.split()
    return f"{number if unit == other or row[name] == 0 else low}-{high}"


def _header(name: str) -> str:
    """The name of an axis; that of layers' attributes in two lines."""
    pattern, dot, attribute = printable(name).rpartition(".")
    return f"{pattern}\n{dot}{attribute}" if dot else attribute


def _point(sweep: Sweep, row: Mapping[str, Any]) -> str:
    return printable(", ".join(f"{name} {shown(row[name])}" for name in sweep.axes))


def check_drawable(path: str | None) -> None:
    """See that a picture can be drawn into a file of this name before the work for it is done.

    Raises:
        InputError: it ends in none of the formats.
        UsageError: matplotlib is not installed.
    """
    if path is None:
        return
    if PurePath(path).suffix.lower() not in FORMATS:
        raise InputError(f"--chart {path}", expected=f"a name that ends in {', '.join(FORMATS)}", do="Rename it")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            "--chart draws with matplotlib, which is not installed",
            expected="memplan's extra charts",
            do="Install it: pip install 'memplan[charts]'",
        )


def draw(sweep: Sweep) -> Figure:
    """The picture: the parts of each point's peak on each other along the axis with most values, workspaces' most as a
    frame on top; a panel for each choice of the other axes."""
    from matplotlib.figure import Figure

    axis = max(sweep.axes, key=lambda name: len(sweep.axes[name]))
    panels = _panels(sweep, axis)
    largest = max((row["peak_high"] for _, rows in panels for row in rows), default=1)
    unit, unit_name = next(((size, name) for size, name in _UNITS if largest >= size), _UNITS[-1])
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
    figure.suptitle(_plain(f"{sweep.title} on {sweep.device}"))
    figure.legend(handles.values(), handles.keys(), loc="outside right upper")
    return figure


def _bars(
    place: Any, axis: str, at: dict[str, Any], rows: list[dict[str, Any]], unit: int, handles: dict[str, Any]
) -> None:
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
    place.set_xticks(range(len(rows)), [_plain(shown(row[axis])) for row in rows])
    place.set_xlabel(_plain(place_of(axis, at)))
    place.grid(alpha=0.3, axis="y")


def _panels(sweep: Sweep, axis: str) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """The rows that were recorded, apart by the values of the other axes."""
    panels: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    for row in sweep.rows:
        if row["status"] != "ok":
            continue
        at = {name: row[name] for name in sweep.axes if name != axis}
        panel = next((rows for known, rows in panels if known == at), None)
        if panel is None:
            panels.append((at, [row]))
        else:
            panel.append(row)
    return panels


def _plain(text: str) -> str:
    """A text that matplotlib takes for no formula."""
    return printable(text).replace("$", r"\$")


def picture(sweep: Sweep, path: str) -> bytes:
    """What a file of this name holds: the same bytes for the same sweep."""
    import matplotlib

    kind = PurePath(path).suffix.lower().removeprefix(".")
    undated = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[kind]
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "memplan"}):
        draw(sweep).savefig(buffer, format=kind, metadata=undated)
    return buffer.getvalue()
