"""Two steps side by side on the terminal and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from memplan._bytes import format_bytes
from memplan._text import format_seconds, printable
from memplan.reports.columns import Column
from memplan.reports.output import PIPE_WIDTH, Page, print_parts
from memplan.studies.comparisons.comparison import (
    CAUSE_LABELS,
    Comparison,
    LayerPair,
    by_one_measure,
    headline,
    remarks,
    seconds_sentence,
    signed,
)

FORMAT = "memplan.compare"
SCHEMA = 1


def dumps(comparison: Comparison) -> str:
    """The comparison as JSON text: the same text for the same comparison. Bytes and seconds."""
    data = {"format": FORMAT, "schema": SCHEMA, **comparison.to_dict()}
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def print_comparison(comparison: Comparison, file: TextIO | None = None, top: int = 12) -> None:
    """Print a comparison: as wide as the terminal, or 80 columns without colours where ``file`` is not one.

    Args:
        comparison: what to print.
        file: where to; stdout by default.
        top: how many layers to list; 0 for all.
    """
    print_parts(lambda page: render(comparison, top, page.width, ascii_only=page.ascii_only), file)


def render(
    comparison: Comparison, top: int = 12, width: int = PIPE_WIDTH, *, ascii_only: bool = False
) -> list[RenderableType]:
    """The parts of the report as rich renderables, in order."""
    page = Page(width, ascii_only)
    parts: list[RenderableType] = list(_head(comparison))
    parts += ["", by_cause(comparison, page)]
    figures = _figures(comparison, page)
    parts += ["", figures] if figures.row_count else []
    if any(side.layers for side in (comparison.a, comparison.b)):
        parts += ["", *_by_layer(comparison, top, page)]
    if comparison.a.decided and comparison.b.decided and comparison.decided_otherwise:
        parts += ["", _decided(comparison, top, page)]
    notes = dict.fromkeys((*comparison.notes, *comparison.a.notes, *comparison.b.notes))
    if notes:
        parts += ["", *(Text(f"note: {printable(note)}") for note in notes)]
    return parts


def _head(comparison: Comparison) -> Iterator[RenderableType]:
    for name, side in (("A", comparison.a), ("B", comparison.b)):
        kind = {True: ", training step", False: ", inference"}.get(side.train, "") if side.train is not None else ""
        yield Text(f"{name}: {printable(side.title)} ({side.origin}{kind}, {printable(side.device)})", "bold")
    yield Text(f"{headline(comparison)}.")
    seconds = seconds_sentence(comparison)
    for line in (*([seconds] if seconds else []), *remarks(comparison)):
        yield Text(printable(line))


def by_cause(comparison: Comparison, page: Page, names: tuple[str, str, str] = ("A", "B", "B - A")) -> Table:
    """What is live at each side's peak, the largest difference first; the last row adds up to the peaks."""
    rows = sorted(comparison.by_cause, key=lambda row: (-abs(row.difference), -row.a))
    a, b = comparison.a.peak, comparison.b.peak
    causes = [CAUSE_LABELS.get(row.cause, printable(row.cause)) for row in rows]
    columns = [
        Column("By cause, at the peak", (*causes, "peak"), shrinks_to=12),
        Column(names[0], (*(_size(row.a) for row in rows), format_bytes(a)), right=True),
        Column(names[1], (*(_size(row.b) for row in rows), format_bytes(b)), right=True),
        Column(names[2], (*(_signed(row.difference) for row in rows), _signed(b - a)), right=True),
        Column("", (*(_share(row.a, row.b) for row in rows), _share(a, b)), right=True, drop=1),
    ]
    return page.table(columns, len(rows))


def _figures(comparison: Comparison, page: Page) -> Table:
    """What else is known of both."""
    a, b = comparison.a, comparison.b
    rows = [_bytes_row("saved from forward to backward", a.saved_bytes, b.saved_bytes)]
    rows.append(_bytes_row("weights", a.weight_bytes, b.weight_bytes))
    rows.append(_bytes_row("activations at once, at most", a.activation_bytes, b.activation_bytes))
    rows.append(_bytes_row("weights in another dtype, at most", a.cast_bytes, b.cast_bytes))
    rows.append(_row("parameters", a.parameters, b.parameters, lambda n: f"{n:,}", lambda n: f"{n:+,}"))
    if a.reserved != a.peak or b.reserved != b.peak:
        rows.append(_bytes_row("reserved, at most", a.reserved, b.reserved))
    if by_one_measure(a, b):
        rows.append(_row("seconds", a.seconds, b.seconds, format_seconds, _signed_seconds))
    levers = [[row.lever for row in side.decided] for side in (a, b)]
    for lever in dict.fromkeys((*levers[0], *levers[1])):
        counts = levers[0].count(lever), levers[1].count(lever)
        rows.append(_row(f"values: {lever}", *counts, str, lambda n: f"{n:+}"))
    known = [row for row in rows if row is not None]
    headers = ("Of a step", "A", "B", "B - A")
    return page.table([Column(h, tuple(row[at] for row in known), right=at > 0) for at, h in enumerate(headers)])


def _decided(comparison: Comparison, top: int, page: Page) -> Table:
    """The values that two plans treat otherwise, the largest first."""
    pairs = comparison.decided_otherwise
    shown = pairs[:top] if top else pairs
    rows = [next(row for row in pair if row is not None) for pair in shown]
    more = [f"... {len(pairs) - len(shown)} more"] if len(shown) < len(pairs) else []
    blank = [""] * len(more)
    sizes = [max(row.bytes for row in pair if row is not None) for pair in shown]
    columns = [
        Column("Decided otherwise", (*(printable(row.value) for row in rows), *more), shrinks_to=16),
        Column("layer", (*(printable(row.layer) for row in rows), *blank), shrinks_to=12, from_left=True, drop=1),
        Column("bytes", (*map(format_bytes, sizes), *blank), right=True),
        Column("A", (*(pair[0].lever if pair[0] else "-" for pair in shown), *blank)),
        Column("B", (*(pair[1].lever if pair[1] else "-" for pair in shown), *blank)),
    ]
    return page.table(columns)


def _bytes_row(label: str, a: int | None, b: int | None) -> tuple[str, ...] | None:
    return _row(label, a, b, _size, _signed)


def _row(
    label: str, a: float | None, b: float | None, said: Callable[..., str], signed_as: Callable[..., str]
) -> tuple[str, ...] | None:
    """A line of figures; None where neither is known, or both are 0."""
    if not a and not b:
        return None
    both = a is not None and b is not None
    difference = signed_as(b - a) if a is not None and b is not None and b != a else "-" if both else ""
    return (label, "?" if a is None else said(a), "?" if b is None else said(b), difference)


_FIELDS = ("saved_bytes", "output_bytes", "weight_bytes")
_HEADERS = {"saved_bytes": "saves", "output_bytes": "outputs", "weight_bytes": "weights"}


def _by_layer(comparison: Comparison, top: int, page: Page) -> Iterator[RenderableType]:
    """The layers that differ most, what the others add up to, all."""
    field, *others = _FIELDS if _saves(comparison) else ("output_bytes", "weight_bytes", "saved_bytes")
    pairs = sorted(comparison.layers, key=lambda pair: (-abs(pair.difference(field)), -_most(pair, field)))
    alike = [pair for pair in pairs if not any(pair.difference(name) for name in _FIELDS)]
    pairs = [pair for pair in pairs if any(pair.difference(name) for name in _FIELDS)]
    shown, hidden = (pairs[:top], pairs[top:]) if top else (pairs, [])
    if pairs:
        groups = [[pair] for pair in shown] + ([hidden] if hidden else []) + [list(comparison.layers)]
        names = [printable(pair.name) for pair in shown] + ([f"... {len(hidden)} more"] if hidden else [])
        columns = [Column("By layer", (*names, f"all {len(comparison.layers)}"), shrinks_to=16, from_left=True)]
        columns += _columns(groups, field, 0)
        for drop, other in enumerate(others[:1], start=1):
            columns += _columns(groups, other, drop)
        yield page.table(columns, len(groups) - 1)
    if alike:
        text = "1 layer takes" if len(alike) == 1 else f"{len(alike)} layers take"
        yield Text(f"{text} the same in both.", "dim")


def _saves(comparison: Comparison) -> bool:
    return any(part.saved_bytes for side in (comparison.a, comparison.b) for part in side.layers)


def _columns(groups: Sequence[Sequence[LayerPair]], field: str, drop: int) -> list[Column]:
    """A's, B's and the difference of a field."""
    header = _HEADERS[field]
    a = [_total([pair.a for pair in group], field) for group in groups]
    b = [_total([pair.b for pair in group], field) for group in groups]
    differences = tuple(_signed(sum(pair.difference(field) for pair in group)) for group in groups)
    return [
        Column(f"{header}\nA", tuple(a), right=True, drop=drop and drop + 2),
        Column(f"{header}\nB", tuple(b), right=True, drop=drop and drop + 2),
        Column(f"{header}\nB - A", differences, right=True, drop=drop),
    ]


def _total(parts: Sequence[object], field: str) -> str:
    """Bytes of layers; "none" where this side has no such layer."""
    there = [part for part in parts if part is not None]
    return _size(sum(getattr(part, field) for part in there)) if there else "none"


def _most(pair: LayerPair, field: str) -> int:
    return max(getattr(pair.a, field, 0), getattr(pair.b, field, 0))


def _size(number: int) -> str:
    return format_bytes(number) if number else "-"


def _signed(number: int) -> str:
    return signed(number) if number else "-"


def _signed_seconds(number: float) -> str:
    return ("-" if number < 0 else "+") + format_seconds(abs(number))


def _share(a: int, b: int) -> str:
    return f"{100 * (b - a) / a:+.0f} %" if a and b != a else ""
