"""Report of why memory ran out."""

from __future__ import annotations

from functools import partial

from memplan._bytes import format_bytes_as_torch, signed
from memplan._text import counted
from memplan.explanation.why import Why, headline
from memplan.explanation.why_ranks import RankReasons
from memplan.reports.document import (
    Document,
    Field,
    Line,
    Section,
    document,
    name_field,
    number_field,
    size_or_dash,
    table_of,
)

_beyond = partial(signed, show=format_bytes_as_torch)


def report(why: Why) -> Document:
    """Report the parts of the device's memory, why memory ran out, and what to do."""
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


def ranks_report(reasons: RankReasons) -> Document:
    """Report the odd rank, a table of all ranks, and why the first rank ran out of memory."""
    size = lambda row, name: "-" if row.why is None else _size(getattr(row.why.message, name))  # noqa: E731
    fields = [
        name_field("Rank", lambda row: str(row.rank), shrinks_to=None),
        Field("asked for", lambda row: size(row, "requested"), right=True),
        Field("allocated", lambda row: size(row, "allocated"), right=True),
        Field("beside the\nmedian", lambda row: "-" if row.why is None else _beyond(row.beyond), right=True),
        Field("free", lambda row: size(row, "free"), right=True),
        Field("other\nprocesses", lambda row: size_or_dash(row.others), right=True, drop=1),
        Field("verdict", lambda row: "-" if row.why is None else row.why.verdict),
    ]
    head = [Line(sentence, "warning") for sentence in reasons.verdict]
    text = document(f"Out of memory: {counted(len(reasons.rows), 'rank')}", head, [table_of(reasons.rows, fields)])
    assert reasons.first.why is not None, "as checked where it was made"
    return text + document(None, [Line(f"Rank {reasons.first.rank}", "bold")]) + report(reasons.first.why)


def _size(size: int | None) -> str:
    return "?" if size is None else format_bytes_as_torch(size)
