"""What a comparison is: two steps as immutable data, side by side. All sizes are bytes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from memplan.trace.model import CAUSES

Origin = Literal["recorded", "measured", "explained", "planned", "swept"]

CAST_COPIES = "cast_copies"
"""In a comparison, the copies of weights in another dtype (autocast makes them) stand apart from the cause that they
are counted under elsewhere."""
STEP = "step"
"""Of a plan: what the step itself holds beside what is there all the time."""
_ORDER = (*CAUSES, CAST_COPIES, STEP, "rounding", "fragmentation")
WHOLE = "(the model itself)"
"""What the outermost modules of both sides are called, whatever their classes are."""


@dataclass(frozen=True, slots=True)
class LayerPart:
    """What one layer outputs, keeps from forward to backward, and owns."""

    name: str
    kind: str
    output_bytes: int
    saved_bytes: int
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class Zeros:
    """A weight that is zero in part. ``zeros`` is None where nothing has its values (a recording of a mask)."""

    layer: str
    name: str
    elements: int
    zeros: int | None
    bytes: int
    """Of the dense tensor, zeros and all."""
    mask_bytes: int
    """Of the mask that is kept beside it (`torch.nn.utils.prune`)."""
    channels: int
    """Of the layer's output."""
    empty_channels: int | None
    """How many of them are zero throughout."""

    @property
    def fewer_channels(self) -> int:
        """How many output channels hold as many weights as there are zeros."""
        return (self.zeros or 0) * self.channels // self.elements

    @property
    def bytes_of_fewer(self) -> int:
        """What the dense weight would take less with so many channels fewer."""
        return self.fewer_channels * (self.bytes // self.channels)


@dataclass(frozen=True, slots=True)
class Decided:
    """What a plan does with a value of the forward pass: its lever, and bytes (kept, or freed by any other lever)."""

    value: str
    layer: str
    lever: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two."""

    title: str
    origin: Origin
    device: str
    train: bool | None
    """Whether it trains; None where nothing says so."""
    peak: int
    """The most that is allocated at any time."""
    reserved: int
    """The most that the caching allocator holds; the peak itself where there is none."""
    by_cause: dict[str, int]
    """At the peak; adds up to it."""
    layers: tuple[LayerPart, ...]
    saved_bytes: int | None = None
    """The most that is kept from forward to backward at any one time."""
    weight_bytes: int | None = None
    cast_bytes: int = 0
    """The most that copies of weights in another dtype take at any one time."""
    activation_bytes: int | None = None
    """The most that activations take at any one time, kept for the backward pass or not, without these copies."""
    parameters: int | None = None
    """How many numbers the weights are."""
    outputs: tuple[str, ...] | None = None
    """Shapes and dtypes of what the model returns, in order; None where nothing says so."""
    seconds: float | None = None
    """Of one step."""
    seconds_by: str = ""
    """How the seconds were found."""
    zeros: tuple[Zeros, ...] = ()
    decided: tuple[Decided, ...] = ()
    """Of a plan: its decisions about values."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CauseRow:
    """Bytes of a cause at the peak of each side (two different moments)."""

    cause: str
    a: int
    b: int

    @property
    def difference(self) -> int:
        """Of the second from the first: negative where the second takes less."""
        return self.b - self.a


@dataclass(frozen=True, slots=True)
class LayerPair:
    """A layer of both; None on the side that has none of that name."""

    name: str
    a: LayerPart | None
    b: LayerPart | None

    def difference(self, field: str) -> int:
        """Of a number of the second from that of the first; a layer that is not there has 0."""
        return getattr(self.b, field, 0) - getattr(self.a, field, 0)


@dataclass(frozen=True, slots=True)
class Apart:
    """How far tensors of the second are from those of the first, where both really ran on the same inputs.

    ``relative`` is the norm (L2) of the difference over that of the first; ``largest`` of one element. None: infinite,
    or not a number (the first is zero throughout, or one of the two overflows).
    """

    what: str
    """``outputs`` or ``gradients``."""
    tensors: int
    relative: float | None
    largest: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two steps side by side. ``a`` and ``b`` say each for itself what there is of it.

    Example:
        >>> comparison = memplan.compare(resnet18, resnet18, "32x3x224x224", b_options={"autocast": "bf16"})
        >>> comparison.difference, [row.difference for row in comparison.by_cause if row.cause == "saved"]
        (-295550852, [-292231936])
    """

    a: Side
    b: Side
    apart: tuple[Apart, ...] = ()
    """Where both really ran: how far their results are apart."""
    same_weights: bool | None = None
    """Whether both ran with equal weights; None where they did not run."""
    notes: tuple[str, ...] = ()

    @property
    def difference(self) -> int:
        """Bytes of the second's peak less the first's."""
        return self.b.peak - self.a.peak

    @property
    def by_cause(self) -> tuple[CauseRow, ...]:
        """A row for each cause that either holds at its peak."""
        one, other = self.a.by_cause, self.b.by_cause
        names = [*(name for name in _ORDER if name in one or name in other)]
        names += [name for name in (*one, *other) if name not in names]
        rows = [CauseRow(name, one.get(name, 0), other.get(name, 0)) for name in dict.fromkeys(names)]
        return tuple(row for row in rows if row.a or row.b)

    @property
    def layers(self) -> tuple[LayerPair, ...]:
        """A row for each layer of either, in the order of the first, then those that only the second has."""
        one, other = _by_name(self.a.layers), _by_name(self.b.layers)
        if WHOLE not in one or WHOLE not in other:  # nothing to join: by the names that they have
            one, other = ({part.name: part for part in side.layers} for side in (self.a, self.b))
        return tuple(LayerPair(name, one.get(name), other.get(name)) for name in dict.fromkeys((*one, *other)))

    @property
    def decided_otherwise(self) -> tuple[tuple[Decided | None, Decided | None], ...]:
        """Of two plans: values with another lever in each, the largest first; None on the side that decides nothing."""
        one, other = ({row.value: row for row in side.decided} for side in (self.a, self.b))
        pairs = [(one.get(value), other.get(value)) for value in dict.fromkeys((*one, *other))]
        apart = [(a, b) for a, b in pairs if (a and a.lever) != (b and b.lever)]
        return tuple(sorted(apart, key=lambda pair: -max(row.bytes for row in pair if row is not None)))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        data = dataclasses.asdict(self)
        for side, key in ((self.a, "a"), (self.b, "b")):
            data[key]["zeros"] = [dataclasses.asdict(zero) | _derived(zero) for zero in side.zeros]
        rows = [{"cause": row.cause, "a": row.a, "b": row.b, "difference": row.difference} for row in self.by_cause]
        pairs = [
            {"name": pair.name, "a": pair.a and pair.a.name, "b": pair.b and pair.b.name}
            | {field: pair.difference(field) for field in ("output_bytes", "saved_bytes", "weight_bytes")}
            for pair in self.layers
        ]
        otherwise = [[row and dataclasses.asdict(row) for row in pair] for pair in self.decided_otherwise]
        found = {"difference": self.difference, "by_cause": rows, "layers": pairs, "decided_otherwise": otherwise}
        return data | found

    def __str__(self) -> str:
        from memplan.studies.comparison_text import summary

        return summary(self)


def _derived(zero: Zeros) -> dict[str, int]:
    return {"fewer_channels": zero.fewer_channels, "bytes_of_fewer": zero.bytes_of_fewer}


def _by_name(parts: tuple[LayerPart, ...]) -> dict[str, LayerPart]:
    """Layers by name; the outermost module, which goes by its class's name, by one that fits both sides."""
    roots = [part for part in parts if part.name == part.kind]
    return {WHOLE if len(roots) == 1 and part is roots[0] else part.name: part for part in parts}
