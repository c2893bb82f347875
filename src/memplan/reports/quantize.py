"""Report of quantized inference compared with the original model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memplan._bytes import format_bytes
from memplan.reports.compare import by_cause
from memplan.reports.document import Document, Field, Table, document, name_field, number_field, table_of
from memplan.studies.quantization.quantized import Layer, Quantized, sentences


def report(quantized: Quantized, top: int = 12) -> Document:
    """Return sentences and tables about quantized inference; ``top`` rows of long tables, 0 for all."""
    title = quantized.title or "Quantized"
    comparison = quantized.comparison
    return document(
        f"{title}: inference on the CPU, by {quantized.scheme}",
        sentences(quantized),
        [] if comparison is None else [by_cause(comparison, ("as it is", "quantized", "difference"))],
        [_layers(quantized.layers, top), *_unchanged(quantized.layers)],
    )


def _layers(layers: Sequence[Layer], top: int) -> Table:
    """Return the layers with weights, the largest first, and the totals."""
    fields = [
        name_field("Weights of layers", lambda layer: layer.name, shrinks_to=14),
        number_field("as it is", lambda layer: layer.before),
        number_field("quantized", lambda layer: layer.after),
        Field("layers changed", lambda layer: _changed([layer]), _changed, right=True),
    ]
    return table_of(sorted(layers, key=lambda layer: -layer.before), fields, top, f"all {len(layers)}")


def _changed(layers: Sequence[Layer]) -> str:
    return f"{sum(layer.why is None for layer in layers)} of {len(layers)}"


def _unchanged(layers: Sequence[Layer]) -> Iterator[str]:
    """Yield why layers are not quantized, a sentence for each reason."""
    by_reason: dict[str, list[Layer]] = {}
    for layer in layers:
        if layer.why is not None:
            by_reason.setdefault(layer.why, []).append(layer)
    for why, group in by_reason.items():
        names = ", ".join(layer.name for layer in group[:3]) + (" ..." if len(group) > 3 else "")
        size = format_bytes(sum(layer.after for layer in group))
        verb = "stays" if len(group) == 1 else "stay"
        yield f"{names} ({len(group)}, {size}) {verb}: {why}."
