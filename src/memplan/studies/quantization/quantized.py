"""The result of `memplan.quantize`: bytes and output errors of quantized inference. All sizes are bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from memplan._bytes import format_bytes
from memplan._display import Displayed
from memplan._json import Saved
from memplan._text import format_seconds
from memplan.studies.comparisons.comparison import (
    CAST_COPIES,
    CauseRow,
    Comparison,
    ResultDifference,
    Side,
    change_text,
    distance_text,
)

Weights = Literal["int8", "int4"]
Activations = Literal["int8"]


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer with weights: bytes of these before and after, and why it was not quantized (None: it was)."""

    name: str
    kind: str
    before: int
    after: int
    why: str | None


@dataclass(frozen=True, slots=True, repr=False)
class Quantized(Saved, Displayed):
    """Inference of a model before and after quantizing, both measured on this CPU.

    Example:
        >>> model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024))
        >>> memplan.quantize(model, "8x1024", weights="int8").weights_saved
        6281216
    """

    FORMAT: ClassVar[str] = "memplan.quantized"
    DERIVED: ClassVar[tuple[str, ...]] = ("weights_saved", "by_cause")

    scheme: str
    """Name of torchao's config."""
    before: Side
    """Inference of the original model, without grad."""
    after: Side | None
    """Inference of the quantized model; None if this machine has no kernel for the scheme."""
    with_grad: Side
    """Forward pass of the original model with grad, so that tensors saved for backward stay allocated."""
    layers: tuple[Layer, ...]
    error: ResultDifference | None
    """Error of the quantized model's outputs; None if it was not run."""
    quantizing_peak: int | None
    """Peak while the model is copied and quantized, when both forms of a weight exist; None if it was not run."""
    notes: tuple[str, ...] = ()
    title: str = ""
    """Name of the model in reports."""

    @property
    def weights_saved(self) -> int:
        """Bytes by which weights shrink: as measured, or computed from the packed form if nothing was run."""
        if self.after is not None and self.before.weight_bytes is not None and self.after.weight_bytes is not None:
            return self.before.weight_bytes - self.after.weight_bytes
        return sum(layer.before - layer.after for layer in self.layers)

    @property
    def comparison(self) -> Comparison | None:
        """Comparison of before and after; None if the quantized model was not run."""
        if self.after is None:
            return None
        return Comparison(self.before, self.after, (self.error,) if self.error is not None else ())

    @property
    def by_cause(self) -> tuple[CauseRow, ...] | None:
        """Bytes by cause before and after; None if the quantized model was not run."""
        return None if self.comparison is None else self.comparison.by_cause


def sentences(result: Quantized) -> Iterator[str]:
    """Yield the sentences of the summary, in order."""
    if result.after is None:
        yield from _unrun_sentences(result)
    else:
        yield from _byte_sentences(result, result.after)
    if result.error is not None:
        yield f"The quantized model's outputs {distance_text(result.error, 'the model')}."
    if result.after is not None and result.before.seconds and result.after.seconds:
        before, after = format_seconds(result.before.seconds), format_seconds(result.after.seconds)
        yield f"Time {before} -> {after}, measured on this CPU without a compiler."
    without, with_grad = (format_bytes(side.activation_bytes or 0) for side in (result.before, result.with_grad))
    live = f"Without grad {without} of activations live at once, with grad {with_grad}"
    yield f"{live}: then all stay live that a derivative reads."
    if result.quantizing_peak is not None and result.quantizing_peak > result.before.peak:
        yield f"While it is quantized, {format_bytes(result.quantizing_peak)} are needed."


def _quantized_layers(result: Quantized) -> str:
    """Return "2 of 3 layers with weights"."""
    count = sum(layer.why is None for layer in result.layers)
    return f"{count} of {len(result.layers)} layers with weights"


def _unrun_sentences(result: Quantized) -> Iterator[str]:
    """Yield the sentences for a scheme without a kernel here: the bytes are computed, not measured."""
    layers = [layer for layer in result.layers if layer.why is None]
    before = format_bytes(sum(layer.before for layer in layers))
    after = format_bytes(sum(layer.after for layer in layers))
    yield f"{result.scheme} was not run: {'; '.join(result.notes)}."
    yield f"By the form in which it packs them, {_quantized_layers(result)} take {after} instead of {before}."


def _byte_sentences(result: Quantized, after: Side) -> Iterator[str]:
    """Yield the sentences on bytes of weights and at the peak, if both models were run."""
    before = result.before
    weights = before.weight_bytes or 0, after.weight_bytes or 0
    sizes = " -> ".join(map(format_bytes, weights))
    yield f"Weights {sizes}: {change_text(*weights)} ({_quantized_layers(result)} quantized)."
    peaks = f"{format_bytes(before.peak)} -> {format_bytes(after.peak)}"
    yield f"Peak of inference {peaks}: {change_text(before.peak, after.peak)}."
    if after.cast_bytes:
        most, at_peak = format_bytes(after.cast_bytes), format_bytes(after.by_cause.get(CAST_COPIES, 0))
        yield f"For a product a weight is written out in another dtype: {most} at most, {at_peak} of it at the peak."
