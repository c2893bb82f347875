"""Quantized inference beside inference as it is, on the terminal and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TextIO

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from memplan._bytes import format_bytes
from memplan._text import printable
from memplan.reports.columns import Column
from memplan.reports.compare import by_cause
from memplan.reports.output import PIPE_WIDTH, Page, print_parts
from memplan.studies.quantization.quantized import Layer, Quantized, sentences

FORMAT = "memplan.quantized"
SCHEMA = 1


def dumps(title: str, found: Quantized) -> str:
    """What was found as JSON text. Bytes and seconds."""
    data = {"format": FORMAT, "schema": SCHEMA, "title": title, **found.to_dict()}
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def print_quantized(title: str, found: Quantized, file: TextIO | None = None, top: int = 12) -> None:
    """Print what was found: as wide as the terminal, or 80 columns without colours where ``file`` is not one.

    Args:
        title: what was quantized.
        found: what came of it.
        file: where to; stdout by default.
        top: how many layers to list; 0 for all.
    """
    print_parts(lambda page: render(title, found, top, page.width, ascii_only=page.ascii_only), file)


def render(
    title: str, found: Quantized, top: int = 12, width: int = PIPE_WIDTH, *, ascii_only: bool = False
) -> list[RenderableType]:
    """The parts of the report as rich renderables, in order."""
    page = Page(width, ascii_only)
    parts: list[RenderableType] = [
        Text(f"{printable(title)}: inference on the CPU, by {printable(found.scheme)}", "bold")
    ]
    parts += [Text(printable(sentence)) for sentence in sentences(found)]
    comparison = found.comparison
    if comparison is not None:
        parts += ["", by_cause(comparison, page, ("as it is", "quantized", "difference"))]
    parts += ["", _layers(found.layers, top, page), *(Text(line) for line in _left_alone(found.layers))]
    return parts


def _layers(layers: Sequence[Layer], top: int, page: Page) -> Table:
    """The layers with weights, the largest first, what the others add up to, all."""
    rows = sorted(layers, key=lambda layer: -layer.before)
    shown, hidden = (rows[:top], rows[top:]) if top else (rows, [])
    groups = [[layer] for layer in shown] + ([hidden] if hidden else []) + [rows]
    names = [printable(layer.name) for layer in shown] + ([f"... {len(hidden)} more"] if hidden else [])
    changed = [sum(one.why is None for one in group) for group in groups]
    columns = [
        Column("Weights of layers", (*names, f"all {len(rows)}"), shrinks_to=14, from_left=True),
        Column("as it is", tuple(format_bytes(sum(one.before for one in group)) for group in groups), right=True),
        Column("quantized", tuple(format_bytes(sum(one.after for one in group)) for group in groups), right=True),
        Column("layers changed", tuple(f"{n} of {len(g)}" for n, g in zip(changed, groups, strict=True)), right=True),
    ]
    return page.table(columns, len(groups) - 1)


def _left_alone(layers: Sequence[Layer]) -> Iterator[str]:
    """Why layers stay as they are, each reason once."""
    by_reason: dict[str, list[Layer]] = {}
    for layer in layers:
        if layer.why is not None:
            by_reason.setdefault(layer.why, []).append(layer)
    for why, left in by_reason.items():
        names = ", ".join(printable(layer.name) for layer in left[:3]) + (" ..." if len(left) > 3 else "")
        size = format_bytes(sum(layer.after for layer in left))
        stays = "stays" if len(left) == 1 else "stay"
        yield f"{names} ({len(left)}, {size}) {stays}: {printable(why)}."
