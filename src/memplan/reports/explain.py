"""Report of an explanation: summary, bytes by category and by layer, reasons; and its JSON."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from memplan._bytes import format_bytes
from memplan._json import text_of, to_plain
from memplan._text import format_share
from memplan.explanation.model import (
    LABELS,
    Explanation,
    LayerRow,
    OwnerRow,
    peak_sentence,
    scaling_sentence,
    workspace_sentence,
)
from memplan.reports import card, host, line_tables
from memplan.reports.document import (
    Code,
    Document,
    Field,
    Line,
    Part,
    Section,
    Table,
    bar_field,
    document,
    name_field,
    number_field,
    size_or_dash,
    table_of,
)
from memplan.trace.records import Assumption, loud

_REASONS = 5
_LINES_OF_A_REASON = 3
_NUMBER = re.compile(r"\d+")
_NEEDS = {"weight_gradient": "weight", "input_gradient": "input"}


def dumps(explanation: Explanation, **more: Any) -> str:
    """Return an explanation as JSON, with the keys ``more`` (``script``, ``beside``, ``run``) that are not None."""
    return text_of(explanation.to_dict() | {name: to_plain(part) for name, part in more.items() if part is not None})


def report(explanation: Explanation, top: int = 12) -> Document:
    """Return where the memory of a step goes: tables with ``top`` rows, 0 for all; last the script of a recipe."""
    kind = "training step" if explanation.train else "inference"
    return document(
        f"{explanation.title}: {kind} on {explanation.device}",
        _head(explanation),
        [_by_cause(explanation)],
        [] if explanation.card is None else card.parts(explanation.card),
        host.parts(explanation),
        [_holders_table(explanation, top)] if explanation.holders else [],
        [_by_layer(explanation, top), _legend(explanation)] if explanation.layers else [],
        Section(tuple(_reasons(explanation, top)), "Why the most is saved"),
        _remarks(explanation),
        *line_tables.report(explanation.lines).sections,
        Section((Code(explanation.source.rstrip()),) if explanation.source else (), "The script that was recorded"),
    )


def at_peak(explanation: Explanation, top: int = 12) -> Document:
    """Report the memory at the peak of a run of many steps, and whether it fits on cards."""
    return document(
        None,
        [_by_cause(explanation)],
        [] if explanation.card is None else card.parts(explanation.card),
        host.parts(explanation),
        [_holders_table(explanation, top)] if explanation.holders else [],
        _remarks(explanation),
    )


def causes(explanation: Explanation) -> Document:
    """Report the bytes at the peak by cause, for a rank among others."""
    return document(explanation.title, [explanation.sentence], [_by_cause(explanation)])


def _head(explanation: Explanation) -> Iterator[Part]:
    """Yield the summary sentences, then the assumptions on which the figures depend most."""
    yield explanation.sentence
    for line in (workspace_sentence(explanation), peak_sentence(explanation), scaling_sentence(explanation)):
        if line:
            yield line
    for assumption in loud(explanation.assumptions):
        yield Line(_assumption_line(assumption), "bad")


def _by_cause(explanation: Explanation) -> Table:
    """Return the bytes at the peak by cause, largest first; the last row adds up to the peak.

    Rows are (cause, bytes at the peak, largest bytes at any time).
    """
    peak, most = explanation.timeline.peak_allocated, explanation.by_cause_most
    rows = [(cause, size, most.get(cause, size)) for cause, size in explanation.by_cause.items()]
    rows = sorted((row for row in rows if row[1] or row[2]), key=lambda row: (-row[1], -row[2]))
    fields = [
        name_field("By cause", lambda row: LABELS.get(str(row[0]), str(row[0])), shrinks_to=12, from_left=False),
        number_field("at the peak", lambda row: row[1]),
        number_field("share", lambda row: row[1], lambda size: format_share(size, peak), drop=1),
        bar_field(lambda row: row[1] / peak if peak else 0, drop=3),
        Field("most at any time", lambda row: format_bytes(row[2]), right=True, drop=2, number=lambda row: row[2]),
    ]
    return table_of(rows, fields, total="peak")


def _holders_table(explanation: Explanation, top: int) -> Table:
    """Return the storages alive at the peak, by owner."""
    fields = [
        name_field("Who holds the peak", _holder_name),
        Field("cause", lambda row: LABELS[row.cause], shrinks_to=11, drop=1),
        Field("born", lambda row: "building" if row.step < 0 else f"{row.phase} {row.step + 1}", drop=3),
        Field("at", lambda row: row.where or "-", shrinks_to=14, from_left=True, drop=2),
        number_field("bytes", lambda row: row.bytes),
    ]
    return table_of(explanation.holders, fields, top, "all")


def _holder_name(row: OwnerRow) -> str:
    """Return "layer: storage x count"; a parameter's name alone, as it begins with the layer's."""
    with_layer = row.layer and not row.name.startswith(f"{row.layer}.")
    name = f"{row.layer}: {row.name}" if with_layer else row.name
    return (name or "-") + (f" x {row.count}" if row.count > 1 else "")


def _by_layer(explanation: Explanation, top: int) -> Table:
    """Return the layers that save the most for backward (in inference: output the most), and the totals."""
    rows = sorted(explanation.layers, key=_sort_key(explanation.train), reverse=True)
    fields = _TRAINING if explanation.train else _INFERENCE
    return table_of(rows, fields, top, f"all {len(rows)} layers")


def _sort_key(train: bool) -> Callable[[LayerRow], tuple[int, ...]]:
    """Return a sort key for layers: bytes saved for backward, in inference bytes of the outputs."""
    return lambda row: (row.saved_bytes, row.kept_bytes, row.output_bytes) if train else (row.output_bytes,)


def _saves(row: LayerRow) -> str:
    """Return the bytes counted for this layer; "(shared)" if all that it saves is counted for another layer."""
    return "(shared)" if row.kept_bytes and not row.saved_bytes else size_or_dash(row.saved_bytes)


def _needs(row: LayerRow) -> str:
    """Return the gradients that read the tensors a layer saves: of its weight, of its input, both, or none."""
    if not row.kept_bytes:
        return "-"
    words = [_NEEDS.get(need, need) for need in row.needed_for]
    return "both" if len(words) > 1 else "".join(words) or "nothing"


def _shared(row: LayerRow) -> str:
    """Return the first other layer that saves the same tensors, as "name +N" if N more do."""
    layers = dict.fromkeys(other.rsplit("'s ", 1)[0] for other in row.shared_with)  # of "block.0's input"
    others = [layer for layer in layers if layer != row.name]
    if not others:
        return "-"
    return others[0] + (f" +{len(others) - 1}" if len(others) > 1 else "")


def _bytes_field(header: str, name: str, drop: int, cell: Callable[[LayerRow], str] | None = None) -> Field:
    """Return a column of the bytes in attribute ``name`` of a layer, with "-" for 0 unless ``cell`` gives the text."""
    cell = cell or (lambda row: size_or_dash(getattr(row, name)))
    return number_field(header, lambda row: getattr(row, name), cell=cell, drop=drop)


_INFERENCE = (
    name_field("By layer", lambda row: row.name, layers=True),
    Field("kind", lambda row: row.kind, shrinks_to=9, drop=3),
    _bytes_field("outputs", "output_bytes", drop=1),
    _bytes_field("weights", "weight_bytes", drop=5),
)
_TRAINING = (
    *_INFERENCE[:3],
    _bytes_field("saves", "saved_bytes", drop=0, cell=_saves),
    Field("needed\nfor", _needs, drop=2),
    Field("shared\nwith", _shared, shrinks_to=12, from_left=True, drop=4),
    _INFERENCE[3],
    _bytes_field("gradients", "gradient_bytes", drop=6),
)


def _legend(explanation: Explanation) -> Line:
    """Return the legend of the table by layer."""
    outputs = "outputs: a layer's last result, not all alive at one time."
    if not explanation.train:
        return Line(outputs, "dim")
    return Line(
        "saves: kept from forward to backward, for the gradient of its weight, its input, or both; what "
        f"several layers keep together counts for the first, and is (shared) for the others. {outputs}",
        "dim",
    )


def _reasons(explanation: Explanation, top: int) -> Iterator[Part]:
    """Yield the layers that save the most and why; layers of the same kind, size and reasons are listed once."""
    rows = [row for row in explanation.layers if row.saved_bytes and row.why]
    rows.sort(key=_sort_key(True), reverse=True)
    groups: dict[tuple[object, ...], list[LayerRow]] = {}
    for row in rows:
        why = _NUMBER.sub("#", "\n".join(row.why))  # reasons of like layers differ in the numbers of their names
        groups.setdefault((row.kind, row.saved_bytes, why), []).append(row)
    for first, *others in list(groups.values())[: min(top, _REASONS) if top else None]:
        where = f" ({first.where})" if first.where else ""
        like = f", and {len(others)} layer{'s' if len(others) > 1 else ''} like it" if others else ""
        yield f"{first.name}, {format_bytes(first.saved_bytes)}{where}{like}"
        shown = list(first.why[:_LINES_OF_A_REASON] if top else first.why)
        if len(shown) < len(first.why):
            shown[-1] = f"{shown[-1]}; and {len(first.why) - len(shown)} smaller"
        yield from (Line(why, indent=2) for why in shown)


def _remarks(explanation: Explanation) -> Iterator[Part]:
    """Yield the assumptions that do not stand at the head of the report, and the notes."""
    at_head = loud(explanation.assumptions)
    yield from (_assumption_line(assumption) for assumption in explanation.assumptions if assumption not in at_head)
    yield from (f"note: {note}" for note in explanation.notes)


def _assumption_line(assumption: Assumption) -> str:
    """Return an assumption as a line, with how often and where it was made."""
    times = f" ({assumption.count} times)" if assumption.count > 1 else ""
    where = f", at {assumption.where}" if assumption.where else ""
    kind = "kernel" if assumption.kind == "kernel" else "assumed"
    return f"{kind}: {assumption.text}{times}{where}"
