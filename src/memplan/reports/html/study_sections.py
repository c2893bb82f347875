"""Studies on a page: sweeps with their sliders, the largest value that fits, comparisons, guards, quantization."""

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
    """Return a sweep as it is shown."""
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
    told = [*map(str, sweep.fits), *map(str, sweep.crossings), *map(str, sweep.engine_changes)]
    if told:
        yield Section("What grows", (Paragraphs(tuple(told)),))
    causes = [cause for cause in LOOKS if any(_parts(row).get(cause) for row in sweep.rows if row["status"] == "ok")]
    rows = [_sweep_cells(sweep, row, causes) for row in sweep.rows]
    failed = any(row["status"] != "ok" for row in sweep.rows)
    headers = (*sweep.axes, "peak", "reserved", *(LABELS[cause] for cause in causes), *["failed"] * failed)
    yield Section("Points", (table("Points", headers, [row[: len(headers)] for row in rows]),))


def _sliders(sweep: Sweep) -> Chart:
    """Return the picture of a sweep: for each point, the places of its values on the axes, and parts of its peak."""
    axes = {
        name: {value: place for place, value in reversed([*enumerate(values)])} for name, values in sweep.axes.items()
    }
    rows: list[dict[str, Any]] = []
    for row in sweep.rows:
        place = [axes[name][row[name]] for name in axes]
        if row["status"] == "ok":
            rows.append({"values": place, "peak": row["peak"], "peak_high": row["peak_high"], "parts": _parts(row)})
        else:
            rows.append({"values": place, "reason": row["reason"]})
    named = [{"name": name, "texts": [shown(value) for value in values]} for name, values in sweep.axes.items()]
    hint = "Move a slider, also with the arrow keys: the bars are those of the sweep's own points."
    data = {"axes": named, "rows": rows, "capacity": _capacity(sweep.device)}
    return Chart("sweep", "Peak by cause at each point", data, hint=hint)


def _parts(row: dict[str, Any]) -> dict[str, int]:
    """Return the causes of a point; they add up to its peak."""
    found = {cause: row[cause] for cause in KNOWN}
    return found | {"workspace": row["workspace_low"], "rounding": row["rounding"]}


def _capacity(device: str) -> int | None:
    try:
        return find(device).usable("low")
    except DeviceError:
        return None


def _sweep_cells(sweep: Sweep, row: dict[str, Any], causes: list[str]) -> tuple[Cell, ...]:
    values = [row[name] for name in sweep.axes]
    head = [Cell(shown(one), one if isinstance(one, (int, float)) else None) for one in values]
    if row["status"] != "ok":
        return (*head, *[Cell("–", -1)] * (len(causes) + 2), text(row["reason"]))
    parts = _parts(row)
    return (*head, size(row["peak"]), size(row["reserved"]), *(size(parts[cause]) for cause in causes), text(""))


def largest_result(data: Fields) -> Result:
    """Return what `memplan largest --json` writes as it is shown."""
    title, axis, value, limit = (
        data.get("title", str), data.get("axis", str), data.get("value", int), data.get("limit", int)
    )  # fmt: skip
    room = f"{format_bytes(limit)} ({data.get('device', str)})"
    verdict = f"The largest {axis} in {room} is {value}." if value else f"No {axis} fits {room}."
    sections = [Section("Tried", tuple(_tried(data, axis)))]
    planned = data.inner("planned")
    if planned is not None:
        most = planned.get("value", int)
        lines = Paragraphs((f"With a plan, the largest {axis} is {most}.",))
        sections.append(Section("Planned", (lines, *_tried(planned, axis))))
    facts = (("largest", str(value)), ("room", format_bytes(limit)))
    mood: Mood = "good" if value else "bad"
    remarks = data.texts("notes")
    return Result("largest", f"{title}: largest {axis}", verdict, mood, facts, tuple(sections), remarks=remarks)


def _tried(data: Fields, axis: str) -> Iterator[Part]:
    """Yield what was recorded to find the largest: by cause as a picture, and a table of what each takes and needs."""
    tried = sorted(data.rows("tried"), key=lambda row: row.get("value", int))
    recorded = [row for row in tried if row.maybe("peak", int) is not None]
    if recorded:
        parts = [row.sizes_of((*KNOWN, "rounding")) | {"workspace": row.get("workspace_low", int)} for row in recorded]
        causes = {cause: [one[cause] for one in parts] for cause in LOOKS if any(one.get(cause) for one in parts)}
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
    shown = [place for place, _ in enumerate(headers) if not 1 <= place <= 2 or (recorded and (on_card or place == 1))]
    yield table("Tried", [headers[place] for place in shown], [[row[place] for place in shown] for row in rows])
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
    """Return what `memplan compare --json` writes as it is shown."""
    a, b = data.part("a"), data.part("b")
    before, after = a.get("peak", int), b.get("peak", int)
    names = (a.get("title", str), b.get("title", str))
    verdict = f"{format_bytes(before)} -> {format_bytes(after)} peak: {changed(before, after)}."
    causes = [[row.get("cause", str), row.get("a", int), row.get("b", int)] for row in data.rows("by_cause")]
    rows = [
        (text(CAUSE_LABELS.get(cause, cause)), size(one), size(other), Cell(signed(other - one), other - one))
        for cause, one, other in causes
    ]
    shown_causes = {cause: [one, other] for cause, one, other in causes if cause in LOOKS and one >= 0 <= other}
    picture = {"names": list(names), "causes": shown_causes, "capacities": [None, None]}
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
    found = row.signed(key)
    return Cell(signed(found), found)


def guard_result(data: Fields) -> Result:
    """Return what `memplan guard --json` writes as it is shown."""
    before, now = data.part("before"), data.part("now")
    was, peak, grew = before.get("peak", int), now.get("peak", int), data.get("grew", bool)
    verdict = f"{format_bytes(was)} -> {format_bytes(peak)} peak: {changed(was, peak)}."
    rows = [
        (text(row.get("name", str)), Cell(signed(row.signed("difference")), row.signed("difference")))
        for row in data.rows("changes")
    ]
    facts = (("baseline", format_bytes(was)), ("now", format_bytes(peak)))
    parts = (table("Changes", ("what changed", "bytes"), rows),)
    named = f"{now.get('target', str)} {now.get('options', str)}".strip()
    title = f"{named} on {now.get('device', str)}"
    mood: Mood = "bad" if grew else "good"
    return Result("guard", title, verdict, mood, facts, (Section("What changed", parts),), remarks=data.texts("notes"))


def quantized_result(data: Fields) -> Result:
    """Return what `memplan explain --weights int8 --json` writes as it is shown."""
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
    """Return what a `memplan.watch` saved as it is shown."""
    rows = data.rows("rows")
    measured = [row.get("peak", int) for row in rows if row.maybe("peak", int) is not None]
    predicted = data.maybe("predicted", int)
    most = f"at most {format_bytes(max(measured))} measured" if measured else "no step was measured"
    also = "" if predicted is None else f", {format_bytes(predicted)} predicted"
    leaks = [str(row.get("held_by", str)) for row in data.rows("leaks")]
    verdict = f"{data.get('steps', int)} steps on {data.get('device', str)}: {most}{also}; {len(leaks)} leaks."
    cells = [
        (
            Cell(str(row.get("step", int)), row.get("step", int)), seconds(row.get("seconds", float)),
            size(row.maybe("peak", int)), size(row.maybe("held", int)), size(row.maybe("predicted", int)),
        )
        for row in rows
    ]  # fmt: skip
    sections = [Section("Steps", (table("Steps", ("step", "seconds", "peak", "held", "predicted"), cells),))]
    found = [
        (
            text(row.get("op", str)), text(row.get("layer", str)), size(row.get("bytes", int)),
            text(row.get("held_by", str)), text(row.maybe("where", str)), text(row.maybe("kept_at", str)),
        )
        for row in data.rows("leaks")
    ]  # fmt: skip
    if found:
        headers = ("op", "layer", "bytes a step", "held by", "made at", "stored at")
        sections.insert(0, Section("Leaks", (table("Leaks", headers, found),)))
    mood: Mood = "bad" if leaks else "plain"
    return Result("watched run", "A watched run", verdict, mood, (), tuple(sections), remarks=data.texts("notes"))
