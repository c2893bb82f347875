"""The charts of a page, as data for `assets/charts.js`. All sizes are bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memplan._bytes import format_bytes
from memplan.devices import find
from memplan.errors import DeviceError
from memplan.explanation.memory_timeline import LiveStorage, MemoryTimeline, PeakBlock, PeakSegment
from memplan.explanation.model import Explanation
from memplan.planning.plan.plan import Plan
from memplan.reports.frontier import Frontier
from memplan.reports.html.fields import Fields
from memplan.reports.html.palette import IN_USE, LOOKS
from memplan.studies.comparisons.comparison import Comparison
from memplan.studies.layouts.layouts import Layouts
from memplan.studies.sweeps.fits import shown
from memplan.studies.sweeps.points import KNOWN
from memplan.studies.sweeps.sweep import Sweep

_SEGMENTS = 48
"""How many segments are drawn, the largest first."""
_DEEPEST = 32
"""Depth of the layer tree; deeper module paths share a node."""
_THIN = 500
"""Adjacent blocks of a category are merged if they are below the largest segment's size divided by this."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart: ``kind`` is the function of ``charts.js`` that draws ``data``, ``label`` the heading."""

    kind: str
    label: str
    data: Mapping[str, Any]
    controls: tuple[tuple[str, str], ...] = ()
    """Buttons to switch between figures: (key, label)."""
    hint: str = ""


def of_step(explanation: Explanation, capacity: int | None) -> Iterator[Chart]:
    """Yield the charts of a step: memory over time, the peak at another batch, layers, the allocator's blocks."""
    timeline = explanation.course
    if timeline is not None and timeline.ticks:
        yield over_time([("", timeline)], capacity)
    if (scaling := explanation.scaling) is not None:
        lines = [[line.fixed, line.per_sample] for line in scaling.lines]
        data = {"lines": lines, "batch": scaling.batches[0], "batches": scaling.batches, "peaks": scaling.peaks}
        yield Chart("batch", "Peak at another batch", data)
    if explanation.layers:
        yield _layers(explanation)
    if timeline is not None and timeline.segments:
        yield _allocator(timeline.segments, timeline.alive)


def over_time(
    timelines: list[tuple[str, MemoryTimeline]], capacity: int | None = None, budget: int | None = None
) -> Chart:
    """Chart memory over time. Only the last (name, timeline) is split by category, the others are lines, as are
    the card's capacity and the budget, unless they are None."""
    series = [
        {
            "name": name,
            "ticks": timeline.ticks,
            "allocated": timeline.allocated,
            "reserved": timeline.reserved if timeline.reserved != timeline.allocated else [],  # not drawn twice
            "causes": timeline.causes,
            "ops": timeline.ops,
            "opRows": [[op.name, op.layer, op.where or "", op.phase, op.step] for op in timeline.op_rows],
            "spans": [[span.phase, span.step, span.start, span.end] for span in timeline.spans],
        }
        for name, timeline in timelines
    ]
    _, last = timelines[-1]
    hints = ["Drag to zoom, double-click for all", "arrow keys move along the step, p goes to the peak"]
    if len(timelines) == 1 and len(last.ticks) < last.total:
        hints.append(f"{len(last.ticks):,} of {last.total:,} moments are drawn, every peak among them")
    return Chart(
        "time",
        "Memory over time, by cause",
        {"series": series, "capacity": capacity, "budget": budget},
        hint="; ".join(hints) + ".",
    )


def _layers(explanation: Explanation) -> Chart:
    """Chart the layers as a tree, by saved bytes and by bytes live at the peak; in inference by the latter alone."""
    at_peak: dict[str, int] = {}
    for owner in explanation.holders:
        at_peak[owner.layer] = at_peak.get(owner.layer, 0) + owner.bytes
    saved = {row.name: row.saved_bytes for row in explanation.layers}
    controls = (("saved", "what each saves"), ("peak", "share of the peak"))
    if not any(saved.values()):
        controls = controls[1:]
    return Chart("layers", "Layers by bytes", {"nodes": _tree(saved, at_peak)}, controls, "Click a layer to go in.")


def _tree(saved: dict[str, int], at_peak: dict[str, int]) -> list[list[Any]]:
    """Return a node for each layer and each enclosing module: [path, label, parent's path, saved, at peak].

    ``saved`` and ``at_peak`` are bytes by layer, those outside of layers by "". The bytes of a node include those of
    its submodules. The root has path "" and parent None.
    """
    totals: dict[tuple[str, ...], list[int]] = {(): [0, 0]}  # parts of the path -> [saved, at peak]
    for name in saved | at_peak:
        parts = tuple(name.split(".", _DEEPEST)) if name else ("(outside of layers)",)
        for depth in range(len(parts) + 1):
            total = totals.setdefault(parts[:depth], [0, 0])
            total[0] += saved.get(name, 0)
            total[1] += at_peak.get(name, 0)
    nodes = []
    for path, (saved_bytes, peak_bytes) in totals.items():
        parent = None if not path else ".".join(path[:-1])
        nodes.append([".".join(path), path[-1] if path else "all", parent, saved_bytes, peak_bytes])
    return nodes


def _allocator(segments: tuple[PeakSegment, ...], alive: tuple[LiveStorage, ...]) -> Chart:
    """Chart the caching allocator's segments and their blocks, the largest segment first."""
    ordered = sorted(segments, key=lambda segment: -segment.size)
    merge_below = ordered[0].size // _THIN
    drawn = [_segment_data(segment, alive, merge_below) for segment in ordered[:_SEGMENTS]]
    free = sum(block.size for segment in segments for block in segment.blocks if block.state == "inactive")
    total = sum(segment.size for segment in segments)
    hint = f"{len(segments)} segments, {format_bytes(total)} reserved, {format_bytes(free)} of it in free blocks"
    hidden = ordered[_SEGMENTS:]
    if hidden:
        hidden_bytes = sum(segment.size for segment in hidden)
        hint += f"; {len(hidden)} smaller ones of {format_bytes(hidden_bytes)} are not drawn"
    return Chart(
        "allocator", "Segments and blocks", {"segments": drawn, "free": free, "reserved": total}, hint=f"{hint}."
    )


def _segment_data(segment: PeakSegment, alive: tuple[LiveStorage, ...], merge_below: int) -> dict[str, Any]:
    """Return a segment for the chart; each block is [offset, size, category or "" if free, text].

    Adjacent blocks of a category of at most ``merge_below`` bytes are merged.
    """
    blocks: list[list[Any]] = []
    merged = 0  # small blocks in the last row; 0 if it is a larger block
    for block in segment.blocks:
        cause = "" if block.state == "inactive" else block.cause
        small = block.size <= merge_below
        if small and merged and blocks[-1][2] == cause:
            merged += 1
            blocks[-1][1] += block.size
            blocks[-1][3] = f"{merged} small blocks"
        else:
            merged = int(small)
            blocks.append([block.offset, block.size, cause, _block_text(block, alive)])
    pool = "small requests" if segment.small else "large requests"
    stream = f", stream {segment.stream}" if segment.stream else ""
    return {"size": segment.size, "name": f"{pool}{stream}", "blocks": blocks}


def _block_text(block: PeakBlock, alive: tuple[LiveStorage, ...]) -> str:
    """Return the content of a block as text: "free", or its storage and layer."""
    if block.state == "inactive":
        return "free"
    if block.alive < 0:  # not an index of a storage
        return "waits for a stream" if block.state == "active_pending_free" else ""
    storage = alive[block.alive]
    layer = f" of {storage.layer}" if storage.layer and not storage.name.startswith(storage.layer) else ""
    engine = f": {storage.engine}" if storage.engine else ""
    return f"{storage.name}{layer}{engine}"


def of_plan(plan: Plan) -> Iterator[Chart]:
    """Yield the chart of memory over time before and after a plan, if the plan's file has timelines."""
    if plan.course is not None:
        before = [("before", _from_first_op(plan.eager_course))] if plan.eager_course is not None else []
        yield over_time([*before, ("after", plan.course)], budget=plan.budget)


def _from_first_op(timeline: MemoryTimeline) -> MemoryTimeline:
    """Return a timeline that begins at its step's first op, without the frees before it that end the previous step."""
    spans = timeline.spans
    step = spans[0].step if spans else 0
    of_step = (index for index, op in enumerate(timeline.ops) if op >= 0 and timeline.op_rows[op].step == step)
    first = next(of_step, 0)
    columns = {name: getattr(timeline, name)[first:] for name in ("ticks", "allocated", "reserved", "ops")}
    causes = {name: column[first:] for name, column in timeline.causes.items()}
    spans = (replace(spans[0], start=columns["ticks"][0]), *spans[1:]) if first else spans
    return replace(timeline, **columns, causes=causes, spans=spans)


def of_frontier(frontier: Frontier, peers: Sequence[Fields], plan: Plan | None) -> Chart:
    """Chart plans and measured baselines by peak and by seconds in addition to the predicted step.

    ``peers`` are the baselines' rows of the saved JSON, ``plan`` is marked as the plan of the page.
    """
    base = frontier.step_seconds or 0.0
    points = [
        {
            "peak": point.peak,
            "seconds": point.seconds,
            "group": "planned, lossy" if point.lost else "planned",
            "text": point.lost or "planned",
        }
        for point in frontier.points
    ]
    points.append({"peak": frontier.eager_peak, "seconds": 0.0, "group": "without a plan", "text": "without a plan"})
    if plan is not None:
        points.append({"peak": plan.peak, "seconds": plan.seconds, "group": "this plan", "text": "this plan"})
    for row in peers:
        ratio = row.maybe("ratio", float)
        if ratio is not None:
            added = (ratio - 1) * (base or (row.maybe("seconds", float) or 0.0) / ratio)
            name = f"{row.get('name', str)}, gradients {row.get('gradients', str)}"
            points.append({"peak": row.get("peak", int), "seconds": added, "group": "measured", "text": name})
    budget = None if plan is None else plan.budget
    return Chart("frontier", "Peak against time", {"points": points, "base": base, "budget": budget})


def of_layouts(result: Layouts) -> Chart:
    """Chart layouts by what a rank needs and by the least time of a step."""
    points = [
        {
            "peak": row.needs,
            "seconds": row.seconds,
            "group": "fits" if row.fits else "does not fit",
            "text": f"{row.layout.title}, micro-batches of {row.layout.micro_batch}",
        }
        for row in result.rows
        if row.needs
    ]
    axes = ["a rank needs", "seconds of a step, at least"]
    data = {"points": points, "base": 0, "budget": result.capacity, "axes": axes}
    return Chart("frontier", "Memory against time", data)


def of_sweep(sweep: Sweep) -> Chart:
    """Chart a sweep: for each point, the indices of its values on the axes, and its peak by category."""
    # reversed, so that a value that an axis lists twice gets its first index
    indices = {
        name: {value: index for index, value in reversed([*enumerate(values)])} for name, values in sweep.axes.items()
    }
    rows: list[dict[str, Any]] = []
    for row in sweep.rows:
        values = [by_value[row[name]] for name, by_value in indices.items()]
        if row["status"] == "ok":
            rows.append({"values": values, "peak": row["peak"], "peak_high": row["peak_high"], "parts": parts_of(row)})
        else:
            rows.append({"values": values, "reason": row["reason"]})
    axes = [{"name": name, "texts": [shown(value) for value in values]} for name, values in sweep.axes.items()]
    hint = "Move a slider, also with the arrow keys: the bars are those of the sweep's own points."
    data = {"axes": axes, "rows": rows, "capacity": _capacity(sweep.device)}
    return Chart("sweep", "Peak by cause at each point", data, hint=hint)


def parts_of(row: dict[str, Any]) -> dict[str, int]:
    """Return the bytes of a point by category; they add up to its peak."""
    known = {cause: row[cause] for cause in KNOWN}
    return known | {"workspace": row["workspace_low"], "rounding": row["rounding"]}


def _capacity(device: str) -> int | None:
    """Return the usable bytes of a card of the catalogue; None for another device."""
    try:
        return find(device).usable("low")
    except DeviceError:
        return None


def of_comparison(comparison: Comparison) -> Chart:
    """Chart the peaks of two steps side by side."""
    rows = [row for row in comparison.by_cause if row.cause in LOOKS and row.a >= 0 <= row.b]
    names = [comparison.a.title, comparison.b.title]
    return bars_side_by_side("Peaks side by side, by cause", names, {row.cause: [row.a, row.b] for row in rows})


def bars_side_by_side(
    label: str, names: Sequence[str], causes: Mapping[str, Sequence[int]], capacities: Sequence[int | None] = ()
) -> Chart:
    """Chart bars of bytes by category, one for each name, with its capacity if there is one."""
    data = {"names": list(names), "causes": causes, "capacities": list(capacities) or [None] * len(names)}
    return Chart("beside", label, data)


def of_replay(data: Fields) -> Iterator[Chart]:
    """Yield the charts of a saved replay that has them: memory over time, segments and their blocks."""
    over_time = data.inner("over_time")
    if over_time is not None:
        columns = {key: list(over_time.get(key, tuple[int, ...])) for key in ("events", "allocated", "reserved")}
        # columns of unequal lengths are of a damaged file
        if columns["events"] and len({len(column) for column in columns.values()}) == 1:
            series = {
                "name": "", "ticks": columns["events"], "allocated": columns["allocated"],
                "reserved": columns["reserved"], "causes": {IN_USE: columns["allocated"]},
                "ops": [-1] * len(columns["events"]), "opRows": [], "spans": [],
            }  # fmt: skip
            yield Chart("time", "Memory over time", {"series": [series], "capacity": None, "budget": None})
    segments: list[dict[str, Any]] = []
    for row in data.rows("blocks"):
        blocks = [
            [offset, block_bytes, IN_USE if state else "", f"{format_bytes(requested)} asked for" if state else "free"]
            for offset, block_bytes, state, requested in row.get("blocks", tuple[tuple[int, int, str, int], ...])
        ]
        segments.append({"size": row.get("bytes", int), "name": f"stream {row.get('stream', int)}", "blocks": blocks})
    if segments:
        free = sum(block[1] for segment in segments for block in segment["blocks"] if not block[2])
        total = sum(segment["size"] for segment in segments)
        hint = f"{format_bytes(total)} reserved, {format_bytes(free)} of it in free blocks."
        chart_data = {"segments": segments, "free": free, "reserved": total}
        yield Chart("allocator", "Segments and blocks", chart_data, hint=hint)
