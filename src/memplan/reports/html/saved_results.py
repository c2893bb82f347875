"""Read saved results of every format for an HTML page: the report of each, and its charts."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from memplan import _json
from memplan._bytes import format_bytes
from memplan._json import Unreadable
from memplan._text import counted, format_seconds
from memplan.checks.finding import Findings
from memplan.cudnn.answer_cache import Kept
from memplan.devices.model import Device
from memplan.errors import BudgetError, InputError
from memplan.explanation.explain import explain_trace
from memplan.explanation.memory_timeline import MemoryTimeline
from memplan.explanation.model import LABELS, Explanation, verdict_sentence
from memplan.explanation.why_ranks import RankReasons
from memplan.planning.plan.plan import Plan
from memplan.reports import (
    cache,
    check,
    compare,
    devices,
    explain,
    fit,
    guard,
    layouts,
    on_cards,
    quantize,
    rank_snapshots,
    roles,
    sweep,
    watched,
    why,
)
from memplan.reports import plan as plans
from memplan.reports.document import (
    Code,
    Document,
    Field,
    Part,
    Section,
    Table,
    document,
    name_field,
    notes,
    number_field,
    table_of,
)
from memplan.reports.html import charts
from memplan.reports.html.fields import Fields
from memplan.reports.html.page_parts import Mood, Result
from memplan.reports.html.palette import LOOKS
from memplan.reports.largest import beyond_the_limit, fit_at_upper_end
from memplan.simulation.replays.ranks import RankSnapshots
from memplan.studies.capacity.on_cards import OnCards
from memplan.studies.comparisons.comparison import Comparison, change_text
from memplan.studies.comparisons.measured import MeasuredComparison, Peak
from memplan.studies.guarding.outcome import Outcome
from memplan.studies.layouts.layouts import Layouts
from memplan.studies.quantization.quantized import Quantized
from memplan.studies.roles.roles import Roles
from memplan.studies.sweeps.points import KNOWN
from memplan.studies.sweeps.sweep import Sweep
from memplan.studies.watched.watched import WatchedRanks, summary
from memplan.trace.trace import Trace
from memplan.verification.fitting import outcome as fitting
from memplan.verification.fitting.frontier import Frontier, Point
from memplan.verification.proof.proof import Proof

Reader = Callable[[Any, str], Result]
"""Takes the parsed JSON and the name of the source."""
_LAYERS = 1000
"""Number of layers to list, those that save the most first."""


def step_result(explanation: Explanation, kind: str = "explanation") -> Result:
    """Return the page content of an explanation."""
    use, timeline = explanation.card, explanation.course
    moods: dict[str, Mood] = {"fits": "good", "does not fit": "bad"}
    capacity = None if use is None else use.verdict.capacity
    text = explain.report(explanation, _LAYERS)
    if timeline is not None and timeline.alive:
        text += document(None, [], [_alive(explanation, timeline)])
    return Result(
        kind,
        text.heading,
        explanation.sentence if use is None else verdict_sentence(use),
        "plain" if use is None else moods.get(use.verdict.answer, "plain"),
        text,
        tuple(charts.of_step(explanation, capacity)),
        causes=explanation.by_cause,
        peak=explanation.timeline.peak_allocated,
        capacity=capacity,
    )


def _alive(explanation: Explanation, timeline: MemoryTimeline) -> Table:
    """Return a table of the largest storages live at the peak, and the bytes of the smaller storages."""
    end = max(timeline.ticks[-1], 1)
    unlisted = explanation.timeline.peak_allocated - sum(storage.bytes for storage in timeline.alive)
    fields = [
        name_field("Alive at the peak", lambda row: f"{row.name} ({row.engine})" if row.engine else row.name),
        Field("cause", lambda row: str(LABELS.get(row.cause, row.cause))),
        number_field("bytes", lambda row: row.bytes),
        Field(
            "allocated to freed",
            lambda row: f"{row.born:,} {'stays' if row.died is None else f'to {row.died:,}'}",
            number=lambda row: row.born,
            bar=lambda row: (row.born / end, min(end if row.died is None else row.died, end) / end),
        ),
        Field("shape", lambda row: f"{'x'.join(map(str, row.shape))} {row.dtype}".strip()),
        Field("layer", lambda row: row.layer, layers=True),
        Field("at", lambda row: row.where or ""),
    ]
    total = f"smaller storages and rounding: {format_bytes(unlisted)}; all" if unlisted else "all"
    return table_of(timeline.alive, fields, total=total)


def _explanation(explanation: Any, source: str) -> Result:
    """Return the page content of an explanation in JSON.

    Commands add two fields to it: ``beside``, predicted and measured peaks and their comparison, and ``script``, whose
    command is then the page's title in place of the model's name.
    """
    result, data = step_result(Explanation.from_dict(explanation, source)), Fields(explanation)
    measured, script = data.inner("beside"), data.inner("script")
    if measured is not None:
        path_in_errors = "it.beside.peaks"
        peaks = _json.from_plain(tuple[Peak, ...], measured.plain["peaks"], path_in_errors)
        comparison = MeasuredComparison(peaks, Comparison.from_dict(measured.part("comparison").plain, source))
        result = replace(result, document=result.document + compare.measured_report(comparison, _LAYERS))
    if script is not None:
        _, _, kind_and_device = result.title.partition(": ")  # after the model's name
        result = replace(result, title=f"{script.get('command', str)}: {kind_and_device}")
    return result


def _trace(plain: Any, source: str) -> Result:
    """Return the page content of a trace: that of its explanation."""
    trace = Trace.from_dict(plain, source)
    return step_result(explain_trace(trace, title=os.path.basename(source)), "trace")


def _plan(plain: Any, source: str) -> Result:
    """Return the page content of a plan, with the program of the planned step."""
    plan = Plan.from_dict(plain, source)
    text = plans.report(plan, top=0) + _program(plan)
    mood: Mood = "good" if plan.peak <= plan.budget else "bad"
    return Result("plan", text.heading, plan.summary, mood, text, tuple(charts.of_plan(plan)), **_peaks(plan))


def _program(plan: Plan) -> Document:
    return document(None, [], Section((Code(plan.program),) if plan.program else (), "The planned step"))


def _peaks(plan: Plan | None) -> dict[str, Any]:
    """Return the fields ``peak`` and ``causes`` of a plan's `Result`: its peak, and the bytes by category then."""
    if plan is None or plan.course is None:
        return {"peak": None if plan is None else plan.peak}
    top = plan.course.allocated.index(max(plan.course.allocated))
    return {"peak": plan.peak, "causes": {cause: column[top] for cause, column in plan.course.causes.items()}}


def _proof(plain: Any, source: str) -> Result:
    """Return the page content of a proof, with the errors by layer."""
    proof = Proof.from_dict(plain, source)
    text = document("Proof", str(proof).splitlines())
    if proof.layers:
        fields = [
            name_field("Errors by layer", lambda row: row.layer or row.kind, layers=True),
            Field("of", lambda row: row.kind),
            number_field("relative error", lambda row: row.relative, "{:,}".format),
        ]
        text += document(None, [], [table_of(proof.layers, fields)])
    verdict = "The planned step is proven to be the same." if proof.ok else "The proof failed."
    return Result("proof", "Proof", verdict, "good" if proof.ok else "bad", text, peak=proof.peak)


def _fit(data: Fields) -> Result:
    """Return the page content of `memplan fit`, from the parts of its file: there is no class for the whole file."""
    plan, proof, saved = _saved_plan(data), _saved_proof(data), data.inner("frontier")
    drawn, frontier = [], None
    if saved is not None:
        points = (
            Point(row.get("peak", int), row.get("seconds", float), row.maybe("lost", str) or "")
            for row in saved.rows("points")
        )
        eager, seconds = saved.get("eager_peak", int), saved.maybe("step_seconds", float)
        frontier = Frontier(
            data.get("title", str), tuple(points), eager, seconds, None if plan is None else plan.budget
        )
        drawn.append(charts.of_frontier(frontier, saved.rows("peers"), plan))
    least, reason = data.maybe("smallest_budget", int), data.maybe("reason", str)
    shortfall = None if least is None else BudgetError(reason or "", smallest_budget=least)
    if plan is None and shortfall is None and proof is None:
        raise Unreadable("it has no plan, no proof and no reason why there is none")
    outcome = fitting.Outcome(
        data.get("title", str), plan, proof, data.get("changed", bool), shortfall, frontier, data.texts("notes")
    )
    if data.get("fits", bool) is not outcome.fits:
        raise Unreadable("its verdict is not that of its plan and proof")
    return _of_fit("fit", outcome.title, fit.report(outcome, top=0), plan, (*drawn, *_plan_charts(plan)))


def _script_fit(data: Fields) -> Result:
    """Return the page content of `memplan fit` for a script.

    The smallest budget in the file is the whole script's; that of the model's step is without the memory beside it.
    """
    plan, least, lines = _saved_plan(data), data.maybe("smallest_budget", int), data.inner("lines")
    unplanned, surplus = data.get("beside", int), data.get("surplus", int)
    shortfall = None if least is None else BudgetError(found="", smallest_budget=max(0, least - surplus - unplanned))
    added = None
    if lines is not None:
        added = fitting.Lines(lines.maybe("where", str), lines.get("before", bool), lines.texts("text"))
    budget, recorded, outside = (data.get(name, int) for name in ("budget", "recorded", "outside"))
    script = fitting.Fitting(
        data.get("title", str), budget, recorded, unplanned, surplus, plan, shortfall, added, outside,
        data.maybe("recorded_band", tuple[int, int]),
    )  # fmt: skip
    return _of_fit("fit of a script", script.title, fit.script_report(script, top=0), plan, _plan_charts(plan))


def _of_fit(kind: str, title: str, text: Document, plan: Plan | None, drawn: tuple[charts.Chart, ...]) -> Result:
    """Return the page content of a report about a fit, whose heading is the verdict."""
    mood: Mood = "good" if text.title is not None and text.title.style == "good" else "bad"
    verdict = text.heading
    text = text if plan is None else text + _program(plan)
    return Result(kind, title, verdict, mood, text, drawn, **_peaks(plan))


def _plan_charts(plan: Plan | None) -> tuple[charts.Chart, ...]:
    return () if plan is None else tuple(charts.of_plan(plan))


def _saved_plan(data: Fields) -> Plan | None:
    """Return the plan in a saved result; None if it has none."""
    saved = data.plain.get("plan")
    return None if saved is None else Plan.from_dict(saved, f"{data.place}.plan")


def _saved_proof(data: Fields) -> Proof | None:
    """Return the proof in a saved result; None if it has none."""
    saved = data.plain.get("proof")
    return None if saved is None else Proof.from_dict(saved, f"{data.place}.proof")


def _sweep(plain: Any, source: str) -> Result:
    """Return the page content of a sweep, with the span of its peaks as the verdict."""
    result = Sweep.from_dict(plain, source)
    text = sweep.report(result, most=0)
    peaks = [row["peak"] for row in result.rows if row["status"] == "ok"]
    span = f"Peaks from {format_bytes(min(peaks))} to {format_bytes(max(peaks))}." if peaks else "No point has a peak."
    return Result("sweep", text.heading, span, "plain", text, (charts.of_sweep(result),))


def _compare(plain: Any, source: str) -> Result:
    """Return the page content of a comparison of two steps."""
    comparison = Comparison.from_dict(plain, source)
    a, b = comparison.a, comparison.b
    verdict = f"{format_bytes(a.peak)} -> {format_bytes(b.peak)} peak: {change_text(a.peak, b.peak)}."
    drawn = (charts.of_comparison(comparison),)
    return Result("comparison", f"{a.title} and {b.title}", verdict, "plain", compare.report(comparison, top=0), drawn)


def _guard(plain: Any, source: str) -> Result:
    """Return the page content of a step compared with its baseline."""
    outcome = Outcome.from_dict(plain, source)
    text = guard.report(outcome, top=0)
    before, now = outcome.before.peak, outcome.now.peak
    verdict = f"{format_bytes(before)} -> {format_bytes(now)} peak: {change_text(before, now)}."
    return Result("guard", text.heading, verdict, "bad" if outcome.grew else "good", text)


def _quantized(plain: Any, source: str) -> Result:
    """Return the page content of a step with quantized weights."""
    quantized = Quantized.from_dict(plain, source)
    text = quantize.report(quantized, top=0)
    verdict = f"Weights quantized to {quantized.scheme}: {format_bytes(quantized.weights_saved)} less."
    return Result("quantized", text.heading, verdict, "plain", text)


def _findings(plain: Any, source: str) -> Result:
    """Return the page content of findings, in descending order of their cost."""
    saved = Findings.from_dict(plain, source)
    target, findings = saved.target, saved.findings
    text = check.report(target, sorted(findings, key=lambda finding: -finding.bytes), top=0)
    mood: Mood = "bad" if any(finding.severity == "warning" for finding in findings) else "good"
    verdict = text.heading.removeprefix(f"{target}: ")
    return Result("findings", target, f"{verdict[:1].upper()}{verdict[1:]}.", mood, text)


def _devices(data: Fields) -> Result:
    """Return the page content of a list of GPUs, with the sources of each figure."""
    cards = [_device(row) for row in data.rows("devices")]
    sources = Section(
        tuple(f"{card.name}: {source}" for card in cards for source in card.sources), "Where each figure is from"
    )
    text = devices.report(cards) + document(None, [], sources)
    return Result("devices", "Cards that memplan knows", f"{counted(len(cards), 'card')}.", "plain", text)


def _device(row: Fields) -> Device:
    """Return a GPU from its saved figures, without the figures that `Device` computes."""
    names = {field.name for field in dataclasses.fields(Device)}
    figures = {key: value for key, value in row.plain.items() if key in names}
    figures["context"] = [*row.part("context").sizes_of(("low", "high")).values()]
    figures["rates"] = [*map(list, row.sizes("flops").items())]
    return _json.from_plain(Device, figures, row.place)


def _cache(data: Fields) -> Result:
    """Return the page content of the list of cached files."""
    entries = [
        Kept(Path(row.get("path", str)), row.get("what", str), row.get("number", int), row.get("bytes", int))
        for row in data.rows("kept")
    ]
    verdict = f"{format_bytes(sum(entry.bytes for entry in entries))} are kept."
    return Result("cache", "What memplan keeps on disk", verdict, "plain", cache.report(entries))


def _largest(data: Fields) -> Result:
    """Return the page content of `memplan largest`: all values tried, without and with a plan."""
    axis, value, limit = data.get("axis", str), data.get("value", int), data.get("limit", int)
    room = f"{format_bytes(limit)} ({data.get('device', str)})"
    verdict = f"The largest {axis} in {room} is {value}." if value else f"No {axis} fits {room}."
    title, planned = f"{data.get('title', str)}: largest {axis}", data.inner("planned")
    sections = [Section(tuple(_trials(data, axis)), "Tried")]
    if planned is not None:
        answer = f"With a plan, the largest {axis} is {planned.get('value', int)}."
        sections.append(Section((answer, *_trials(planned, axis)), "Planned"))
    text = document(title, [], *sections, notes(data.texts("notes")))
    drawn = tuple(chart for part in (data, planned) if part is not None for chart in _trial_charts(part, axis))
    return Result("largest", title, verdict, "good" if value else "bad", text, drawn)


def _trial_charts(data: Fields, axis: str) -> list[charts.Chart]:
    """Chart the peaks of the recorded values by category, with the limit."""
    rows = [row for row in _tried(data) if row.maybe("peak", int) is not None]
    parts = [row.sizes_of((*KNOWN, "rounding")) | {"workspace": row.get("workspace_low", int)} for row in rows]
    causes = {cause: [sizes[cause] for sizes in parts] for cause in LOOKS if any(sizes.get(cause) for sizes in parts)}
    names = [f"{axis} {row.get('value', int)}" for row in rows]
    limits = [data.maybe("limit", int)] * len(rows)
    return [charts.bars_side_by_side(f"Peak by cause at each {axis}", names, causes, limits)] if rows else []


def _tried(data: Fields) -> list[Fields]:
    """Return the rows of the values tried, smallest value first."""
    return sorted(data.rows("tried"), key=lambda row: row.get("value", int))


def _on_cards(plain: Any, source: str) -> Result:
    """Return the page content of ``--device all``."""
    result = OnCards.from_dict(plain, source)
    text = on_cards.report(result)
    fitting = [row.name for row in result.rows if row.fits]
    verdict = f"Fits {', '.join(fitting)}." if fitting else "Fits no card of the catalogue."
    return Result("cards", text.heading, verdict, "good" if fitting else "bad", text)


def _layouts(plain: Any, source: str) -> Result:
    """Return the page content of layouts: the fastest that fits, and bytes against time."""
    result = Layouts.from_dict(plain, source)
    text, best = layouts.report(result), result.best
    verdict = "No layout fits." if best is None else f"The fastest that fits: {layouts.fastest(best)}."
    drawn = (charts.of_layouts(result),)
    return Result("layouts", text.heading, verdict, "bad" if best is None else "good", text, drawn)


def _trials(data: Fields, axis: str) -> list[Part]:
    """Return a table of all values tried, and a remark if the answer reserved more than the limit."""
    rows, limit, answer = _tried(data), data.maybe("limit", int), data.maybe("value", int)
    recorded = any(row.maybe("peak", int) is not None for row in rows)  # else they were planned
    on_card = recorded and data.maybe("device", str) != "cpu"
    planned = any(row.maybe("least_budget", int) for row in rows)
    fields = [number_field(axis, lambda row: row.get("value", int), str)]
    fields += [_size_field("peak", "peak")] if recorded else []
    differ = any(row.maybe("peak_high", int) != row.maybe("peak", int) for row in rows)
    fields += [_size_field("with workspaces", "peak_high")] if on_card and differ else []
    fields.append(_size_field("reserved, with context" if on_card else "least budget" if planned else "needs", "need"))
    fields += [Field("", _answer), Field("why", lambda row: row.maybe("reason", str) or "")]
    parts: list[Part] = [table_of(rows, fields)]
    chosen = next((row for row in rows if row.get("value", int) == answer), None)
    if chosen is not None and answer and limit:
        likely, band = data.maybe("likely", int), chosen.maybe("needs_band", tuple[int, int])
        if likely is not None and band is not None:
            parts.append(fit_at_upper_end(axis, answer, likely, band[1]))
        if (chosen.maybe("need", int) or 0) > limit:
            parts.append(beyond_the_limit(axis, answer, band))
    return parts


def _answer(row: Fields) -> str:
    """Return whether a recorded value of a search fits, or failed, as text."""
    if row.maybe("reason", str):
        return "failed"
    return "fits" if row.get("fits", bool) else "does not fit"


def _size_field(header: str, key: str) -> Field:
    """Return a column of bytes, with a dash for missing values."""
    size = lambda row: row.maybe(key, int)  # noqa: E731
    return Field(
        header,
        lambda row: "–" if size(row) is None else format_bytes(size(row)),
        right=True,
        number=lambda row: -1 if size(row) is None else size(row),
    )


def _text_field(header: str, key: str) -> Field:
    return Field(header, lambda row: row.maybe(key, str) or "–")


def _replay(data: Fields) -> Result:
    """Return the page content of a replayed snapshot: peaks under each setting, segments, why memory ran out."""
    recorded = data.inner("recorded")
    cases = [row for row in (recorded, *data.rows("cases")) if row is not None]
    mismatches, fits = len(data.rows("mismatches")), data.get("fits", bool)
    exact = "every address and every segment as recorded" if not mismatches else f"{mismatches} differences"
    settings = [
        Field("Settings", lambda row: row.maybe("settings", str) or "default"),
        *(_size_field(name.replace("_", " "), name) for name in ("peak_allocated", "peak_reserved", "fragmentation")),
        _size_field("capacity", "capacity"),
        Field("", lambda row: "out of memory" if row.rows("out_of_memory") else "fits"),
    ]
    segments = [
        Field("Segments at the end", lambda row: f"{'small' if row.get('small', bool) else 'large'} requests"),
        *(number_field(name, lambda row, name=name: row.get(name, int), str) for name in ("stream", "count")),
        *(_size_field(name, name) for name in ("reserved", "allocated", "free")),
        _size_field("largest free block", "largest_free"),
    ]
    title = f"{data.get('source', str)} on {data.get('device', str)}"
    text = document(
        title,
        [f"{data.get('events', int):,} events"],
        [table_of(cases, settings)],
        _out_of_memory(data),
        [table_of(data.rows("segments"), segments)],
        notes(data.texts("notes")),
    )
    verdict = f"Replayed: {exact}{'' if fits else '; out of memory'}."
    peak = None if recorded is None else recorded.get("peak_allocated", int)
    mood: Mood = "good" if fits and not mismatches else "bad"
    return Result("replay", title, verdict, mood, text, tuple(charts.of_replay(data)), peak=peak)


def _out_of_memory(data: Fields) -> Section:
    """Return why a replay ran out of memory, and the owners of the memory; an empty section if it did not."""
    why = data.inner("out_of_memory")
    if why is None:
        return Section(())
    names = ("requested", "needed", "reserved", "free", "largest_free")
    requested, needed, reserved, free, largest = (format_bytes(why.get(name, int)) for name in names)

    def line_of(row: Fields) -> str:
        """Return file, line and function that allocated the blocks of an owner."""
        frame = row.inner("frame")
        if frame is None:
            return "–"
        return f"{frame.get('filename', str)}:{frame.get('line', int)} {frame.get('name', str)}"

    fields = [
        name_field("Who held the rest", line_of),
        number_field("blocks", lambda row: row.get("count", int), str),
        _size_field("bytes", "bytes"),
    ]
    parts = (
        f"Asked for {requested}, which takes {needed} from the card.",
        f"Held: {reserved}, {free} of it in free blocks.",
        f"The largest free block has {largest}: {why.maybe('largest_why', str) or '-'}.",
        table_of(why.rows("holders"), fields),
    )
    return Section(parts, "Out of memory")


def _post_mortem(data: Fields) -> Result:
    """Return the page content of a training run that ended out of memory."""
    by_cause = {} if data.inner("by_cause") is None else data.sizes("by_cause")
    peak = data.maybe("peak", int)
    facts = [f"Step {data.get('step', int)} on {data.get('device', str)}."]
    facts += [] if peak is None else [f"Peak {format_bytes(peak)}."]
    text = document(
        "Out of memory",
        [*facts, data.maybe("command", str) or ""],
        [_sizes_table("Alive at the peak, by cause", by_cause)] if by_cause else [],
        [_sizes_table("Held now", data.sizes("held_now"))],
    )
    return Result("post-mortem", "Out of memory", data.get("error", str), "bad", text)


def _sizes_table(title: str, sizes: Mapping[str, int]) -> Table:
    """Return a table of bytes by category or name; the title is the header of the names."""
    fields = [name_field(title, lambda row: str(LABELS.get(row[0], row[0]))), number_field("bytes", lambda row: row[1])]
    return table_of(list(sizes.items()), fields)


def _watch(data: Fields) -> Result:
    """Return the page content of a watched run: its leaks and its steps."""
    rows, leaks = data.rows("rows"), data.rows("leaks")
    measured = [peak for row in rows if (peak := row.maybe("peak", int)) is not None]
    predicted = data.maybe("predicted", int)
    highest = f"at most {format_bytes(max(measured))} measured" if measured else "no step was measured"
    also = "" if predicted is None else f", {format_bytes(predicted)} predicted"
    verdict = f"{data.get('steps', int)} steps on {data.get('device', str)}: {highest}{also}; {len(leaks)} leaks."
    leak_fields = [
        _text_field("Leaks", "op"), _text_field("layer", "layer"), _size_field("bytes a step", "bytes"),
        _text_field("held by", "held_by"), _text_field("made at", "where"), _text_field("stored at", "kept_at"),
    ]  # fmt: skip
    step_fields = [
        number_field("Steps", lambda row: row.get("step", int), str),
        number_field("seconds", lambda row: row.get("seconds", float), format_seconds),
        *(_size_field(name, name) for name in ("peak", "held", "predicted")),
    ]
    text = document(
        "A watched run",
        [],
        [table_of(leaks, leak_fields)] if leaks else [],
        [table_of(rows, step_fields)],
        notes(data.texts("notes")),
    )
    return Result("watched run", "A watched run", verdict, "bad" if leaks else "plain", text)


def _by_fields(show: Callable[[Fields], Result], schema: int = 1) -> Reader:
    """Return a reader that checks format and schema version, and leaves the reading of the fields to ``show``."""

    def read(plain: Any, source: str) -> Result:
        try:
            # some formats had no schema version at first
            _json.check_format({"schema": schema, **plain}, plain["format"], schema)
        except Unreadable as error:
            raise Unreadable(f"it {error}") from None
        return show(Fields(plain))

    return read


def _rank_snapshots(plain: Any, source: str) -> Result:
    """Return the page content of snapshots of several ranks, compared."""
    saved = RankSnapshots.from_dict(plain, source)
    text = rank_snapshots.report(saved, top=0)
    verdict = f"{rank_snapshots.finding(saved.odd[0])}." if saved.odd else "No rank holds much more than the others."
    return Result("replay", text.heading, f"{verdict[:1].upper()}{verdict[1:]}", "bad" if saved.odd else "good", text)


def _rank_reasons(plain: Any, source: str) -> Result:
    """Return the page content of why ranks ran out of memory."""
    saved = RankReasons.from_dict(plain, source)
    text = why.ranks_report(saved)
    return Result("out of memory", text.heading, " ".join(saved.verdict), "bad", text)


def _watched_ranks(plain: Any, source: str) -> Result:
    """Return the page content of the watches of several ranks."""
    saved = WatchedRanks.from_dict(plain, source)
    text, verdict = watched.report(saved, top=0), "; ".join(summary(saved))
    mood = "bad" if saved.odd or saved.ended_badly else "good"
    return Result("watched ranks", text.heading, f"{verdict[:1].upper()}{verdict[1:]}.", mood, text)


def _roles(plain: Any, source: str) -> Result:
    """Return the page content of the ranks of a step: the table of all ranks, without the steps of each."""
    saved = Roles.from_dict(plain, source)
    text = roles.summary(saved)
    bad = any(role.explanation.card and role.explanation.card.verdict.answer == "does not fit" for role in saved.roles)
    verdict = str(text.sections[0].parts[0])
    return Result("ranks", text.heading, verdict, "bad" if bad else "plain", text)


READERS: Mapping[str, Reader] = {
    "memplan.explanation": _explanation,
    "memplan.trace": _trace,
    "memplan.plan": _plan,
    "memplan.proof": _proof,
    "memplan.sweep": _sweep,
    "memplan.fit": _by_fields(_fit),
    "memplan.fit_script": _by_fields(_script_fit),
    "memplan.largest": _by_fields(_largest),
    "memplan.on_cards": _on_cards,
    "memplan.layouts": _layouts,
    "memplan.compare": _compare,
    "memplan.guard": _guard,
    "memplan.quantized": _quantized,
    "memplan.watch": _by_fields(_watch),
    "memplan.findings": _findings,
    "memplan.roles": _roles,
    "memplan.rank_snapshots": _rank_snapshots,
    "memplan.rank_reasons": _rank_reasons,
    "memplan.watched_ranks": _watched_ranks,
    "memplan.replay": _by_fields(_replay),
    "memplan.post_mortem": _by_fields(_post_mortem),
    "memplan.devices": _by_fields(_devices),
    "memplan.cache": _by_fields(_cache),
}
"""By the value of the "format" field of a file."""


def results_of(content: str, source: str) -> tuple[Result, ...]:
    """Return the parts of a page for a saved result: of several ranks, their table and then the step of each; else
    `result_of` alone."""
    first = result_of(content, source)
    if first.kind != "ranks":
        return (first,)
    return first, *(step_result(role.explanation) for role in Roles.from_json(content, source).roles)


def result_of(content: str, source: str) -> Result:
    """Return the page content of a saved result. ``content`` is JSON that a command wrote with ``--json``, ``--trace``
    or ``--plan``, or a saved watch or proof; ``source`` names the file in error messages. Raises MemplanError if the
    text is empty, cut off, not memplan's, or of another schema version."""
    known = ", ".join(sorted(name.removeprefix("memplan.") for name in READERS))
    try:
        if not content.strip():
            raise Unreadable("it is empty")
        plain = _json.parse(content)
        kind = plain.get("format") if isinstance(plain, dict) else None
        if not isinstance(kind, str) or kind not in READERS:
            raise Unreadable(f"its format is {kind!r:.60}" if kind is not None else "it names no format of memplan's")
        return READERS[kind](plain, source)
    except Unreadable as error:
        raise InputError(
            f"{source} cannot be shown: {error}",
            expected=f"a result that this memplan saved ({known})",
            do="Write it again with --json or --trace, or use the memplan that wrote it",
        ) from None


def read_results(path: str) -> tuple[Result, ...]:
    """Return the page content of a file. Raises MemplanError as `result_of`, and if the file cannot be read."""
    try:
        with open(path, "rb") as file:
            content = file.read(_json.LONGEST + 1)
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror})", expected="a file that memplan wrote", do="Check the path"
        ) from None
    try:
        results = results_of(content.decode("utf-8"), path)
    except UnicodeDecodeError:
        raise InputError(
            f"{path} is no text", expected="JSON that memplan wrote; a snapshot is shown by memplan replay --html",
            do="Choose another file",
        ) from None  # fmt: skip
    return tuple(replace(result, source=path) for result in results)
