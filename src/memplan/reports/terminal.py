"""An explanation on the terminal: a paragraph, by cause, by layer, why. Plain text in a pipe."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memplan._bytes import format_bytes
from memplan._text import printable
from memplan.explanation.model import LABELS, Explanation, LayerRow, peak_sentence, scaling_sentence, workspace_sentence
from memplan.reports.card import charge_columns, sums_from, verdict_lines
from memplan.reports.columns import Column
from memplan.reports.output import PIPE_WIDTH, Page, print_parts
from memplan.trace.records import Assumption

_LOUD = ("branch", "host")
"""Kinds of assumptions that say that the step may go another way, or fail, when it really runs."""
_REASONS = 5
_LINES_OF_A_REASON = 3
_BAR = 24
_NUMBER = re.compile(r"\d+")
_NEEDS = {"weight_gradient": "weight", "input_gradient": "input"}


def print_explanation(explanation: Explanation, file: TextIO | None = None, top: int = 12) -> None:
    """Print an explanation: as wide as the terminal, or 80 columns without colours where ``file`` is not one.

    Args:
        explanation: what to print.
        file: where to; stdout by default.
        top: how many layers to list; 0 for all.
    """
    print_parts(lambda page: render(explanation, top, page.width, ascii_only=page.ascii_only), file)


def render(
    explanation: Explanation, top: int = 12, width: int = PIPE_WIDTH, *, ascii_only: bool = False
) -> list[RenderableType]:
    """The parts of the report as rich renderables, in order.

    Args:
        explanation: what to show.
        top: how many layers to list; what the others add up to has a line of its own. 0 for all.
        width: columns of text that there are: it decides which columns the table by layer has.
        ascii_only: draw without characters that an old encoding lacks.
    """
    page = Page(width, ascii_only)
    parts: list[RenderableType] = [*_head(explanation), _by_cause(explanation, page)]
    if explanation.card is not None:
        use = explanation.card
        parts += ["", page.table(charge_columns(use), sums_from(use)), *verdict_lines(use)]
    if explanation.layers:
        parts += ["", _by_layer(explanation, top, page), _legend(explanation)]
    reasons = list(_reasons(explanation, top))
    if reasons:
        parts += ["", Text("Why the most is saved", "bold"), *reasons]
    return [*parts, *_remarks(explanation)]


def _head(explanation: Explanation) -> Iterator[RenderableType]:
    kind = "training step" if explanation.train else "inference"
    yield Text(f"{printable(explanation.title)}: {kind} on {printable(explanation.device)}", "bold")
    yield Text(explanation.sentence)
    for line in (workspace_sentence(explanation), peak_sentence(explanation), scaling_sentence(explanation)):
        if line:
            yield Text(printable(line))
    loud = [assumption for assumption in explanation.assumptions if assumption.kind in _LOUD]
    for assumption in loud:
        yield Text(_assumed(assumption), "bold red")
    yield ""


def _by_cause(explanation: Explanation, page: Page) -> Table:
    """What is live at the peak, largest first; the last row adds up to the peak."""
    peak, most = explanation.timeline.peak_allocated, explanation.by_cause_most
    rows = [(cause, size, most.get(cause, size)) for cause, size in explanation.by_cause.items()]
    rows = sorted((row for row in rows if row[1] or row[2]), key=lambda row: (-row[1], -row[2]))
    block = "#" if page.ascii_only else "█"
    bars = [block * round(_BAR * size / peak) if peak else "" for _, size, _ in rows]
    total = sum(explanation.by_cause.values())
    columns = [
        Column("By cause", (*(LABELS.get(row[0], row[0]) for row in rows), "peak"), shrinks_to=12),
        Column("at the peak", (*(format_bytes(row[1]) for row in rows), format_bytes(total)), right=True),
        Column("share", (*(_share(row[1], peak) for row in rows), _share(total, peak)), right=True, drop=1),
        Column("", (*bars, ""), drop=3),
        Column("most at any time", (*(format_bytes(row[2]) for row in rows), ""), right=True, drop=2),
    ]
    return page.table(columns, len(rows))


def _share(part: int, whole: int) -> str:
    share = 100 * part / whole if whole else 0.0
    return "<1 %" if 0 < share < 0.5 else f"{share:.0f} %"


def _by_layer(explanation: Explanation, top: int, page: Page) -> Table:
    """The layers that save (in inference: output) the most, the sum of the others, the sum of all."""
    rows = sorted(explanation.layers, key=_weight_of(explanation.train), reverse=True)
    shown = rows[:top] if top else rows
    parts = [column.of(rows, len(shown)) for column in (_TRAINING if explanation.train else _INFERENCE)]
    return page.table(parts, len(shown))


def _weight_of(train: bool) -> Callable[[LayerRow], tuple[int, ...]]:
    """What layers are sorted by, the most first."""
    return lambda row: (row.saved_bytes, row.kept_bytes, row.output_bytes) if train else (row.output_bytes,)


@dataclass(frozen=True)
class _Field:
    """A column of the table by layer: what it says of a layer, and of several together."""

    header: str
    cell: Callable[[LayerRow], str]
    total: Callable[[Sequence[LayerRow]], str]
    right: bool = False
    shrinks_to: int | None = None
    from_left: bool = False
    drop: int = 0

    def of(self, rows: Sequence[LayerRow], shown: int) -> Column:
        cells = [self.cell(row) for row in rows[:shown]]
        hidden = rows[shown:]
        is_name = self.header == _NAME
        if hidden:
            cells.append(f"... {len(hidden)} more" if is_name else self.total(hidden))
        cells.append(f"all {len(rows)} layers" if is_name else self.total(rows))
        return Column(self.header, tuple(cells), self.right, self.shrinks_to, self.from_left, self.drop)


def _bytes_field(header: str, name: str, drop: int, cell: Callable[[LayerRow], str] | None = None) -> _Field:
    def total(rows: Sequence[LayerRow]) -> str:
        return format_bytes(sum(getattr(row, name) for row in rows))

    return _Field(header, cell or (lambda row: _size(getattr(row, name))), total, right=True, drop=drop)


def _size(number: int) -> str:
    return format_bytes(number) if number else "-"


def _saves(row: LayerRow) -> str:
    """What counts for this layer; "(shared)" where all that it keeps counts for another."""
    return "(shared)" if row.kept_bytes and not row.saved_bytes else _size(row.saved_bytes)


def _needs(row: LayerRow) -> str:
    if not row.kept_bytes:
        return "-"
    words = [_NEEDS.get(need, need) for need in row.needed_for]
    return "both" if len(words) > 1 else "".join(words) or "nothing"


def _shared(row: LayerRow) -> str:
    """The first layer that shares with this one, and how many others do."""
    layers = dict.fromkeys(printable(other).rsplit("'s ", 1)[0] for other in row.shared_with)
    others = [layer for layer in layers if layer != printable(row.name)]
    if not others:
        return "-"
    return others[0] + (f" +{len(others) - 1}" if len(others) > 1 else "")


def _nothing(rows: Sequence[LayerRow]) -> str:
    return ""


_NAME = "By layer"
_INFERENCE = (
    _Field(_NAME, lambda row: printable(row.name), _nothing, shrinks_to=16, from_left=True),
    _Field("kind", lambda row: printable(row.kind), _nothing, shrinks_to=9, drop=3),
    _bytes_field("outputs", "output_bytes", 1),
    _bytes_field("weights", "weight_bytes", 5),
)
_TRAINING = (
    *_INFERENCE[:3],
    _bytes_field("saves", "saved_bytes", 0, _saves),
    _Field("needed\nfor", _needs, _nothing, drop=2),
    _Field("shared\nwith", _shared, _nothing, shrinks_to=12, from_left=True, drop=4),
    _INFERENCE[3],
    _bytes_field("gradients", "gradient_bytes", 6),
)


def _legend(explanation: Explanation) -> Text:
    outputs = "outputs: a layer's last result, not all alive at one time."
    if not explanation.train:
        return Text(outputs, "dim")
    return Text(
        "saves: kept from forward to backward, for the gradient of its weight, its input, or both; what "
        f"several layers keep together counts for the first, and is (shared) for the others. {outputs}",
        "dim",
    )


def _reasons(explanation: Explanation, top: int) -> Iterator[RenderableType]:
    """The layers that save the most, each with what and for what; those that repeat one are counted."""
    rows = [row for row in explanation.layers if row.saved_bytes and row.why]
    rows.sort(key=_weight_of(True), reverse=True)
    alike: dict[tuple[object, ...], list[LayerRow]] = {}
    for row in rows:
        alike.setdefault((row.kind, row.saved_bytes, _NUMBER.sub("#", "\n".join(row.why))), []).append(row)
    for first, *others in list(alike.values())[: min(top, _REASONS) if top else None]:
        where = f" ({printable(first.where)})" if first.where else ""
        like = f", and {len(others)} layer{'s' if len(others) > 1 else ''} like it" if others else ""
        yield Text(f"{printable(first.name)}, {format_bytes(first.saved_bytes)}{where}{like}")
        lines = [printable(why) for why in first.why]
        shown = lines[:_LINES_OF_A_REASON] if top else lines
        if len(shown) < len(lines):
            shown[-1] = f"{shown[-1]}; and {len(lines) - len(shown)} smaller"
        yield Padding(Text("\n".join(shown)), (0, 0, 0, 2))


def _remarks(explanation: Explanation) -> Iterator[RenderableType]:
    lines = [_assumed(assumption) for assumption in explanation.assumptions if assumption.kind not in _LOUD]
    lines += [f"note: {printable(note)}" for note in explanation.notes]
    if lines:
        yield ""
    for line in lines:
        yield Text(line)


def _assumed(assumption: Assumption) -> str:
    times = f" ({assumption.count} times)" if assumption.count > 1 else ""
    where = f", at {printable(assumption.where)}" if assumption.where else ""
    kind = "kernel" if assumption.kind == "kernel" else "assumed"
    return f"{kind}: {printable(assumption.text)}{times}{where}"
