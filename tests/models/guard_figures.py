"""Figures and steps as values, without a recording."""

from __future__ import annotations

from typing import Any

from memplan.studies.guarding.baseline import Figures, LayerBytes, LayerOps
from memplan.studies.guarding.recorded_figures import RecordedFigures

MIB = 1 << 20


def figures(held: dict[tuple[str, str], int], ran: dict[str, tuple[str, ...]] | None = None, **more: Any) -> Figures:
    """Return figures of a step that holds these bytes by layer and cause."""
    parts = tuple(LayerBytes(*key, size) for key, size in sorted(held.items()))
    peak = sum(part.bytes for part in parts)
    given: dict[str, Any] = {
        "target": "net.py:build", "options": "", "device": "h100", "torch": "2.13.0", "cudnn": False, "train": True,
        "peak": peak, "reserved": peak, "at": "backward: linear's gradient of head", "held": parts,
        "ran": tuple(LayerOps(layer, ops) for layer, ops in (ran or {}).items()),
    }  # fmt: skip
    return Figures(**given | more)


def taken(
    held: dict[tuple[str, str], int], ran: dict[str, tuple[str, ...]] | None = None, **more: Any
) -> RecordedFigures:
    """Return a step that holds these bytes, with lines of each layer."""
    layers = dict.fromkeys(layer for layer, _ in held)
    where = {layer: f"src/net.py:{10 + at}" for at, layer in enumerate(layers)}
    chosen, unsure = more.pop("chosen", {}), more.pop("unsure", ())
    return RecordedFigures(figures(held, ran, **more), where, chosen, unsure)
