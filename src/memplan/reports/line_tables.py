"""Report of line profiles: a table for each function."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memplan.explanation.line_profile import LineProfile, LineRow
from memplan.reports.document import Document, Field, Line, Section, document, notes, size_or_dash, table_of

_LEGEND = (
    "held: allocated after the line. added, freed: what it leaves, and what it ends, of that. peak: the most while it "
    "ran. Of several hits, the most of any."
)


def report(profiles: Sequence[LineProfile]) -> Document:
    """Return a section for each function, and a legend."""
    sections = [
        Section((table_of(profile.rows, _FIELDS), *notes(profile.notes)), profile.title) for profile in profiles
    ]
    return document(None, *sections, [Line(_LEGEND, "dim")] if profiles else [])


def _ran(show: Callable[[LineRow], str]) -> Callable[[LineRow], str]:
    """Return ``show`` with an empty text for lines that never ran."""
    return lambda row: show(row) if row.hits or row.peak else ""


def _size_field(name: str) -> Field:
    """Return a column of the bytes in attribute ``name`` of a line."""
    size = lambda row: getattr(row, name)  # noqa: E731
    return Field(name, _ran(lambda row: size_or_dash(size(row))), right=True, number=size)


_FIELDS = (
    Field("line", lambda row: str(row.line), right=True, number=lambda row: row.line),
    Field("hits", _ran(lambda row: str(row.hits)), right=True, number=lambda row: row.hits),
    *map(_size_field, ("held", "added", "freed", "peak")),
    Field("code", lambda row: row.source.expandtabs(4), shrinks_to=12),
)
