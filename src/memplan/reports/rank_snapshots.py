"""Report of `memplan.replay_ranks`: the rank that holds more than the others, and the lines that do."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from memplan._bytes import format_bytes_as_torch, signed
from memplan._text import counted
from memplan.reports.document import (
    Document,
    Field,
    Line,
    Part,
    Table,
    document,
    name_field,
    notes,
    number_field,
    table_of,
)
from memplan.reports.replay import frame_line
from memplan.simulation.replays.ranks import RankRow, RankSnapshots
from memplan.simulation.snapshots.safe_pickle import shown

_change = partial(signed, show=format_bytes_as_torch)


def report(result: RankSnapshots, top: int = 10) -> Document:
    """Return the odd ranks with the lines that make them so, then all ranks; tables with ``top`` rows, 0 for all."""
    when = "at the peak" if result.at_peak else "when it was taken"
    fields = [
        name_field("Rank", lambda row: str(row.rank), shrinks_to=None),
        number_field(f"allocated\n{when}", lambda row: row.allocated, format_bytes_as_torch),
        Field("beside the\nmedian", lambda row: _change(row.beyond), right=True, number=lambda row: row.beyond),
        number_field("reserved", lambda row: row.reserved, format_bytes_as_torch),
        number_field("events", lambda row: row.events, "{:,}".format, drop=1),
        Field("file", lambda row: shown(row.source), shrinks_to=12, from_left=True, drop=2),
    ]
    text = document(f"Snapshots of {counted(len(result.rows), 'rank')}", _head(result))
    for row in result.odd:
        if any(owner.beyond > 0 for owner in row.owners):
            text += document(None, [], [_owners(row, top)])
    return text + document(None, [], [table_of(result.rows, fields, top)], notes(result.notes))


def finding(row: RankRow) -> str:
    """Return a sentence on a rank above the median, with the source line that exceeds its median most."""
    text = f"rank {row.rank} holds {format_bytes_as_torch(row.beyond)} more than the others"
    for owner in row.owners:  # the largest excess first
        if owner.beyond > 0:
            return f"{text}: {format_bytes_as_torch(owner.beyond)} of it from {frame_line(owner.frame)}"
    return text


def _head(result: RankSnapshots) -> Iterator[Part]:
    """Yield a finding for each rank that allocates much more than the others."""
    if not result.odd:
        yield f"No rank holds much more than the others: the median is {format_bytes_as_torch(result.median)}."
    for row in result.odd:
        yield Line(f"{finding(row)}.", "warning")
    if not result.at_peak:
        yield "Not all have a history, so that they are compared as they were when they were taken."


def _owners(row: RankRow, top: int) -> Table:
    """Return a table of the source lines that hold a rank's memory, with their excess over the median of the ranks."""
    fields = [
        name_field(f"Rank {row.rank} beyond the median", lambda owner: frame_line(owner.frame)),
        number_field("more", lambda owner: owner.beyond, _change),
        number_field("bytes", lambda owner: owner.bytes, format_bytes_as_torch),
    ]
    return table_of(row.owners, fields, top)
