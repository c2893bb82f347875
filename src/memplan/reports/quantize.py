"""Reports of quantized inference compared with the original model, on the terminal."""

from __future__ import annotations

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


def print_quantized(quantized: Quantized, file: TextIO | None = None, top: int = 12) -> None:
    """Print quantized inference to a file or stdout; ``top`` rows of long tables, 0 for all. See `print_parts`."""
    print_parts(lambda page: render(quantized, page, top), file)


def render(quantized: Quantized, page: Page, top: int = 12) -> list[RenderableType]:
    """Return the parts of the report as rich renderables, in order."""
    title = printable(quantized.title or "Quantized")
    parts: list[RenderableType] = [Text(f"{title}: inference on the CPU, by {printable(quantized.scheme)}", "bold")]
    parts += [Text(printable(sentence)) for sentence in sentences(quantized)]
    comparison = quantized.comparison
    if comparison is not None:
        parts += ["", by_cause(comparison, page, ("as it is", "quantized", "difference"))]
    parts += ["", _layers(quantized.layers, top, page), *(Text(line) for line in _unchanged(quantized.layers))]
    return parts


def _layers(layers: Sequence[Layer], top: int, page: Page) -> Table:
    """Draw the layers with weights, the largest first, and the totals."""
    fields = [
        name_field("Weights of layers", lambda layer: printable(layer.name), 14),
        number_field("as it is", lambda layer: layer.before),
        number_field("quantized", lambda layer: layer.after),
        Field("layers changed", lambda layer: _changed([layer]), _changed, right=True),
    ]
    return page.rows(sorted(layers, key=lambda layer: -layer.before), fields, top, f"all {len(layers)}")


def _changed(layers: Sequence[Layer]) -> str:
    return f"{sum(layer.why is None for layer in layers)} of {len(layers)}"


def _unchanged(layers: Sequence[Layer]) -> Iterator[str]:
    """Yield why layers are not quantized, a sentence for each reason."""
    by_reason: dict[str, list[Layer]] = {}
    for layer in layers:
        if layer.why is not None:
            by_reason.setdefault(layer.why, []).append(layer)
    for why, group in by_reason.items():
        names = ", ".join(printable(layer.name) for layer in group[:3]) + (" ..." if len(group) > 3 else "")
        size = format_bytes(sum(layer.after for layer in group))
        verb = "stays" if len(group) == 1 else "stay"
        yield f"{names} ({len(group)}, {size}) {verb}: {printable(why)}."
