"""Report of ``--device all``: a step, or the largest value that fits, on each card of the catalogue."""

from __future__ import annotations

from memplan._bytes import format_bytes
from memplan._text import counted
from memplan.reports.document import Document, Field, document, name_field, number_field, table_of
from memplan.studies.capacity.on_cards import CardRow, OnCards


def report(result: OnCards) -> Document:
    """Return a row for each card, the smallest first: whether the step fits it, or the largest value that does."""
    fields = [name_field("card", lambda row: row.name), number_field("memory", lambda row: row.capacity)]
    peak = number_field("peak", lambda row: row.peak)
    recordings = counted(result.recordings, "recording")
    if not result.axis:
        need = number_field("reserved, with context", lambda row: row.need, drop=1)
        fitting = sum(row.fits for row in result.rows)
        heading = f"{result.title}: fits {fitting} of {counted(len(result.rows), 'card')}; {recordings}"
        return document(heading, [table_of(result.rows, [*fields, peak, need, Field("", _verdict)])])
    value = number_field(f"largest {result.axis}", lambda row: row.value, str, cell=_value)
    heading = (
        f"{result.title}: the largest {result.axis} on each card, of powers of two times 1, 1.25, 1.5 and 1.75; "
        f"{recordings}"
    )
    lines = [f"{result.failed}."] if result.failed else []
    lines.append(
        "Peaks are allocated bytes: the CUDA context and what the allocator cannot give back of its cache come on top."
    )
    if any(not row.fits for row in result.rows):
        lines.append(f"Where nothing fits, the peak is that of the smallest {result.axis} tried.")
    return document(heading, [table_of(result.rows, [*fields, value, peak, Field("the next", _next)]), *lines])


def _verdict(row: CardRow) -> str:
    """Return whether a step fits a card as text."""
    if not row.fits:
        return "does not fit"
    return "fits" if row.need <= row.capacity else "fits, as cached blocks are given back"


def _value(row: CardRow) -> str:
    return str(row.value) if row.fits else "does not fit"


def _next(row: CardRow) -> str:
    """Return the value after the answer, which does not fit, with its peak, or that it failed."""
    if row.end is None:
        return "the last to try" if row.fits else ""
    return f"{row.end}: {'failed' if row.end_peak is None else format_bytes(row.end_peak)}"
