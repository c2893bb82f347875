"""HTML sections of an explanation: memory over time, by category, by layer, live storages, allocator segments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
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
from memplan.reports.html.page_parts import (
    Cell,
    Chart,
    Mood,
    Paragraphs,
    Part,
    Result,
    Section,
    Table,
    size,
    table,
    text,
)
from memplan.reports.output import format_share
from memplan.trace.records import Assumption

_SEGMENTS = 48
"""How many segments are drawn, the largest first."""
_LAYERS = 1000
"""How many layers the table lists, those that save the most first."""
_DEEPEST = 32
"""Depth of the layer tree; deeper module paths share a node."""
_THIN = 500
"""Adjacent blocks of a category are merged if they are below the largest segment's size divided by this."""


def step_result(explanation: Explanation, kind: str = "explanation") -> Result:
    """Return the page content of an explanation."""
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
    step = "training step" if explanation.train else "inference"
    return Result(
        kind,
        f"{explanation.title}: {step} on {explanation.device}",
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
        yield Section("Alive at the peak", (_live_storages(explanation, course),))
    if course is not None and course.segments:
        yield Section("The allocator at the peak", (allocator_chart(course.segments, course.alive),))


def over_time(courses: list[tuple[str, Course]], capacity: int | None = None, budget: int | None = None) -> Chart:
    """Chart memory over time. Of several named timelines only the last is split by category, the others are lines."""
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


def _by_cause(explanation: Explanation) -> Iterator[Part]:
    peak, most = explanation.timeline.peak_allocated, explanation.by_cause_most
    causes = {cause: number for cause, number in explanation.by_cause.items() if number or most.get(cause)}
    rows = [
        (text(LABELS.get(cause, cause)), size(n), Cell(format_share(n, peak), n), size(most.get(cause, n)))
        for cause, n in sorted(causes.items(), key=lambda item: -item[1])
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


def _by_layer(explanation: Explanation) -> Iterator[Part]:
    at_peak: dict[str, int] = {}
    for owner in explanation.holders:
        at_peak[owner.layer] = at_peak.get(owner.layer, 0) + owner.bytes
    saved = {row.name: row.saved_bytes for row in explanation.layers}
    nodes = _tree(saved, at_peak)
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
    """Return a node for each layer and each enclosing module: [path, label, parent's path, saved, at peak].

    The bytes include those of the submodules. The root has path "" and parent None.
    """
    totals: dict[tuple[str, ...], list[int]] = {(): [0, 0]}
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


def _live_storages(explanation: Explanation, course: Course) -> Table:
    """Return the table of storages alive at the peak, with the bytes of those that are too small to be listed."""
    end = max(course.ticks[-1], 1)
    headers = ("storage", "cause", "bytes", "birth to death", "shape", "layer", "at")
    storages = table("Storages", headers, [_storage_cells(storage, end) for storage in course.alive])
    unlisted = explanation.timeline.peak_allocated - sum(storage.bytes for storage in course.alive)
    return replace(storages, more=f"Smaller storages and rounding: {format_bytes(unlisted)}." if unlisted else "")


def _storage_cells(storage: Alive, end: int) -> tuple[Cell, ...]:
    freed = end if storage.died is None else storage.died
    name = f"{storage.name or '–'} ({storage.engine})" if storage.engine else storage.name
    until = "stays" if storage.died is None else f"to {storage.died:,}"
    return (
        text(name),
        text(LABELS.get(storage.cause, storage.cause)),
        size(storage.bytes),
        Cell(f"{storage.born:,} {until}", storage.born, (storage.born / end, min(freed, end) / end)),
        text(f"{'x'.join(map(str, storage.shape))} {storage.dtype}".strip()),
        text(storage.layer),
        text(storage.where),
    )


def allocator_chart(segments: tuple[PeakSegment, ...], alive: tuple[Alive, ...]) -> Chart:
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


def _segment_data(segment: PeakSegment, alive: tuple[Alive, ...], merge_below: int) -> dict[str, Any]:
    """Return a segment for the chart; each block is [offset, size, category or "" if free, text].

    Adjacent blocks of a category of at most ``merge_below`` bytes are merged.
    """
    blocks: list[list[Any]] = []
    for block in segment.blocks:
        cause = "" if block.state == "inactive" else block.cause
        small = block.size <= merge_below
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
    storage = alive[block.alive]
    layer = f" of {storage.layer}" if storage.layer and not storage.name.startswith(storage.layer) else ""
    engine = f": {storage.engine}" if storage.engine else ""
    return f"{storage.name}{layer}{engine}"


def _assumed(assumption: Assumption) -> str:
    times = f" ({assumption.count} times)" if assumption.count > 1 else ""
    kind = "kernel" if assumption.kind == "kernel" else "assumed"
    return f"{kind}: {assumption.text}{times}" + (f", at {assumption.where}" if assumption.where else "")
