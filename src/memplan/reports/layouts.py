"""Report of `memplan.layouts`."""

from __future__ import annotations

from collections.abc import Iterator

from memplan._bytes import format_bytes
from memplan._text import counted, format_seconds
from memplan.reports.document import (
    Document,
    Field,
    Part,
    document,
    name_field,
    notes,
    number_field,
    size_or_dash,
    table_of,
)
from memplan.studies.layouts.layouts import LayoutBytes, Layouts

_BOUNDS = (
    "batch: samples of a rank at a time. a step: at least as long as its kernels take at the card's rates (FLOPs or "
    "bytes), or what a rank sends at its links' (sent, where that is longer). per s: samples of all ranks, at most."
)


def report(result: Layouts, top: int = 0) -> Document:
    """Return the fastest layout that fits, and a row each; ``top`` rows, 0 for all."""
    fields = [
        name_field("Layout", lambda row: row.layout.title, shrinks_to=28),
        number_field("batch", lambda row: row.layout.micro_batch, str),
        number_field("allocated", lambda row: row.allocated, size_or_dash),
        number_field("needs", lambda row: row.needs, format_bytes),
        Field("fits", lambda row: "yes" if row.fits else "no"),
        Field("a step", _step),
        number_field("per s", lambda row: row.rate, lambda rate: f"{rate:,.0f}" if rate >= 100 else f"{rate:.2g}"),
    ]
    machines = max(result.world // result.per_node, 1)
    where = f"{counted(result.world, 'rank')} on {result.device}"
    where += f", {counted(machines, 'machine')} of {result.per_node}" if machines > 1 else ""
    return document(
        f"{result.title}: {where}",
        _answer(result),
        [table_of([row for row in result.rows if row.needs], fields, top)],
        _reasons(result.rows),
        [_links(result), _BOUNDS],
        notes(result.notes, "dim"),
    )


def _answer(result: Layouts) -> Iterator[Part]:
    """Yield the fastest layout that fits, or that none does."""
    best = result.best
    if best is None:
        least = min((row.needs for row in result.rows if row.needs), default=0)
        yield f"No layout fits {format_bytes(result.capacity)}: the smallest needs {format_bytes(least)} a rank."
        return
    yield (
        f"The fastest that fits: {fastest(best)}; a rank needs "
        f"{format_bytes(best.needs)} of {format_bytes(result.capacity)}, and a step takes at least "
        f"{format_seconds(best.seconds)}."
    )
    if not all(row.recorded or row.reason for row in result.rows):
        yield (
            f"It was recorded whole; of the others few of the {result.blocks} equal blocks, and their bytes are "
            "extrapolated."
        )


def fastest(row: LayoutBytes) -> str:
    """Return the name of a layout with its micro-batch."""
    return f"{row.layout.title}, micro-batches of {row.layout.micro_batch}"


def _reasons(rows: tuple[LayoutBytes, ...]) -> Iterator[Part]:
    """Yield why layouts were not recorded, each reason once."""
    for reason in dict.fromkeys(row.reason for row in rows if row.reason):
        alike = [f"{row.layout.title} at {row.layout.micro_batch}" for row in rows if row.reason == reason]
        yield f"Not recorded, as {reason}: {'; '.join(alike)}."


def _links(result: Layouts) -> str:
    """Return a sentence on the bandwidth of links within a machine and between machines."""
    within, between = (f"{rate / 1e9:,.4g} GB/s" for rate in result.links)
    text = f"Links: {within} of a card to others of its machine"
    return f"{text}, {between} to other machines." if result.world > result.per_node else f"{text}."


def _step(row: LayoutBytes) -> str:
    """Return the least time of a step, with "sent" if communication takes longer than the kernels."""
    return format_seconds(row.seconds) + (" sent" if row.sending > row.compute else "")
