"""HTML sections of findings, replays, post-mortems, devices and caches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memplan._bytes import format_bytes
from memplan.explanation.model import LABELS
from memplan.reports.html.fields import Fields
from memplan.reports.html.page_parts import Chart, Mood, Paragraphs, Part, Result, Section, number, size, table, text
from memplan.reports.html.palette import IN_USE


def findings_result(data: Fields) -> Result:
    """Return the page content of `memplan check --json`, the findings that cost most first."""
    findings = sorted(data.rows("findings"), key=lambda row: -row.get("bytes", int))
    warnings = sum(row.get("severity", str) == "warning" for row in findings)
    cost = sum(row.get("bytes", int) for row in findings)
    notes = len(findings) - warnings
    counts = [f"{n} {word}{'s' * (n > 1)}" for n, word in ((warnings, "warning"), (notes, "note")) if n]
    verdict = f"{' and '.join(counts)}." if findings else "Nothing found."
    rows = [
        (
            text(row.get("id", str)), text(_severity(row)), size(row.get("bytes", int)),
            text(row.get("layer", str)), text(row.get("message", str)), text(row.maybe("where", str)),
        )
        for row in findings
    ]  # fmt: skip
    headers = ("finding", "severity", "cost", "layer", "what", "at")
    sections = [Section("Findings", (table("Findings", headers, rows),))] if rows else []
    advice = [f"{row.get('id', str)}: {line}" for row in findings for line in row.texts("advice")]
    if advice:
        sections.append(Section("What to do", (Paragraphs(tuple(dict.fromkeys(advice))),)))
    mood: Mood = "bad" if warnings else "good"
    facts = (("findings", str(len(findings))), ("cost together, at most", format_bytes(cost)))
    lines = tuple(f"{_severity(row)}: {row.get('message', str)}" for row in findings[:1])
    return Result("findings", data.get("target", str), verdict, mood, facts, tuple(sections), lines)


def _severity(row: Fields) -> str:
    """Return the severity as the terminal report names it."""
    severity = row.get("severity", str)
    return "note" if severity == "info" else severity


def replay_result(data: Fields) -> Result:
    """Return the page content of `memplan replay --json`."""
    recorded = data.inner("recorded")
    cases = [row for row in (recorded, *data.rows("cases")) if row is not None]
    mismatches, fits = len(data.rows("mismatches")), data.get("fits", bool)
    exact = "every address and every segment as recorded" if not mismatches else f"{mismatches} differences"
    verdict = f"Replayed: {exact}{'' if fits else '; out of memory'}."
    rows = [
        (
            text(row.maybe("settings", str) or "default"), size(row.get("peak_allocated", int)),
            size(row.get("peak_reserved", int)), size(row.get("fragmentation", int)), size(row.maybe("capacity", int)),
            text("out of memory" if row.rows("out_of_memory") else "fits"),
        )
        for row in cases
    ]  # fmt: skip
    headers = ("settings", "peak allocated", "peak reserved", "fragmentation", "capacity", "")
    sections = [Section("Settings", (table("Settings", headers, rows),)), *_history(data), *_out_of_memory(data)]
    pools = [
        (
            text("small requests" if row.get("small", bool) else "large requests"), number(row.get("stream", int)),
            number(row.get("count", int)), size(row.get("reserved", int)), size(row.get("allocated", int)),
            size(row.get("free", int)), size(row.get("largest_free", int)),
        )
        for row in data.rows("segments")
    ]  # fmt: skip
    headers = ("pool", "stream", "segments", "reserved", "allocated", "free", "largest free block")
    sections.append(Section("Segments at the end", (*_blocks(data), table("Segments", headers, pools))))
    mood: Mood = "good" if fits and not mismatches else "bad"
    peak = None if recorded is None else recorded.get("peak_allocated", int)
    facts = () if peak is None else (("peak", format_bytes(peak)), ("events", f"{data.get('events', int):,}"))
    title = f"{data.get('source', str)} on {data.get('device', str)}"
    return Result("replay", title, verdict, mood, facts, tuple(sections), remarks=data.texts("notes"), peak=peak)


def _history(data: Fields) -> Iterator[Section]:
    """Yield the chart of memory over time, if the file has events."""
    over_time = data.inner("over_time")
    if over_time is None:
        return
    columns = {key: list(over_time.get(key, tuple[int, ...])) for key in ("events", "allocated", "reserved")}
    if not columns["events"] or len({len(column) for column in columns.values()}) != 1:
        return
    series = {
        "name": "", "ticks": columns["events"], "allocated": columns["allocated"], "reserved": columns["reserved"],
        "causes": {IN_USE: columns["allocated"]}, "ops": [-1] * len(columns["events"]), "opRows": [], "spans": [],
    }  # fmt: skip
    chart = Chart("time", "Memory over time", {"series": [series], "capacity": None, "budget": None})
    yield Section("Memory over time", (chart,))


def _blocks(data: Fields) -> Iterator[Part]:
    """Yield the chart of segments and their blocks, if the file has them."""
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


def _out_of_memory(data: Fields) -> Iterator[Section]:
    why = data.inner("out_of_memory")
    if why is None:
        return
    names = ("requested", "needed", "reserved", "free", "largest_free")
    requested, needed, reserved, free, largest = (format_bytes(why.get(name, int)) for name in names)
    lines = [
        f"Asked for {requested}, which takes {needed} from the card.",
        f"Held: {reserved}, {free} of it in free blocks.",
        f"The largest free block has {largest}: {why.maybe('largest_why', str) or '-'}.",
    ]
    rows = []
    for row in why.rows("holders"):
        frame, where = row.inner("frame"), None
        if frame is not None:
            where = f"{frame.get('filename', str)}:{frame.get('line', int)} {frame.get('name', str)}"
        rows.append((text(where), number(row.get("count", int)), size(row.get("bytes", int))))
    parts = (Paragraphs(tuple(lines)), table("Holders", ("who held the rest", "blocks", "bytes"), rows))
    yield Section("Out of memory", parts)


def post_mortem_result(data: Fields) -> Result:
    """Return the page content of the post-mortem that a watched run saves when memory runs out."""
    by_cause = {} if data.inner("by_cause") is None else data.sizes("by_cause")
    rows = [(text(LABELS.get(cause, cause)), size(amount)) for cause, amount in by_cause.items()]
    peak = data.maybe("peak", int)
    facts = [("step", str(data.get("step", int))), ("device", data.get("device", str))]
    facts += [] if peak is None else [("peak", format_bytes(peak))]
    sections = [Section("Alive at the peak, by cause", (table("By cause", ("cause", "bytes"), rows),))] if rows else []
    now = [(text(LABELS.get(name, name)), size(amount)) for name, amount in data.sizes("held_now").items()]
    sections.append(Section("Held now", (table("Held", ("what", "bytes"), now),)))
    return Result(
        "post-mortem", "Out of memory", data.get("error", str), "bad", tuple(facts), tuple(sections),
        (data.maybe("command", str) or "",),
    )  # fmt: skip


def devices_result(data: Fields) -> Result:
    """Return the page content of `memplan devices --json`."""
    cards, rows, sources = data.rows("devices"), [], list[str]()
    for card in cards:
        context = card.part("context")
        figures = (card.get("capacity", int), context.get("low", int), context.get("high", int))
        rates = (
            size(card.get("bandwidth", int)),
            size(card.get("link", int)),
            number(card.get("multiprocessors", int)),
        )
        rows.append((text(card.get("name", str)), text(card.get("title", str)), *map(size, figures), *rates))
        sources += [f"{card.get('name', str)}: {line}" for line in card.texts("sources")]
    headers = ("name", "card", "capacity", "context, least", "context, most", "bandwidth, /s", "link, /s", "processors")
    sections = (
        Section("Cards", (table("Cards", headers, rows),)),
        Section("Where each figure is from", (Paragraphs(tuple(sources)),)),
    )
    return Result("devices", "Cards that memplan knows", f"{len(cards)} cards.", "plain", (), sections)


def cache_result(data: Fields) -> Result:
    """Return the page content of `memplan cache --json`."""
    caches = data.rows("kept")
    rows = [
        (
            text(row.get("what", str)),
            number(row.get("number", int)),
            size(row.get("bytes", int)),
            text(row.get("path", str)),
        )
        for row in caches
    ]
    total = format_bytes(sum(row.get("bytes", int) for row in caches))
    sections = (Section("Kept on disk", (table("Kept", ("what", "number", "bytes", "path"), rows),)),)
    return Result("cache", "What memplan keeps on disk", f"{total} are kept.", "plain", (), sections)
