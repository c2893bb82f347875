"""A replayed snapshot on the terminal: what was recorded, beside what-ifs, and why memory ran out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TextIO

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memplan._bytes import format_bytes
from memplan.reports.columns import Column
from memplan.reports.output import Page, print_parts
from memplan.simulation.allocator.settings import AllocatorSettings
from memplan.simulation.replays.out_of_memory import FreeBlocks, Holder, OomExplanation, holders
from memplan.simulation.replays.replayed import Replay
from memplan.simulation.replays.side_by_side import Cases, grouped
from memplan.simulation.snapshots.read import Frame
from memplan.simulation.snapshots.safe_pickle import shown
from memplan.simulation.timeline import DEFAULT_POOL, Pool

_DIFFERENCES = 3
_CLASSES = {0: "up to 1 MiB", 1: "1-2 MiB", 2: "2-10 MiB", 10: "10-20 MiB", 20: "20-100 MiB", 100: "100-500 MiB"}


def print_replay(cases: Cases, file: TextIO | None = None, top: int = 10) -> None:
    """Print a replay: as wide as the terminal, or 80 columns without colours where ``file`` is not one.

    Args:
        cases: what to print.
        file: where to; stdout by default.
        top: how many lines of the program, and of the tables of free blocks, to list; 0 for all.
    """
    print_parts(lambda page: render(cases, page, top), file)


def render(cases: Cases, page: Page, top: int = 10) -> Iterator[RenderableType]:
    """The parts of the report as rich renderables, in order."""
    replay = cases.replay
    yield from _head(replay)
    yield ""
    yield _table_of_cases(cases, page)
    yield from _remarks(cases)
    if cases.explanation is not None:
        yield from _explained(cases, cases.explanation, page, top)
    yield ""
    yield _table_of_segments(cases, page)
    held = holders(replay, replay.timeline.segments)
    if cases.explanation is None and any(row.frame is not None for row in held):
        yield ""
        yield _table_of_holders("Who holds it at the end", held, page, top)


def _head(replay: Replay) -> Iterator[RenderableType]:
    snapshot = replay.snapshot
    settings = _named(replay.recorded_settings)
    if not replay.has_history:
        yield Text(f"{snapshot.source}: no history, {replay.timeline.device}, settings {settings}", "bold")
        yield Text(
            "It says what was held when it was taken, not how that came about. To record the history, call "
            "torch.cuda.memory._record_memory_history() before the step."
        )
        return
    yield Text(
        f"{snapshot.source}: {len(snapshot.entries)} events on {replay.timeline.device}, settings {settings}", "bold"
    )
    if not replay.mismatches:
        yield Text("Replayed: every address and every segment as recorded.")
        return
    count = len(replay.mismatches)
    yield Text(
        f"Replayed with {count} difference{'s' if count > 1 else ''} from the recording; what follows is not exact.",
        "bold red",
    )
    for mismatch in replay.mismatches[:_DIFFERENCES]:
        yield Padding(Text(shown(str(mismatch), 400)), (0, 0, 0, 2))


def _table_of_cases(cases: Cases, page: Page) -> Table:
    rows = [cases.base, *cases.others]
    recorded = "recorded" if cases.base.compared else "as recorded"
    names = [f"{recorded} ({_named(cases.base.settings)})", *(_named(other.settings) for other in cases.others)]
    outcome = "out of memory" if cases.base.capacity is None else f"in {format_bytes(cases.base.capacity)}"
    return page.table(
        [
            Column("Settings", tuple(names), shrinks_to=24),
            Column("peak\nreserved", tuple(format_bytes(row.peak_reserved) for row in rows), right=True),
            Column("peak\nallocated", tuple(format_bytes(row.peak_allocated) for row in rows), right=True, drop=3),
            Column("fragmentation\nat the peak", tuple(format_bytes(row.fragmentation) for row in rows), right=True),
            Column("share", tuple(f"{100 * row.fragmentation_share:.1f} %" for row in rows), right=True, drop=2),
            Column(outcome, tuple(_outcome(row, cases) for row in rows)),
        ]
    )


def _outcome(case: Replay, cases: Cases) -> str:
    if case.ooms:
        at = case.ooms[-1].index
        return "out at the start" if at < 0 else f"out at event {at}"
    if cases.replay.ooms and case.capacity is None:
        return "not known"
    return "no" if cases.base.capacity is None else "fits"


def _remarks(cases: Cases) -> Iterator[RenderableType]:
    replay = cases.replay
    if any(case.ended for case in (cases.base, *cases.others)):
        yield Text("A case that runs out where the recording did not ends there: its peaks are those up to there.")
    if not all(case.from_recorded_start for case in (cases.base, *cases.others)):
        _, allocated, reserved = replay.timeline.events[0]
        if reserved:
            yield Text(
                "Other settings, and a card too small for the start, begin with the blocks that were in use then, "
                f"allocated anew; without the {format_bytes(reserved - allocated)} that were held besides."
            )
    for note in replay.snapshot.notes:
        yield Text(f"note: {shown(note)}")


def _explained(cases: Cases, why: OomExplanation, page: Page, top: int) -> Iterator[RenderableType]:
    oom = why.oom
    where = "before the history" if oom.index < 0 else f"at event {oom.index}"
    yield ""
    yield Text(f"Out of memory {where}", "bold")
    yield Padding(Text("\n".join(_sums(why))), (0, 0, 0, 2))
    if why.free:
        yield ""
        yield _table_of_free(why.free, page, top)
    yield ""
    yield _table_of_holders("Who held the rest", list(why.holders), page, top)
    yield ""
    yield from _helps(cases, why)


def _sums(why: OomExplanation) -> Iterator[str]:
    oom = why.oom
    kind = ", ".join(part for part in (_pool_name(oom.pool), f"stream {oom.stream}" if oom.stream else "") if part)
    frame = why.frame
    yield (
        f"asked for: {format_bytes(oom.requested)}"
        + (f" ({kind})" if kind else "")
        + (f", {_line(frame)}" if frame is not None else "")
    )
    left = "" if oom.free is None else f"; the card had {format_bytes(oom.free)} left"
    if why.capacity is not None and not why.capacity.is_card:
        left += ", but the process was held to less (a memory fraction)"
    elif why.capacity is not None:
        left += f" of {format_bytes(why.capacity.bytes)}"
    yield f"needed from the card: {format_bytes(why.needed)}{left}"
    free = sum(row.bytes for row in why.free)
    waiting = f", {format_bytes(why.waiting)} waiting for other streams" if why.waiting else ""
    yield (
        f"held: {format_bytes(oom.reserved)}, of it {format_bytes(oom.allocated)} in blocks in use, "
        f"{format_bytes(free)} in free blocks{waiting}"
    )
    if why.largest_free:
        yield f"largest free block: {format_bytes(why.largest_free)}, {why.largest_why}"


def _table_of_free(rows: Sequence[FreeBlocks], page: Page, top: int) -> Table:
    shown_rows = rows[:top] if top else rows
    hidden = rows[len(shown_rows) :]
    cells = [
        (_kind(row.small, row.stream, row.pool, _class(row.least)), str(row.count), format_bytes(row.bytes),
         format_bytes(row.largest), row.why)
        for row in shown_rows
    ]  # fmt: skip
    if hidden:
        sums = str(sum(row.count for row in hidden)), format_bytes(sum(row.bytes for row in hidden))
        cells.append((f"... {len(hidden)} more", *sums, format_bytes(max(row.largest for row in hidden)), ""))
    names, counts, sizes, largest, why = (tuple(column) for column in zip(*cells, strict=True))
    return page.table(
        [
            Column("Free blocks", names, shrinks_to=16),
            Column("count", counts, right=True),
            Column("bytes", sizes, right=True),
            Column("largest", largest, right=True, drop=1),
            Column("did not serve", why, shrinks_to=12),
        ]
    )


def _table_of_holders(title: str, rows: Sequence[Holder], page: Page, top: int) -> Table:
    total = sum(row.bytes for row in rows)
    shown_rows = rows[:top] if top else rows
    hidden = rows[len(shown_rows) :]
    cells = [(_line(row.frame), str(row.count), row.bytes) for row in shown_rows]
    if hidden:
        cells.append((f"... {len(hidden)} more", str(sum(r.count for r in hidden)), sum(r.bytes for r in hidden)))
    return page.table(
        [
            Column(title, tuple(cell[0] for cell in cells), shrinks_to=16, from_left=True),
            Column("blocks", tuple(cell[1] for cell in cells), right=True),
            Column("bytes", tuple(format_bytes(cell[2]) for cell in cells), right=True),
            Column("share", tuple(f"{100 * cell[2] / max(total, 1):.0f} %" for cell in cells), right=True),
        ]
    )


def _helps(cases: Cases, why: OomExplanation) -> Iterator[RenderableType]:
    if not why.tried or why.capacity is None:
        yield Text("What the card could give is not recorded, so no setting can be tried: give --capacity.")
        return
    card = format_bytes(why.capacity.bytes)
    if why.remedies:
        yield Text(f"Would have helped, each replayed from the start on a card that gives {card}:")
        for remedy in why.remedies:
            line = f"{remedy.settings}: peak {format_bytes(remedy.peak_reserved)} reserved"
            yield Padding(Text(line), (0, 0, 0, 2))
        return
    text = f"None of the {len(why.tried)} settings tried would have helped."
    if why.beyond:
        text += f" Blocks in use and the request exceed {card} by {format_bytes(why.beyond)}: no setting can."
    yield Text(f"{text} The card lacked {format_bytes(why.shortfall)} for this request.")


def _table_of_segments(cases: Cases, page: Page) -> Table:
    replay = cases.replay
    rows = grouped(replay.timeline.segments)
    total = [sum(getattr(row, name) for row in rows) for name in ("count", "reserved", "allocated", "free")]
    names = [
        _kind(row.small, row.stream, row.pool, "expandable" if row.expandable else "") for row in rows
    ]  # fmt: skip
    return page.table(
        [
            Column("Segments at the end", (*names, "all"), shrinks_to=16),
            Column("count", (*(str(row.count) for row in rows), str(total[0])), right=True),
            Column("reserved", (*(format_bytes(row.reserved) for row in rows), format_bytes(total[1])), right=True),
            Column("allocated", (*(format_bytes(row.allocated) for row in rows), format_bytes(total[2])), right=True),
            Column("free", (*(format_bytes(row.free) for row in rows), format_bytes(total[3])), right=True),
            Column(
                "largest\nfree block",
                (*(format_bytes(row.largest_free) for row in rows),
                 format_bytes(max((row.largest_free for row in rows), default=0))),
                right=True, drop=1,
            ),
        ],
        sums_from=len(rows),
    )  # fmt: skip


def _kind(small: bool, stream: int, pool: Pool, more: str) -> str:
    """What sets free blocks or segments apart; the default is not named."""
    parts = ["small" if small else "large", f"stream {stream}" if stream else "", _pool_name(pool), more]
    return ", ".join(part for part in parts if part)


def _pool_name(pool: Pool) -> str:
    return "" if pool == DEFAULT_POOL else f"pool {pool[0]}.{pool[1]}"


def _class(least: int) -> str:
    return _CLASSES.get(least >> 20, "over 500 MiB")


def _line(frame: Frame | None) -> str:
    if frame is None:
        return "(no stack recorded)"
    place = f"{frame.filename}:{frame.line} " if frame.filename else ""
    return shown(f"{place}{frame.name}", 300)


def _named(settings: AllocatorSettings) -> str:
    return shown(str(settings), 300) or "default"
