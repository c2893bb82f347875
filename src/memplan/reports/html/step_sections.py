"""An explanation on a page: memory over time, by layer, alive at the peak, the allocator's view."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memplan._bytes import format_bytes
from memplan.explanation.course import Alive, Course, PeakBlock, PeakSegment
from memplan.explanation.model import (
    LABELS,
    Explanation,
    LayerRow,
    peak_sentence,
    scaling_sentence,
    smaller_plans_sentence,
    verdict_sentence,
    workspace_sentence,
)
from memplan.reports.html.page_parts import Cell, Chart, Mood, Paragraphs, Result, Section, share, size, table, text
from memplan.trace.records import Assumption

_SEGMENTS = 48
"""Segments that are drawn one by one: the largest."""
_LAYERS = 1000
"""Layers in the table: those that save the most."""
_DEEPEST = 32
"""Levels of the tree of layers; deeper ones stay together."""
_THIN = 500
"""A block below this share of the largest segment is drawn together with its neighbours of the same cause."""


def step_result(explanation: Explanation, kind: str = "explanation") -> Result:
    """Return an explanation as it is shown."""
    timeline, use = explanation.timeline, explanation.card
    facts = [("peak", format_bytes(timeline.peak_allocated))]
    if timeline.peak_reserved != timeline.peak_allocated:
        facts.append(("reserved", format_bytes(timeline.peak_reserved)))
    if use is not None:
        needs, high = format_bytes(use.verdict.low), format_bytes(use.verdict.high)
        facts.append(("nvidia-smi", needs if needs == high else f"{needs} to {high}"))
    if explanation.train:
        facts.append(("saved for backward", format_bytes(explanation.saved_bytes)))
    mood, capacity = _mood(explanation)
    lines = (
        explanation.sentence if use is not None else None,
        workspace_sentence(explanation),
        peak_sentence(explanation),
        scaling_sentence(explanation),
        None if use is None else smaller_plans_sentence(use),
    )
    what = "training step" if explanation.train else "inference"
    return Result(
        kind,
        f"{explanation.title}: {what} on {explanation.device}",
        explanation.sentence if use is None else verdict_sentence(use),
        mood,
        tuple(facts),
        tuple(_sections(explanation, capacity)),
        tuple(line for line in lines if line),
        causes=explanation.by_cause,
        peak=timeline.peak_allocated,
        capacity=capacity,
        remarks=(*map(_assumed, explanation.assumptions), *explanation.notes),
    )


def _mood(explanation: Explanation) -> tuple[Mood, int | None]:
    if explanation.card is None:
        return "plain", None
    verdict = explanation.card.verdict
    moods: dict[str, Mood] = {"fits": "good", "does not fit": "bad"}
    return moods.get(verdict.answer, "plain"), verdict.capacity


def _sections(explanation: Explanation, capacity: int | None) -> Iterator[Section]:
    course = explanation.course
    if course is None or not course.ticks:
        yield Section(
            "Memory over time", (Paragraphs(("This file has no memory over time: explain the step again.",)),)
        )
    else:
        yield Section("Memory over time", (over_time([("", course)], capacity),))
    yield Section("At the peak, by cause", tuple(_by_cause(explanation)))
    if explanation.layers:
        yield Section("By layer", tuple(_by_layer(explanation)))
    if course is not None and course.alive:
        yield Section("Alive at the peak", (_alive(explanation, course),))
    if course is not None and course.segments:
        yield Section("The allocator at the peak", (allocator_chart(course.segments, course.alive),))


def over_time(courses: list[tuple[str, Course]], capacity: int | None = None, budget: int | None = None) -> Chart:
    """Return the picture of memory over time, of one step or of several on one axis; the last one is stacked."""
    series = [
        {
            "name": name,
            "ticks": course.ticks,
            "allocated": course.allocated,
            "reserved": course.reserved if course.reserved != course.allocated else [],
            "causes": course.causes,
            "ops": course.ops,
            "opRows": [[op.name, op.layer, op.where or "", op.phase, op.step] for op in course.op_rows],
            "spans": [[span.phase, span.step, span.start, span.end] for span in course.spans],
        }
        for name, course in courses
    ]
    _, last = courses[-1]
    hints = ["Drag to zoom, double-click for all", "arrow keys move along the step, p goes to the peak"]
    if len(courses) == 1 and len(last.ticks) < last.total:
        hints.append(f"{len(last.ticks):,} of {last.total:,} moments are drawn, every peak among them")
    return Chart(
        "time",
        "Memory over time, by cause",
        {"series": series, "capacity": capacity, "budget": budget},
        hint="; ".join(hints) + ".",
    )


def _by_cause(explanation: Explanation) -> Iterator[Any]:
    peak, most = explanation.timeline.peak_allocated, explanation.by_cause_most
    causes = {cause: number for cause, number in explanation.by_cause.items() if number or most.get(cause)}
    rows = [
        (text(LABELS.get(cause, cause)), size(number), Cell(share(number, peak), number), size(most.get(cause, number)))
        for cause, number in sorted(causes.items(), key=lambda item: -item[1])
    ]
    yield table("By cause", ("cause", "at the peak", "share", "most at any time"), rows)
    if explanation.scaling is not None:
        scaling = explanation.scaling
        lines = [[line.fixed, line.per_sample] for line in scaling.lines]
        yield Chart(
            "batch",
            "Peak at another batch",
            {"lines": lines, "batch": scaling.batches[0], "batches": scaling.batches, "peaks": scaling.peaks},
        )


def _by_layer(explanation: Explanation) -> Iterator[Any]:
    at_peak: dict[str, int] = {}
    for holder in explanation.holders:
        at_peak[holder.layer] = at_peak.get(holder.layer, 0) + holder.bytes
    saved = {row.name: row.saved_bytes for row in explanation.layers}
    nodes = _tree({**saved, **{name: 0 for name in at_peak if name not in saved}}, at_peak)
    controls = (("saved", "what each saves"), ("peak", "share of the peak"))
    if not any(saved.values()):
        controls = controls[1:]
    yield Chart("layers", "Layers by bytes", {"nodes": nodes}, controls, "Click a layer to go in.")
    rows = [_layer_cells(row, at_peak.get(row.name, 0), explanation.train) for row in explanation.layers]
    rows.sort(key=lambda row: (-(row[2].sort or 0), -(row[3].sort or 0)))
    headers = ("layer", "kind", "saves", "at the peak", "outputs", "weights", "why", "shared with", "needed for", "at")
    yield table("Layers", headers, rows, _LAYERS, "{} layers that save less are not listed; the picture has them.")


def _layer_cells(row: LayerRow, at_peak: int, train: bool) -> tuple[Cell, ...]:
    shared = row.kept_bytes and not row.saved_bytes
    saves = Cell("(shared)", 0) if shared else size(row.saved_bytes)
    return (
        Cell(row.name, layer=row.name),
        text(row.kind),
        saves,
        size(at_peak),
        size(row.output_bytes),
        size(row.weight_bytes),
        text("; ".join(row.why)),
        text(", ".join(row.shared_with)),
        text(", ".join(need.replace("_", " ") for need in row.needed_for) if row.kept_bytes else ""),
        text(row.where),
    )


def _tree(saved: dict[str, int], at_peak: dict[str, int]) -> list[list[Any]]:
    """Return the tree of layers: path, label, path of the parent (None for the root), and the bytes below and at each.

    The root's path is ""; a layer's own bytes beside those of its parts are the rest of its total.
    """
    totals: dict[tuple[str, ...], list[int]] = {(): [0, 0]}
    for name in saved | at_peak:
        parts = tuple(name.split(".", _DEEPEST)) if name else ("(outside of layers)",)
        for depth in range(len(parts) + 1):
            found = totals.setdefault(parts[:depth], [0, 0])
            found[0] += saved.get(name, 0)
            found[1] += at_peak.get(name, 0)
    nodes = []
    for path, (kept, held) in totals.items():
        parent = None if not path else ".".join(path[:-1])
        nodes.append([".".join(path), path[-1] if path else "all", parent, kept, held])
    return nodes


def _alive(explanation: Explanation, course: Course) -> Any:
    end = max(course.ticks[-1], 1)
    rows = [_alive_cells(one, end) for one in course.alive]
    listed = sum(one.bytes for one in course.alive)
    rest = explanation.timeline.peak_allocated - listed
    return table_with_rest(rows, rest)


def table_with_rest(rows: list[tuple[Cell, ...]], rest: int) -> Any:
    """Return the table of storages, with the bytes of those that are not listed."""
    headers = ("storage", "cause", "bytes", "birth to death", "shape", "layer", "at")
    found = table("Storages", headers, rows)
    more = f"Smaller storages and rounding: {format_bytes(rest)}." if rest else ""
    return type(found)(found.name, found.headers, found.rows, found.numeric, more)


def _alive_cells(one: Alive, end: int) -> tuple[Cell, ...]:
    until = end if one.died is None else one.died
    what = f"{one.name or '–'} ({one.engine})" if one.engine else one.name
    stays = "stays" if one.died is None else f"to {one.died:,}"
    return (
        text(what),
        text(LABELS.get(one.cause, one.cause)),
        size(one.bytes),
        Cell(f"{one.born:,} {stays}", one.born, (one.born / end, min(until, end) / end)),
        text(f"{'x'.join(map(str, one.shape))} {one.dtype}".strip()),
        text(one.layer),
        text(one.where),
    )


def allocator_chart(segments: tuple[PeakSegment, ...], alive: tuple[Alive, ...]) -> Chart:
    """Return the picture of segments and their blocks, the largest segments first."""
    ordered = sorted(segments, key=lambda one: -one.size)
    least = ordered[0].size // _THIN
    drawn = [_drawn(segment, alive, least) for segment in ordered[:_SEGMENTS]]
    free = sum(block.size for one in segments for block in one.blocks if block.state == "inactive")
    total = sum(one.size for one in segments)
    hint = f"{len(segments)} segments, {format_bytes(total)} reserved, {format_bytes(free)} of it in free blocks"
    rest = ordered[_SEGMENTS:]
    if rest:
        hint += f"; {len(rest)} smaller ones of {format_bytes(sum(one.size for one in rest))} are not drawn"
    return Chart(
        "allocator", "Segments and blocks", {"segments": drawn, "free": free, "reserved": total}, hint=f"{hint}."
    )


def _drawn(segment: PeakSegment, alive: tuple[Alive, ...], least: int) -> dict[str, Any]:
    """Return a segment with its blocks: offset, size, cause ("" where free), text; small neighbours together."""
    blocks: list[list[Any]] = []
    for block in segment.blocks:
        cause = "" if block.state == "inactive" else block.cause
        small = block.size <= least
        if small and blocks and blocks[-1][2] == cause and blocks[-1][4]:
            blocks[-1][1] += block.size
            blocks[-1][4] += 1
            blocks[-1][3] = f"{blocks[-1][4]} small blocks"
        else:
            blocks.append([block.offset, block.size, cause, _block_text(block, alive), int(small)])
    pool = "small requests" if segment.small else "large requests"
    stream = f", stream {segment.stream}" if segment.stream else ""
    return {"size": segment.size, "name": f"{pool}{stream}", "blocks": [block[:4] for block in blocks]}


def _block_text(block: PeakBlock, alive: tuple[Alive, ...]) -> str:
    if block.state == "inactive":
        return "free"
    if block.alive < 0:
        return "waits for a stream" if block.state == "active_pending_free" else ""
    one = alive[block.alive]
    place = f" of {one.layer}" if one.layer and not one.name.startswith(one.layer) else ""
    engine = f": {one.engine}" if one.engine else ""
    return f"{one.name}{place}{engine}"


def _assumed(one: Assumption) -> str:
    times = f" ({one.count} times)" if one.count > 1 else ""
    kind = "kernel" if one.kind == "kernel" else "assumed"
    return f"{kind}: {one.text}{times}" + (f", at {one.where}" if one.where else "")
