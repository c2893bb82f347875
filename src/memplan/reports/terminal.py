"""An explanation on the terminal: a paragraph, by cause, by layer, why. Plain text in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memplan._bytes import format_bytes
from memplan.explanation.model import Explanation, LayerRow
from memplan.explanation.text import LABELS, peak_sentence, scaling_sentence
from memplan.reports.columns import Column, fit
from memplan.trace.model import Assumption

PIPE_WIDTH = 80
_REASONS = 5
_LINES_OF_A_REASON = 3
_BAR = 24
_NEEDS = {"weight_gradient": "weight", "input_gradient": "input"}


def print_explanation(explanation: Explanation, file: TextIO | None = None, top: int = 12) -> None:
    """Print an explanation: as wide as the terminal, or 80 columns without colours where ``file`` is not one.

    Args:
        explanation: what to print.
        file: where to; stdout by default.
        top: how many layers to list; 0 for all.
    """
    file = file or sys.stdout
    console = Console(file=file, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console = Console(file=file, highlight=False, markup=False, emoji=False, width=PIPE_WIDTH, color_system=None)
    ascii_only = not console.encoding.lower().startswith("utf")
    for part in render(explanation, top, console.width, ascii_only=ascii_only):
        console.print(part)


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
    parts: list[RenderableType] = [*_head(explanation), _by_cause(explanation, ascii_only)]
    if explanation.layers:
        parts += ["", _by_layer(explanation, top, width, ascii_only), _legend(explanation)]
    reasons = list(_reasons(explanation, top))
    if reasons:
        parts += ["", Text("Why the most is saved", "bold"), *reasons]
    return [*parts, *_remarks(explanation)]


def _head(explanation: Explanation) -> Iterator[RenderableType]:
    kind = "training step" if explanation.train else "inference"
    yield Text(f"{clean(explanation.title)}: {kind} on {clean(explanation.device)}", "bold")
    yield Text(explanation.sentence)
    for line in (peak_sentence(explanation), scaling_sentence(explanation)):
        if line:
            yield Text(clean(line))
    loud = [assumption for assumption in explanation.assumptions if assumption.kind == "branch"]
    for assumption in loud:
        yield Text(_assumed(assumption), "bold red")
    yield ""


def _by_cause(explanation: Explanation, ascii_only: bool) -> Table:
    """What is live at the peak, largest first; the last row adds up to the peak."""
    table = _table()
    for header in ("By cause", "at the peak", "share", "", "most at any time"):
        is_text = header in ("By cause", "")
        table.add_column(header, justify="left" if is_text else "right", no_wrap=True)
    peak, most = explanation.timeline.peak_allocated, explanation.by_cause_most
    rows = [(cause, size, most.get(cause, size)) for cause, size in explanation.by_cause.items()]
    for cause, size, largest in sorted(rows, key=lambda row: (-row[1], -row[2])):
        if size or largest:
            bar = ("#" if ascii_only else "█") * round(_BAR * size / peak) if peak else ""
            table.add_row(
                LABELS.get(cause, cause), format_bytes(size), _share(size, peak), Text(bar, "cyan"), format_bytes(largest)
            )
    table.add_section()
    table.add_row("peak", format_bytes(sum(explanation.by_cause.values())), _share(peak, peak), "", "", style="bold")
    return table


def _share(part: int, whole: int) -> str:
    share = 100 * part / whole if whole else 0.0
    return "<1 %" if 0 < share < 0.5 else f"{share:.0f} %"


def _by_layer(explanation: Explanation, top: int, width: int, ascii_only: bool) -> Table:
    rows = _sorted(explanation)
    shown = rows[:top] if top else rows
    columns = [
        Column("By layer", [clean(row.name) for row in shown], shrinks_to=16, from_left=True, drop=0),
        Column("kind", [clean(row.kind) for row in shown], shrinks_to=9, drop=3),
        Column("outputs", _sizes(row.output_bytes for row in shown), right=True, drop=1),
    ]
    if explanation.train:
        columns += [
            Column("saves", [_saves(row) for row in shown], right=True, drop=0),
            Column("needed\nfor", [_needs(row) for row in shown], drop=2),
            Column("shared\nwith", [_shared(row) for row in shown], shrinks_to=10, from_left=True, drop=4),
        ]
    columns.append(Column("weights", _sizes(row.weight_bytes for row in shown), right=True, drop=5))
    if explanation.train:
        columns.append(Column("gradients", _sizes(row.gradient_bytes for row in shown), right=True, drop=6))
    _add_sums(columns, rows, len(shown))
    kept, gap = fit(columns, width, "..." if ascii_only else "…")
    table = _table(gap)
    for column in kept:
        justify = "right" if column.right else "left"
        table.add_column(column.header, justify=justify, no_wrap=True, overflow="crop", vertical="bottom")
    count = len(kept[0].cells)
    for index in range(count):
        if index == len(shown):
            table.add_section()
        table.add_row(*(Text(column.cells[index]) for column in kept), style="dim" if index >= len(shown) else "")
    return table
