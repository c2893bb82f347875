"""Report of a sequence of batches of different lengths."""

from __future__ import annotations

from collections.abc import Iterator

from memplan._bytes import format_bytes
from memplan._text import counted
from memplan.reports.document import Document, Field, Part, Table, document, name_field, number_field, table_of
from memplan.studies.lengths.lengths import Change, Lengths

_WORDS: dict[Change, str] = {
    "as drawn": "as drawn",
    "expandable": "expandable_segments:True",
    "largest first": "the longest as a warm-up",
    "padded to 64": "padded to multiples of 64",
    "padded to 256": "padded to multiples of 256",
    "sorted": "in buckets, longest first",
}


def report(lengths: Lengths, top: int = 12) -> Document:
    """Return the peaks of the sequence, a row a length and a row a change; ``top`` lengths, 0 for all."""
    return document(
        f"{lengths.title}: {lengths.batches:,} batches of {counted(len(lengths.lengths), 'length')} "
        f"on {lengths.device}",
        _sentences(lengths),
        [_lengths(lengths, top)],
        [] if lengths.device == "cpu" else [_moments(lengths)],
        [_changes(lengths)],
        _notes(lengths),
    )


def _sentences(lengths: Lengths) -> Iterator[Part]:
    """Yield the peaks, and on a card how many epochs run out of memory."""
    worst = f"at batch {lengths.worst_batch}, {lengths.axis} {lengths.worst_length}"
    if lengths.capacity is None:
        yield f"{format_bytes(lengths.allocated)} peak, {worst}."
        return
    yield (
        f"{format_bytes(lengths.allocated)} allocated at the peak, {worst}; {format_bytes(lengths.reserved)} reserved, "
        f"{format_bytes(lengths.fragments)} of it fragments."
    )
    share = f"{lengths.ran_out} of {lengths.epochs} epochs of {lengths.epoch} batches"
    capacity = format_bytes(lengths.capacity)
    if lengths.ran_out:
        yield f"{share} run out of the card's {capacity}."
    else:
        yield f"No epoch runs out of the card's {capacity} ({share})."


def _lengths(lengths: Lengths, top: int) -> Table:
    """Return the table of lengths, the longest first, with the peaks of a step that trains on nothing else ("alone").

    "between": the length was not recorded; its peaks come from recorded lengths (see `_notes`).
    """
    fields = [
        name_field(lengths.axis.capitalize(), lambda row: str(row.length)),
        number_field("batches", lambda row: row.batches, str),
        number_field("allocated alone", lambda row: row.allocated),
        *([] if lengths.device == "cpu" else [number_field("reserved alone", lambda row: row.reserved)]),
        Field("", lambda row: "" if row.recorded else "between", drop=1),
    ]
    return table_of(sorted(lengths.lengths, key=lambda row: -row.length), fields, top)


def _moments(lengths: Lengths) -> Table:
    """Return the table of the peak reserved bytes so far after a few batches: rows are (batch, bytes)."""
    return table_of(
        lengths.moments,
        [name_field("After batch", lambda row: str(row[0])), number_field("reserved", lambda row: row[1])],
    )


def _changes(lengths: Lengths) -> Table:
    """Return the table of the peaks if the first batches came in another order, padded, or with other settings."""
    fields = [
        name_field(f"First {lengths.compared} batches", lambda row: _WORDS[row.change], shrinks_to=20),
        number_field("allocated", lambda row: row.allocated),
    ]
    if lengths.device != "cpu":
        fields += [
            number_field("reserved", lambda row: row.reserved),
            number_field("fragments", lambda row: row.reserved - row.allocated, drop=1),
            Field("", lambda row: "fits" if row.fits else "runs out"),
        ]
    return table_of(lengths.changes, fields)


def _notes(lengths: Lengths) -> Iterator[Part]:
    """Yield how exact the bytes of lengths are that were not recorded."""
    if lengths.checked is not None:
        yield (
            f"Bytes of lengths between recorded ones are interpolated; at {lengths.checked}, recorded as a check, the "
            f"peak is {100 * abs(lengths.off):.2f} % off."
        )
    if lengths.larger:
        yield (
            f"For {counted(lengths.larger, 'length')} the next longer recorded one stands: recordings around them "
            "differ in more than bytes."
        )
