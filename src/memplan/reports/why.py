"""Report of why memory ran out."""

from __future__ import annotations

from memplan._bytes import format_bytes_as_torch
from memplan.explanation.why import Why, headline
from memplan.reports.document import Document, Line, Section, document, name_field, number_field, table_of


def report(why: Why) -> Document:
    """Return where the memory was, why it ran out, and what helps."""
    title, total = headline(why.message), why.message.total
    fields = [
        name_field("Where the memory was", lambda part: part.name, from_left=False),
        number_field("bytes", lambda part: part.bytes, format_bytes_as_torch),
    ]
    if total:
        fields.append(number_field("share", lambda part: part.bytes, lambda size: f"{100 * size / total:.1f} %"))
    return document(
        title[:1].upper() + title[1:],
        [],
        [table_of(why.parts, fields, total=None if total is None else "all")] if why.parts else [],
        [why.reason],
        Section(tuple(Line(f"- {advice}", indent=2) for advice in why.advice), "What helps"),
    )
