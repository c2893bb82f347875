"""Report of several ranks' watches: how each ended, the ranks above the median, and the owners of their memory."""

from __future__ import annotations

from collections.abc import Iterator

from memplan._bytes import signed
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
from memplan.studies.watched.watched import WatchedRank, WatchedRanks, summary


def report(result: WatchedRanks, top: int = 10) -> Document:
    """Report how the ranks ended, the ranks above the median with their owners, and all ranks; tables have ``top``
    rows, 0 for all."""
    peak = "measured peak" if result.measured else "predicted peak"
    fields = [
        name_field("Rank", lambda row: str(row.watch.rank), shrinks_to=None),
        number_field(peak, lambda row: row.peak),
        Field("beside the\nmedian", lambda row: signed(row.beyond), right=True, number=lambda row: row.beyond),
        number_field("steps", lambda row: row.watch.steps, "{:,}".format, drop=1),
        Field("state", lambda row: row.watch.state),
        number_field("leaks", lambda row: len(row.watch.leaks), str, drop=2),
    ]
    text = document(f"Watches of {counted(len(result.rows), 'rank')}", _head(result))
    for row in result.rows:
        if row.odd and any(owner.beyond > 0 for owner in row.owners):
            text += document(None, [], [_owners(row, top)])
    leaks = [f"rank {row.watch.rank}: {leak}" for row in result.rows for leak in row.watch.leaks]
    return text + document(None, [], [table_of(result.rows, fields, top)], leaks, notes(result.notes))


def _head(result: WatchedRanks) -> Iterator[Part]:
    """Yield the summary of all ranks."""
    bad = bool(result.ended_badly or result.odd)
    for sentence in summary(result):
        yield Line(f"{sentence[:1].upper()}{sentence[1:]}.", "warning" if bad else "")
    if not result.measured:
        yield "Peaks are those of the last observed steps, predicted from their ops."


def _owners(row: WatchedRank, top: int) -> Table:
    """Return the table of what a rank allocates beyond the median of all ranks, by owner."""
    fields = [
        name_field(f"Rank {row.watch.rank} beyond the median", lambda owner: str(owner.owner)),
        number_field("more", lambda owner: owner.beyond, signed),
        number_field("bytes", lambda owner: owner.bytes),
    ]
    return table_of(row.owners, fields, top)
