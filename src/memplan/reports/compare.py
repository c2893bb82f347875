"""Reports that compare two steps, or a measured step with its prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter

from memplan._bytes import format_bytes, signed
from memplan._text import format_seconds
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
    size_or_dash,
    table_of,
)
from memplan.studies.comparisons.comparison import (
    CAUSE_LABELS,
    Comparison,
    LayerPair,
    have_comparable_seconds,
    headline,
    remarks,
    seconds_sentence,
)
from memplan.studies.comparisons.measured import MeasuredComparison, Peak


def report(comparison: Comparison, top: int = 12) -> Document:
    """Return titles, headline, times, tables by category, by layer and of decisions, and remarks; tables with ``top``
    rows, 0 for all."""
    a, b = comparison.a, comparison.b
    return document(
        None,
        _head(comparison),
        [by_cause(comparison)],
        _figures(comparison),
        _by_layer(comparison, top) if a.layers or b.layers else [],
        [_different_decisions(comparison, top)] if a.decided and b.decided and comparison.decided_otherwise else [],
        notes((*comparison.notes, *a.notes, *b.notes)),
    )


def _head(comparison: Comparison) -> Iterator[Part]:
    """Yield the titles of A and B, the headline, the times, and the notes on what cannot be compared."""
    for name, side in (("A", comparison.a), ("B", comparison.b)):
        kind = "" if side.train is None else ", training step" if side.train else ", inference"
        yield Line(f"{name}: {side.title} ({side.origin}{kind}, {side.device})", "bold")
    yield f"{headline(comparison)}."
    if seconds := seconds_sentence(comparison):
        yield seconds
    yield from remarks(comparison)


def by_cause(comparison: Comparison, names: tuple[str, str, str] = ("A", "B", "B - A")) -> Table:
    """Return the bytes at both peaks by category, the largest difference first; the last row adds up to the peaks."""
    rows = sorted(comparison.by_cause, key=lambda row: (-abs(row.difference), -row.a))
    shares = lambda rows: _share(sum(row.a for row in rows), sum(row.b for row in rows))  # noqa: E731
    fields = [
        name_field(
            "By cause, at the peak",
            lambda row: str(CAUSE_LABELS.get(row.cause, row.cause)),
            shrinks_to=12,
            from_left=False,
        ),
        number_field(names[0], lambda row: row.a, cell=lambda row: size_or_dash(row.a)),
        number_field(names[1], lambda row: row.b, cell=lambda row: size_or_dash(row.b)),
        number_field(names[2], lambda row: row.difference, _signed),
        Field("", lambda row: shares([row]), shares, right=True, drop=1),
    ]
    return table_of(rows, fields, total="peak")


def _figures(comparison: Comparison) -> list[Table]:
    """Return a table of saved bytes, weights, parameters, time and memory techniques; [] if none of these is known."""
    a, b = comparison.a, comparison.b
    rows = [_bytes_row("saved from forward to backward", a.saved_bytes, b.saved_bytes)]
    rows.append(_bytes_row("weights", a.weight_bytes, b.weight_bytes))
    rows.append(_bytes_row("activations at once, at most", a.activation_bytes, b.activation_bytes))
    rows.append(_bytes_row("weights in another dtype, at most", a.cast_bytes, b.cast_bytes))
    rows.append(_row("parameters", a.parameters, b.parameters, lambda n: f"{n:,}", lambda n: f"{n:+,}"))
    if a.reserved != a.peak or b.reserved != b.peak:
        rows.append(_bytes_row("reserved, at most", a.reserved, b.reserved))
    if have_comparable_seconds(a, b):
        rows.append(_row("seconds", a.seconds, b.seconds, format_seconds, _signed_seconds))
    levers_a, levers_b = ([row.lever for row in side.decided] for side in (a, b))
    for lever in dict.fromkeys((*levers_a, *levers_b)):
        rows.append(_row(f"values: {lever}", levers_a.count(lever), levers_b.count(lever), str, lambda n: f"{n:+}"))
    headers = ("Of a step", "A", "B", "B - A")
    fields = [Field(header, itemgetter(index), right=index > 0) for index, header in enumerate(headers)]
    known = [row for row in rows if row is not None]
    return [table_of(known, fields)] if known else []


def _different_decisions(comparison: Comparison, top: int) -> Table:
    """Return a table of the values to which the plans of A and B apply different memory techniques.

    Rows are pairs (decision of A, decision of B), either of which may be None.
    """
    fields = [
        name_field("Decided otherwise", lambda pair: (pair[0] or pair[1]).value, from_left=False),
        Field("layer", lambda pair: (pair[0] or pair[1]).layer, shrinks_to=12, from_left=True, drop=1),
        number_field("bytes", lambda pair: max(decision.bytes for decision in pair if decision is not None)),
        Field("A", lambda pair: pair[0].lever if pair[0] else "-"),
        Field("B", lambda pair: pair[1].lever if pair[1] else "-"),
    ]
    return table_of(comparison.decided_otherwise, fields, top)


def _bytes_row(label: str, a: int | None, b: int | None) -> tuple[str, ...] | None:
    return _row(label, a, b, size_or_dash, _signed)


def _row(
    label: str, a: float | None, b: float | None, show: Callable[..., str], show_difference: Callable[..., str]
) -> tuple[str, ...] | None:
    """Return (label, a, b, b - a) as texts, "?" for an unknown figure; None if both are unknown or 0. ``show`` formats
    the figures, ``show_difference`` their difference."""
    if not a and not b:
        return None
    difference = ""
    if a is not None and b is not None:
        difference = "-" if a == b else show_difference(b - a)
    return (label, "?" if a is None else show(a), "?" if b is None else show(b), difference)


_HEADERS = {"saved_bytes": "saves", "output_bytes": "outputs", "weight_bytes": "weights"}


def _by_layer(comparison: Comparison, top: int) -> Iterator[Part]:
    """Yield a table of the layers that differ, the largest difference first, and the number of those that do not.

    Layers are compared by saved bytes and outputs; if neither side saves anything, by outputs and weights.
    """
    saves = any(layer.saved_bytes for side in (comparison.a, comparison.b) for layer in side.layers)
    first, second = ("saved_bytes", "output_bytes") if saves else ("output_bytes", "weight_bytes")
    pairs = sorted(comparison.layers, key=lambda pair: (-abs(pair.difference(first)), -_larger(pair, first)))
    different = [pair for pair in pairs if any(pair.difference(name) for name in _HEADERS)]
    same = len(pairs) - len(different)
    if different:
        fields = [name_field("By layer", lambda pair: pair.name)]
        fields += [*_layer_fields(first, drop=0), *_layer_fields(second, drop=1)]
        yield table_of(different, fields, top, f"all {len(comparison.layers)}", comparison.layers)
    if same:
        text = "1 layer takes" if same == 1 else f"{same} layers take"
        yield Line(f"{text} the same in both.", "dim")


def _layer_fields(name: str, drop: int) -> list[Field]:
    """Return three columns for an attribute of layers in bytes: its value in A, in B, and the difference.

    ``drop`` is that of the difference; the columns of A and B are left out before it. With 0, all of them stay.
    """
    header, drop_sides = _HEADERS[name], drop + 2 if drop else 0
    a: Callable[[Sequence[LayerPair]], str] = lambda pairs: _total([pair.a for pair in pairs], name)  # noqa: E731
    b: Callable[[Sequence[LayerPair]], str] = lambda pairs: _total([pair.b for pair in pairs], name)  # noqa: E731
    return [
        Field(f"{header}\nA", lambda pair: a([pair]), a, right=True, drop=drop_sides),
        Field(f"{header}\nB", lambda pair: b([pair]), b, right=True, drop=drop_sides),
        number_field(f"{header}\nB - A", lambda pair: pair.difference(name), _signed, drop=drop),
    ]


def _total(layers: Sequence[object], field: str) -> str:
    """Return the sum of an attribute in bytes over layers of A or of B as text; "none" if that side has none of them,
    which are None."""
    present = [layer for layer in layers if layer is not None]
    return size_or_dash(sum(getattr(layer, field) for layer in present)) if present else "none"


def _larger(pair: LayerPair, field: str) -> int:
    """Return an attribute in bytes of a layer, in A or B, whichever is larger. The layer can be missing in one."""
    return max(getattr(pair.a, field, 0), getattr(pair.b, field, 0))


def _signed(number: int) -> str:
    return signed(number) if number else "-"


def _signed_seconds(number: float) -> str:
    return ("-" if number < 0 else "+") + format_seconds(abs(number))


def _share(a: int, b: int) -> str:
    """Return the change from ``a`` to ``b`` in percent; "" if there is none, or ``a`` is 0."""
    return f"{100 * (b - a) / a:+.0f} %" if a and b != a else ""


def measured_report(measured: MeasuredComparison, top: int = 12) -> Document:
    """Return measured and predicted peaks, and their comparison if they differ; tables with ``top`` rows, 0 for all."""
    fields = [
        Field("Beside the prediction: peak of", lambda row: row.part),
        Field("predicted", _predicted, right=True, number=lambda row: row.predicted),
        number_field("measured", lambda row: row.measured),
        Field("off", _off, right=True),
    ]
    if measured.same:
        return document(None, [table_of(measured.peaks, fields)], ["Every peak is as predicted, to the byte."])
    return document(None, [table_of(measured.peaks, fields)]) + report(measured.comparison, top)


def _predicted(row: Peak) -> str:
    low, high = format_bytes(row.low), format_bytes(row.predicted)
    return high if row.low == row.predicted else f"{low} to {high}"


def _off(row: Peak) -> str:
    """Return the relative error of a prediction, "within" for a measured peak inside the predicted interval."""
    if row.off is None:
        return "-"
    if row.off:
        return f"{100 * row.off:+.3f} %"
    return "0" if row.low == row.predicted else "within"
