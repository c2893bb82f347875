"""What quantized inference takes and how far its result is off: immutable data. All sizes are bytes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from memplan.studies.comparison import Apart, Comparison, Side

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


@dataclass(frozen=True, slots=True)
class Quantized:
    """Inference of a model as it is and quantized, both really run on this CPU.

    Example:
        >>> model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024))
        >>> memplan.quantize(model, "8x1024", weights="int8").weights_saved
        6281216
    """

    scheme: str
    """What torchao calls it."""
    before: Side
    """Inference of the model as it is, without grad."""
    after: Side | None
    """The same with the quantized model; None where this scheme has no kernel here, and was not run."""
    with_grad: Side
    """The forward pass of the model as it is, with grad: what a derivative needs stays."""
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
        """Before and after as two sides; None where it was not run."""
        if self.after is None:
            return None
        return Comparison(self.before, self.after, (self.error,) if self.error is not None else ())

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        data = dataclasses.asdict(self)
        comparison = self.comparison
        rows = None if comparison is None else comparison.to_dict()["by_cause"]
        return data | {"weights_saved": self.weights_saved, "by_cause": rows}

    def __str__(self) -> str:
        from memplan.studies.quantized_text import summary

        return summary(self)
