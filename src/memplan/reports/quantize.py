"""Quantized inference beside inference of the model, on the terminal and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TextIO

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from memplan._bytes import format_bytes
from memplan._text import printable
from memplan.reports.compare import by_cause
from memplan.reports.output import Field, Page, name_field, number_field, print_parts
from memplan.studies.quantization.quantized import Layer, Quantized, sentences

FORMAT = "memplan.quantized"
SCHEMA = 1


def dumps(title: str, found: Quantized) -> str:
    """Write the result as JSON text. Bytes and seconds."""
    data = {"format": FORMAT, "schema": SCHEMA, "title": title, **found.to_dict()}
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def print_quantized(title: str, found: Quantized, file: TextIO | None = None, top: int = 12) -> None:
    """Print quantized inference to a file or stdout; ``top`` rows of long tables, 0 for all. See `print_parts`."""
    print_parts(lambda page: render(title, found, page, top), file)


def render(title: str, found: Quantized, page: Page, top: int = 12) -> list[RenderableType]:
    """Return the parts of the report as rich renderables, in order."""
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
    """Return the layers with weights, the largest first, what the others add up to, all."""
    fields = [
        name_field("Weights of layers", lambda layer: printable(layer.name), 14),
        number_field("as it is", lambda layer: layer.before),
        number_field("quantized", lambda layer: layer.after),
        Field("layers changed", lambda layer: _changed([layer]), _changed, right=True),
    ]
    return page.rows(sorted(layers, key=lambda layer: -layer.before), fields, top, f"all {len(layers)}")


def _changed(layers: Sequence[Layer]) -> str:
    return f"{sum(layer.why is None for layer in layers)} of {len(layers)}"


def _left_alone(layers: Sequence[Layer]) -> Iterator[str]:
    """Say why layers stay as they are, each reason once."""
    by_reason: dict[str, list[Layer]] = {}
    for layer in layers:
        if layer.why is not None:
            by_reason.setdefault(layer.why, []).append(layer)
    for why, left in by_reason.items():
        names = ", ".join(printable(layer.name) for layer in left[:3]) + (" ..." if len(left) > 3 else "")
        size = format_bytes(sum(layer.after for layer in left))
        stays = "stays" if len(left) == 1 else "stay"
        yield f"{names} ({len(left)}, {size}) {stays}: {printable(why)}."
