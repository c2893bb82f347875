"""Bytes of quantized inference and the errors of its result: immutable data. All sizes are bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from memplan._bytes import format_bytes
from memplan._display import Displayed
from memplan._text import format_seconds
from memplan.studies.comparisons.comparison import CAST_COPIES, Apart, Comparison, Side, changed, off_by

Weights = Literal["int8", "int4"]
Activations = Literal["int8"]


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer with weights: its bytes before and after, and why it stayed as it was (None: it was quantized)."""

    name: str
    kind: str
    before: int
    after: int
    why: str | None


@dataclass(frozen=True, slots=True, repr=False)
class Quantized(Displayed):
    """Inference of a model before and after it is quantized, both really run on this CPU.

    Example:
        >>> model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024))
        >>> memplan.quantize(model, "8x1024", weights="int8").weights_saved
        6281216
    """

    scheme: str
    """What torchao calls it."""
    before: Side
    """Inference of the model before, without grad."""
    after: Side | None
    """The same with the quantized model; None where this scheme has no kernel here, and was not run."""
    with_grad: Side
    """Forward pass of the model before, with grad: tensors that a derivative reads stay."""
    layers: tuple[Layer, ...]
    error: Apart | None
    """How far the outputs of the quantized model are off; None where it was not run."""
    quantizing_peak: int | None
    """The most that is allocated while the model is made and quantized: both forms of a weight are there at once."""
    notes: tuple[str, ...] = ()

    @property
    def weights_saved(self) -> int:
        """Bytes of weights less: as the allocator has them; by the packed form where nothing was run."""
        if self.after is not None and self.before.weight_bytes is not None and self.after.weight_bytes is not None:
            return self.before.weight_bytes - self.after.weight_bytes
        return sum(layer.before - layer.after for layer in self.layers)

    @property
    def comparison(self) -> Comparison | None:
        """Comparison of before and after; None where it was not run."""
        if self.after is None:
            return None
        return Comparison(self.before, self.after, (self.error,) if self.error is not None else ())

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        data = dataclasses.asdict(self)
        comparison = self.comparison
        rows = None if comparison is None else comparison.to_dict()["by_cause"]
        return data | {"weights_saved": self.weights_saved, "by_cause": rows}

    def __str__(self) -> str:

        return summary(self)


def sentences(found: Quantized) -> Iterator[str]:
    """Yield the sentences of the summary, in order."""
    if found.after is None:
        yield from _not_run(found)
    else:
        yield from _bytes(found, found.after)
    if found.error is not None:
        yield f"The quantized model's outputs {off_by(found.error, 'the model')}."
    if found.after is not None and found.before.seconds and found.after.seconds:
        was, now = format_seconds(found.before.seconds), format_seconds(found.after.seconds)
        yield f"Time {was} -> {now}, measured on this CPU without a compiler."
    without, with_grad = (format_bytes(side.activation_bytes or 0) for side in (found.before, found.with_grad))
    live = f"Without grad {without} of activations live at once, with grad {with_grad}"
    yield f"{live}: then all stay live that a derivative reads."
    if found.quantizing_peak is not None and found.quantizing_peak > found.before.peak:
        yield f"While it is quantized, {format_bytes(found.quantizing_peak)} are needed."


def _done(found: Quantized) -> str:
    done = sum(layer.why is None for layer in found.layers)
    return f"{done} of {len(found.layers)} layers with weights"


def _not_run(found: Quantized) -> Iterator[str]:
    layers = [layer for layer in found.layers if layer.why is None]
    was, now = (format_bytes(sum(getattr(one, when) for one in layers)) for when in ("before", "after"))
    yield f"{found.scheme} was not run: {'; '.join(found.notes)}."
    yield f"By the form in which it packs them, {_done(found)} take {now} instead of {was}."


def _bytes(found: Quantized, after: Side) -> Iterator[str]:
    before = found.before
    was, now = before.weight_bytes or 0, after.weight_bytes or 0
    yield f"Weights {format_bytes(was)} -> {format_bytes(now)}: {changed(was, now)} ({_done(found)} quantized)."
    peaks = f"{format_bytes(before.peak)} -> {format_bytes(after.peak)}"
    yield f"Peak of inference {peaks}: {changed(before.peak, after.peak)}."
    if after.cast_bytes:
        most, at_peak = format_bytes(after.cast_bytes), format_bytes(after.by_cause.get(CAST_COPIES, 0))
        yield f"For a product a weight is written out in another dtype: {most} at most, {at_peak} of it at the peak."


def summary(found: Quantized) -> str:
    """Return the paragraph."""
    return "\n".join(sentences(found))
