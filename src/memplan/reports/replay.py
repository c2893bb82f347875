"""Report of a replayed snapshot: peaks under each setting, and why memory ran out; and its JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from memplan._bytes import format_bytes_as_torch
from memplan._json import named, text_of, to_plain
from memplan._text import counted
from memplan.explanation.over_time import MOMENTS, selected_moments
from memplan.reports.document import (
    Document,
    Field,
    Line,
    Part,
    Section,
    Table,
    document,
    name_field,
    number_field,
    table_of,
)
from memplan.simulation.allocator.settings import AllocatorSettings, parse_settings
from memplan.simulation.replays.out_of_memory import FreeBlocks, Holder, OomExplanation, holders
from memplan.simulation.replays.replayed import Replay
from memplan.simulation.replays.side_by_side import Cases, group_segments
from memplan.simulation.snapshots.read import Frame
from memplan.simulation.snapshots.safe_pickle import shown
from memplan.simulation.timeline import DEFAULT_POOL, Pool, Segment, Timeline

_DIFFERENCES = 3
_size_field = partial(number_field, shown=format_bytes_as_torch)
_CLASSES = {0: "up to 1 MiB", 1: "1-2 MiB", 2: "2-10 MiB", 10: "10-20 MiB", 20: "20-100 MiB", 100: "100-500 MiB"}


def report(cases: Cases, top: int = 10) -> Document:
    """Return the peaks by setting, why memory ran out, and what holds it; ``top`` rows a table, 0 for all."""
    replay, why = cases.replay, cases.explanation
    settings = _settings_name(replay.recorded_settings)
    events = f"{len(replay.snapshot.entries)} events on" if replay.has_history else "no history,"
    owners = holders(cases.base, cases.base.timeline.segments)
    shows_owners = why is None and any(row.frame is not None for row in owners)
    return document(
        f"{replay.snapshot.source}: {events} {replay.timeline.device}, settings {settings}",
        _head(replay),
        [_cases_table(cases), *_remarks(cases)],
        *([] if why is None else _oom_sections(cases, why, top)),
        [_segments_table(cases)],
        [_owners_table("Who holds it at the end", owners, top)] if shows_owners else [],
    )


def _head(replay: Replay) -> Iterator[Part]:
    """Yield how exact the replay is, with the first differences; without a history, how to record a history."""
    if not replay.has_history:
        yield (
            "It says what was held when it was taken, not how that came about. To record the history, call "
            "torch.cuda.memory._record_memory_history() before the step."
        )
    elif not replay.mismatches:
        yield "Replayed: every address and every segment as recorded."
    else:
        differences = counted(len(replay.mismatches), "difference")
        yield Line(f"Replayed with {differences} from the recording; what follows is not exact.", "bad")
        yield from (Line(shown(str(mismatch), 400), indent=2) for mismatch in replay.mismatches[:_DIFFERENCES])


def _cases_table(cases: Cases) -> Table:
    """Return a row for each setting: peaks, fragmentation, and whether memory runs out."""
    recorded = "recorded" if cases.base.compared else "as recorded"
    outcome = "out of memory" if cases.base.capacity is None else f"in {format_bytes_as_torch(cases.base.capacity)}"

    def name(case: Replay) -> str:
        settings = _settings_name(case.settings)
        return f"{recorded} ({settings})" if case is cases.base else settings

    fields = [
        name_field("Settings", name, shrinks_to=24, from_left=False),
        _size_field("peak\nreserved", lambda case: case.peak_reserved),
        _size_field("peak\nallocated", lambda case: case.peak_allocated, drop=2),
        _size_field("fragmentation\nat the peak", lambda case: case.fragmentation),
        number_field("share", lambda case: case.fragmentation_share, lambda share: f"{100 * share:.1f} %", drop=3),
        Field(outcome, lambda case: _outcome(case, cases)),
    ]
    return table_of([cases.base, *cases.others], fields)


def _outcome(case: Replay, cases: Cases) -> str:
    """Return whether, and when, memory runs out in a case; "not known" without a capacity to compare with."""
    if case.ooms:
        event = case.ooms[-1].index  # -1: before the first event
        return "out at the start" if event < 0 else f"out at event {event}"
    if cases.replay.ooms and case.capacity is None:
        return "not known"
    return "no" if cases.base.capacity is None else "fits"


def _remarks(cases: Cases) -> Iterator[Part]:
    """Yield remarks on memory that the figures of the cases do not include."""
    replay = cases.replay
    if any(case.ended for case in (cases.base, *cases.others)):
        yield "A case that runs out where the recording did not ends there: its peaks are those up to there."
    if not all(case.from_recorded_start for case in (cases.base, *cases.others)):
        _, allocated, reserved = replay.timeline.events[0]
        if reserved:
            yield (
                "Other settings, and a card too small for the start, begin with the blocks that were in use then, "
                f"allocated anew; without the {format_bytes_as_torch(reserved - allocated)} that were held besides."
            )
    for note in replay.snapshot.notes:
        yield f"note: {shown(note)}"


def _oom_sections(cases: Cases, why: OomExplanation, top: int) -> Iterator[Section]:
    """Yield why memory ran out: the request, the free blocks, the owners, and settings that help."""
    where = "before the history" if why.oom.index < 0 else f"at event {why.oom.index}"
    yield Section(tuple(Line(line, indent=2) for line in _oom_lines(why)), f"Out of memory {where}")
    if why.free:
        yield Section((_free_blocks_table(why.free, top),))
    yield Section((_owners_table("Who held the rest", list(why.holders), top),))
    yield Section(tuple(_remedies(cases, why)))


def _oom_lines(why: OomExplanation) -> Iterator[str]:
    """Yield the requested bytes, the card's free bytes, and the allocator's reserved and allocated bytes."""
    oom = why.oom
    stream = f"stream {oom.stream}" if oom.stream else ""
    kind = ", ".join(filter(None, (_pool_name(oom.pool), stream)))
    where = "" if why.frame is None else f", {frame_line(why.frame)}"
    yield f"asked for: {format_bytes_as_torch(oom.requested)}" + (f" ({kind})" if kind else "") + where
    left = "" if oom.free is None else f"; the card had {format_bytes_as_torch(oom.free)} left"
    if why.capacity is not None and not why.capacity.is_card:
        left += ", but the process was held to less (a memory fraction)"
    elif why.capacity is not None:
        left += f" of {format_bytes_as_torch(why.capacity.bytes)}"
    yield f"needed from the card: {format_bytes_as_torch(why.needed)}{left}"
    free = sum(row.bytes for row in why.free)
    waiting = f", {format_bytes_as_torch(why.waiting)} waiting for other streams" if why.waiting else ""
    yield (
        f"held: {format_bytes_as_torch(oom.reserved)}, of it {format_bytes_as_torch(oom.allocated)} in blocks in use, "
        f"{format_bytes_as_torch(free)} in free blocks{waiting}"
    )
    if why.largest_free:
        yield f"largest free block: {format_bytes_as_torch(why.largest_free)}, {why.largest_why}"


def _free_blocks_table(rows: Sequence[FreeBlocks], top: int) -> Table:
    """Return the free blocks by kind and size, with the reason why none served the request."""
    largest = lambda rows: format_bytes_as_torch(max(row.largest for row in rows))  # noqa: E731
    fields = [
        name_field(
            "Free blocks",
            lambda row: _block_kind(row.small, row.stream, row.pool, _size_class(row.least)),
            from_left=False,
        ),
        number_field("count", lambda row: row.count, str),
        _size_field("bytes", lambda row: row.bytes),
        Field("largest", lambda row: largest([row]), largest, right=True, drop=1),
        Field("did not serve", lambda row: row.why, shrinks_to=12),
    ]
    return table_of(rows, fields, top)


def _owners_table(title: str, rows: Sequence[Holder], top: int) -> Table:
    """Return the lines of code whose blocks hold memory, with count and bytes."""
    total = sum(row.bytes for row in rows)
    fields = [
        name_field(title, lambda row: frame_line(row.frame)),
        number_field("blocks", lambda row: row.count, str),
        _size_field("bytes", lambda row: row.bytes),
        number_field("share", lambda row: row.bytes, lambda size: f"{100 * size / max(total, 1):.0f} %"),
    ]
    return table_of(rows, fields, top)


def _remedies(cases: Cases, why: OomExplanation) -> Iterator[Part]:
    """Yield the settings with which the replay does not run out of memory; if there are none, the settings tried."""
    if not why.tried or why.capacity is None:
        yield "What the card could give is not recorded, so no setting can be tried: give --capacity."
        return
    card = format_bytes_as_torch(why.capacity.bytes)
    if why.remedies:
        yield f"Would have helped, each replayed from the start on a card that gives {card}:"
        for remedy in why.remedies:
            line = f"{remedy.settings}: peak {format_bytes_as_torch(remedy.peak_reserved)} reserved"
            yield Line(line, indent=2)
        helpful = {remedy.settings for remedy in why.remedies}
        others = [text for text in why.tried if parse_settings(text) not in helpful]
        if others:
            yield "Tried, and of no help:"
            yield from (Line(text, indent=2) for text in others)
        return
    text = "No setting can help" if why.beyond else "None of these settings would have helped"
    if why.beyond:
        text += f": blocks in use and the request exceed {card} by {format_bytes_as_torch(why.beyond)}"
    yield f"{text}. The card lacked {format_bytes_as_torch(why.shortfall)} for this request. Tried:"
    yield from (Line(tried, indent=2) for tried in why.tried)


def _segments_table(cases: Cases) -> Table:
    """Return a row for each kind of segment: number, reserved, allocated and free bytes."""
    largest = lambda rows: format_bytes_as_torch(max((row.largest_free for row in rows), default=0))  # noqa: E731
    fields = [
        name_field(
            "Segments at the end",
            lambda row: _block_kind(row.small, row.stream, row.pool, "expandable" if row.expandable else ""),
            from_left=False,
        ),
        number_field("count", lambda row: row.count, str),
        _size_field("reserved", lambda row: row.reserved),
        _size_field("allocated", lambda row: row.allocated),
        _size_field("free", lambda row: row.free),
        Field("largest\nfree block", lambda row: largest([row]), largest, right=True, drop=1),
    ]  # fmt: skip
    return table_of(group_segments(cases.base.timeline.segments), fields, total="all")


def _block_kind(small: bool, stream: int, pool: Pool, more: str) -> str:
    """Return a label such as "large, stream 7, pool 0.1", then ``more``; the default stream and pool are left out."""
    parts = ("small" if small else "large", f"stream {stream}" if stream else "", _pool_name(pool), more)
    return ", ".join(filter(None, parts))


def _pool_name(pool: Pool) -> str:
    return "" if pool == DEFAULT_POOL else f"pool {pool[0]}.{pool[1]}"


def _size_class(least: int) -> str:
    """Return the range of sizes that begins at ``least`` bytes, as text."""
    return _CLASSES.get(least >> 20, "over 500 MiB")  # by MiB


def frame_line(frame: Frame | None) -> str:
    """Return "file:line function" of a stack frame of a snapshot, printable and at most 300 characters long."""
    if frame is None:
        return "(no stack recorded)"
    location = f"{frame.filename}:{frame.line} " if frame.filename else ""
    return shown(f"{location}{frame.name}", 300)


def _settings_name(settings: AllocatorSettings) -> str:
    return shown(str(settings), 300) or "default"


_OOM = ("index", "requested", "stream", "pool", "free", "reserved", "allocated")
_CASE = ("capacity", "peak_reserved", "peak_allocated", "fragmentation", "ended")
_WHY = ("needed", "capacity", "waiting", "largest_free", "largest_why", "tried", "shortfall", "beyond")


def dumps(cases: Cases) -> str:
    """Return a replay and its other cases as JSON; the same text for the same snapshot. Sizes are bytes.

    Example:
        >>> json.loads(dumps(cases))["recorded"]["peak_reserved"] == cases.replay.peak_reserved
        True
    """
    replay, timeline = cases.replay, cases.base.timeline
    data = {
        "format": "memplan.replay",
        "schema": 1,
        "source": replay.snapshot.source,
        "device": replay.timeline.device,
        "events": len(replay.snapshot.entries),
        **named(replay, "mismatches"),
        "recorded": _case_dict(replay),
        "cases": [_case_dict(case) for case in (cases.base, *cases.others) if case is not replay],
        "fits": cases.all_fit,
        "segments": to_plain(group_segments(timeline.segments)),
        "over_time": _over_time(timeline),
        "blocks": [_segment_dict(segment) for segment in timeline.segments],
        "out_of_memory": None if cases.explanation is None else _oom_dict(cases.explanation),
        "notes": list(replay.snapshot.notes),
    }
    return text_of(data)


def _over_time(timeline: Timeline) -> dict[str, list[int]]:
    """Return columns of event indices and the bytes allocated and reserved after them, thinned but with each peak."""
    columns = np.array(timeline.events, np.int64).reshape(-1, 3).T  # reshaped: there may be no events
    moments = selected_moments(columns[1], [columns[2]], [], MOMENTS)
    return dict(zip(("events", "allocated", "reserved"), columns[:, moments].tolist(), strict=True))


def _segment_dict(segment: Segment) -> dict[str, Any]:
    """Return a segment for JSON; each block is [offset, bytes, "in use" or "", requested bytes]."""
    rows = [
        [block.address - segment.address, block.size, "" if block.state == "inactive" else "in use", block.requested]
        for block in segment.blocks
    ]
    return {"address": segment.address, "bytes": segment.size, "stream": segment.stream, "blocks": rows}


def _case_dict(case: Replay) -> dict[str, Any]:
    """Return the replay under one setting for JSON."""
    ooms = [named(oom, *_OOM) for oom in case.ooms]
    return {"settings": str(case.settings), **named(case, *_CASE), "out_of_memory": ooms}


def _oom_dict(why: OomExplanation) -> dict[str, Any]:
    """Return the explanation of an out-of-memory error for JSON."""
    return {
        **named(why.oom, *_OOM),
        **named(why, *_WHY),
        "stack": [frame._asdict() for frame in why.stack],
        "free_blocks": to_plain(why.free),
        "holders": [
            {"frame": row.frame and row.frame._asdict(), **named(row, "count", "bytes")} for row in why.holders
        ],
        "remedies": [
            {"settings": str(row.settings), **named(row, "peak_reserved", "fragmentation")} for row in why.remedies
        ],
    }
