"""HTML sections of studies: sweeps with sliders, largest values, comparisons, guards, quantization, watched runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memplan._bytes import format_bytes
from memplan.devices import find
from memplan.errors import DeviceError
from memplan.explanation.model import LABELS
from memplan.reports.html.fields import Fields
from memplan.reports.html.page_parts import (
    Cell,
    Chart,
    Mood,
    Paragraphs,
    Part,
    Result,
    Section,
    seconds,
    size,
    table,
    text,
)
from memplan.reports.html.palette import LOOKS
from memplan.studies.comparisons.comparison import CAUSE_LABELS, changed, signed
from memplan.studies.sweeps.fits import shown
from memplan.studies.sweeps.points import KNOWN
from memplan.studies.sweeps.sweep import Sweep


def sweep_result(sweep: Sweep) -> Result:
    """Return the page content of a sweep."""
    done = [row for row in sweep.rows if row["status"] == "ok"]
    peaks = [row["peak"] for row in done]
    span = f"peaks from {format_bytes(min(peaks))} to {format_bytes(max(peaks))}" if peaks else "no peak"
    facts = (("points", f"{len(sweep.rows)} of {sweep.points}"), ("device", sweep.device))
    return Result(
        "sweep",
        f"{sweep.title} on {sweep.device}",
        f"{len(sweep.rows)} points of {', '.join(sweep.axes)}: {span}.",
        "plain",
        facts,
        tuple(_sweep_sections(sweep)),
        remarks=sweep.notes,
    )


def _sweep_sections(sweep: Sweep) -> Iterator[Section]:
    yield Section("What if", (_sliders(sweep),))
    sentences = [*map(str, sweep.fits), *map(str, sweep.crossings), *map(str, sweep.engine_changes)]
    if sentences:
        yield Section("What grows", (Paragraphs(tuple(sentences)),))
    causes = [cause for cause in LOOKS if any(_parts(row).get(cause) for row in sweep.rows if row["status"] == "ok")]
    rows = [_sweep_cells(sweep, row, causes) for row in sweep.rows]
    failed = any(row["status"] != "ok" for row in sweep.rows)
    headers = (*sweep.axes, "peak", "reserved", *(LABELS[cause] for cause in causes), *["failed"] * failed)
    yield Section("Points", (table("Points", headers, [row[: len(headers)] for row in rows]),))


def _sliders(sweep: Sweep) -> Chart:
    """Chart a sweep: for each point, the indices of its values on the axes, and its peak by category."""
    # reversed, so that a value that an axis lists twice gets its first index
    indices = {
        name: {value: index for index, value in reversed([*enumerate(values)])} for name, values in sweep.axes.items()
    }
    rows: list[dict[str, Any]] = []
    for row in sweep.rows:
        values = [by_value[row[name]] for name, by_value in indices.items()]
        if row["status"] == "ok":
            rows.append({"values": values, "peak": row["peak"], "peak_high": row["peak_high"], "parts": _parts(row)})
        else:
            rows.append({"values": values, "reason": row["reason"]})
    axes = [{"name": name, "texts": [shown(value) for value in values]} for name, values in sweep.axes.items()]
    hint = "Move a slider, also with the arrow keys: the bars are those of the sweep's own points."
    data = {"axes": axes, "rows": rows, "capacity": _capacity(sweep.device)}
    return Chart("sweep", "Peak by cause at each point", data, hint=hint)


def _parts(row: dict[str, Any]) -> dict[str, int]:
    """Return the bytes of a point by category; they add up to its peak."""
    known = {cause: row[cause] for cause in KNOWN}
    return known | {"workspace": row["workspace_low"], "rounding": row["rounding"]}


def _capacity(device: str) -> int | None:
    try:
        return find(device).usable("low")
    except DeviceError:
        return None


def _sweep_cells(sweep: Sweep, row: dict[str, Any], causes: list[str]) -> tuple[Cell, ...]:
    values = [row[name] for name in sweep.axes]
    head = [Cell(shown(value), value if isinstance(value, (int, float)) else None) for value in values]
    if row["status"] != "ok":
        return (*head, *[Cell("–", -1)] * (len(causes) + 2), text(row["reason"]))
    parts = _parts(row)
    return (*head, size(row["peak"]), size(row["reserved"]), *(size(parts[cause]) for cause in causes), text(""))


def largest_result(data: Fields) -> Result:
    """Return the page content of `memplan largest --json`."""
    title, axis, value, limit = (
        data.get("title", str), data.get("axis", str), data.get("value", int), data.get("limit", int)
    )  # fmt: skip
    room = f"{format_bytes(limit)} ({data.get('device', str)})"
    verdict = f"The largest {axis} in {room} is {value}." if value else f"No {axis} fits {room}."
    sections = [Section("Tried", tuple(_trials(data, axis)))]
    planned = data.inner("planned")
    if planned is not None:
        sentence = Paragraphs((f"With a plan, the largest {axis} is {planned.get('value', int)}.",))
        sections.append(Section("Planned", (sentence, *_trials(planned, axis))))
    facts = (("largest", str(value)), ("room", format_bytes(limit)))
    mood: Mood = "good" if value else "bad"
    remarks = data.texts("notes")
    return Result("largest", f"{title}: largest {axis}", verdict, mood, facts, tuple(sections), remarks=remarks)


def _trials(data: Fields, axis: str) -> Iterator[Part]:
    """Yield a chart of the recorded peaks by category, and a table of all values tried."""
    tried = sorted(data.rows("tried"), key=lambda row: row.get("value", int))
    recorded = [row for row in tried if row.maybe("peak", int) is not None]
    if recorded:
        parts = [row.sizes_of((*KNOWN, "rounding")) | {"workspace": row.get("workspace_low", int)} for row in recorded]
        causes = {
            cause: [sizes[cause] for sizes in parts] for cause in LOOKS if any(sizes.get(cause) for sizes in parts)
        }
        names = [f"{axis} {row.get('value', int)}" for row in recorded]
        picture = {"names": names, "causes": causes, "capacities": [data.maybe("limit", int)] * len(names)}
        yield Chart("beside", f"Peak by cause at each {axis}", picture)
    on_card = data.maybe("device", str) != "cpu"
    need = "least budget" if any(row.maybe("least_budget", int) for row in tried) else "needs"
    headers = (
        axis,
        "peak",
        "with workspaces",
        "reserved, with context" if recorded and on_card else need,
        "fits",
        "why",
    )
    rows = [
        (
            Cell(str(row.get("value", int)), row.get("value", int)), size(row.maybe("peak", int)),
            size(row.maybe("peak_high", int)), size(row.maybe("need", int)),
            text("failed" if row.maybe("reason", str) else "fits" if row.get("fits", bool) else "does not fit"),
            text(row.maybe("reason", str)),
        )
        for row in tried
    ]  # fmt: skip
    hidden = () if recorded and on_card else (2,) if recorded else (1, 2)
    columns = [index for index in range(len(headers)) if index not in hidden]
    yield table("Tried", [headers[index] for index in columns], [[row[index] for index in columns] for row in rows])
    limit, answer = data.maybe("limit", int), data.maybe("value", int)
    beyond = [
        row for row in tried if row.get("value", int) == answer and limit and (row.maybe("need", int) or 0) > limit
    ]
    if beyond:
        yield Paragraphs((
            f"{axis} {answer} would reserve more than the limit; the allocator gives cached segments back then, and it "
            "was recorded to fit.",
        ))  # fmt: skip


def comparison_result(data: Fields) -> Result:
    """Return the page content of `memplan compare --json`."""
    a, b = data.part("a"), data.part("b")
    before, after = a.get("peak", int), b.get("peak", int)
    names = (a.get("title", str), b.get("title", str))
    verdict = f"{format_bytes(before)} -> {format_bytes(after)} peak: {changed(before, after)}."
    causes = [[row.get("cause", str), row.get("a", int), row.get("b", int)] for row in data.rows("by_cause")]
    rows = [
        (
            text(CAUSE_LABELS.get(cause, cause)),
            size(size_a),
            size(size_b),
            Cell(signed(size_b - size_a), size_b - size_a),
        )
        for cause, size_a, size_b in causes
    ]
    drawn = {cause: [size_a, size_b] for cause, size_a, size_b in causes if cause in LOOKS and size_a >= 0 <= size_b}
    picture = {"names": list(names), "causes": drawn, "capacities": [None, None]}
    parts = (
        Chart("beside", "Peaks side by side, by cause", picture),
        table("By cause", ("cause", "a", "b", "b - a"), rows),
    )
    sections = [Section("By cause", parts)]
    layers = [
        tuple(
            text(row.maybe(key, str)) if key in ("name", "a", "b") else _difference(row, key)
            for key in ("name", "a", "b", "output_bytes", "saved_bytes", "weight_bytes")
        )
        for row in data.rows("layers")
    ]
    if layers:
        headers = ("layer", "in a", "in b", "outputs, b - a", "saved, b - a", "weights, b - a")
        sections.append(Section("By layer", (table("Layers", headers, layers),)))
    facts = (("a", format_bytes(before)), ("b", format_bytes(after)))
    return Result("comparison", " and ".join(names), verdict, "plain", facts, tuple(sections))


def _difference(row: Fields, key: str) -> Cell:
    if row.plain.get(key) is None:
        return Cell("–", 0)
    difference = row.signed(key)
    return Cell(signed(difference), difference)


def guard_result(data: Fields) -> Result:
    """Return the page content of `memplan guard --json`."""
    before, now = data.part("before"), data.part("now")
    baseline, peak, grew = before.get("peak", int), now.get("peak", int), data.get("grew", bool)
    verdict = f"{format_bytes(baseline)} -> {format_bytes(peak)} peak: {changed(baseline, peak)}."
    rows = [
        (text(row.get("name", str)), Cell(signed(row.signed("difference")), row.signed("difference")))
        for row in data.rows("changes")
    ]
    facts = (("baseline", format_bytes(baseline)), ("now", format_bytes(peak)))
    parts = (table("Changes", ("what changed", "bytes"), rows),)
    command = f"{now.get('target', str)} {now.get('options', str)}".strip()
    title = f"{command} on {now.get('device', str)}"
    mood: Mood = "bad" if grew else "good"
    return Result("guard", title, verdict, mood, facts, (Section("What changed", parts),), remarks=data.texts("notes"))


def quantized_result(data: Fields) -> Result:
    """Return the page content of `memplan explain --weights int8 --json`."""
    title, saved = data.get("title", str), data.signed("weights_saved")
    rows = [
        (
            text(row.get("name", str)),
            size(row.get("before", int)),
            size(row.get("after", int)),
            text(row.maybe("why", str)),
        )
        for row in data.rows("layers")
    ]
    parts = (table("Layers", ("layer", "before", "after", "why not"), rows),)
    verdict = f"Weights quantized to {data.get('scheme', str)}: {format_bytes(saved)} less."
    return Result(
        "quantized", title, verdict, "plain", (), (Section("By layer", parts),), remarks=data.texts("notes")
    )  # fmt: skip


def watch_result(data: Fields) -> Result:
    """Return the page content of what `memplan.watch` saved."""
    rows = data.rows("rows")
    measured = [row.get("peak", int) for row in rows if row.maybe("peak", int) is not None]
    predicted = data.maybe("predicted", int)
    highest = f"at most {format_bytes(max(measured))} measured" if measured else "no step was measured"
    also = "" if predicted is None else f", {format_bytes(predicted)} predicted"
    leaks = [
        (
            text(row.get("op", str)), text(row.get("layer", str)), size(row.get("bytes", int)),
            text(row.get("held_by", str)), text(row.maybe("where", str)), text(row.maybe("kept_at", str)),
        )
        for row in data.rows("leaks")
    ]  # fmt: skip
    verdict = f"{data.get('steps', int)} steps on {data.get('device', str)}: {highest}{also}; {len(leaks)} leaks."
    cells = [
        (
            Cell(str(row.get("step", int)), row.get("step", int)), seconds(row.get("seconds", float)),
            size(row.maybe("peak", int)), size(row.maybe("held", int)), size(row.maybe("predicted", int)),
        )
        for row in rows
    ]  # fmt: skip
    sections = [Section("Steps", (table("Steps", ("step", "seconds", "peak", "held", "predicted"), cells),))]
    if leaks:
        headers = ("op", "layer", "bytes a step", "held by", "made at", "stored at")
        sections.insert(0, Section("Leaks", (table("Leaks", headers, leaks),)))
    mood: Mood = "bad" if leaks else "plain"
    return Result("watched run", "A watched run", verdict, mood, (), tuple(sections), remarks=data.texts("notes"))
