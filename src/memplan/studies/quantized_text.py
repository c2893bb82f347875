"""Quantized inference in one paragraph."""

from __future__ import annotations

from collections.abc import Iterator

from memplan._bytes import format_bytes
from memplan.planning.plan import format_seconds
from memplan.studies.comparison import CAST_COPIES, Side
from memplan.studies.comparison_text import changed, off_by
from memplan.studies.quantized import Quantized


def sentences(found: Quantized) -> Iterator[str]:
    """What there is to say, in order."""
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
    yield f"{live}: then all stay that a derivative reads."
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
    """The paragraph."""
    return "\n".join(sentences(found))
