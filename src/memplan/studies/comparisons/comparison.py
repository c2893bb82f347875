"""A comparison: two steps as immutable data, side by side. All sizes are bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from memplan._bytes import format_bytes
from memplan._display import Displayed
from memplan._text import format_seconds, printable
from memplan.explanation.model import LABELS
from memplan.trace.records import CAUSES

Origin = Literal["recorded", "measured", "dry", "explained", "planned", "swept"]

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
        """Return how many output channels hold as many weights as there are zeros."""
        return (self.zeros or 0) * self.channels // self.elements

    @property
    def bytes_of_fewer(self) -> int:
        """Bytes that the dense weight would take less with so many channels fewer."""
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
        """Bytes of the second less those of the first."""
        return self.b - self.a


@dataclass(frozen=True, slots=True)
class LayerPair:
    """A layer of both; None on the side that has none of that name."""

    name: str
    a: LayerPart | None
    b: LayerPart | None

    def difference(self, field: str) -> int:
        """Subtract a number of the first from that of the second; a layer that is not there has 0."""
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


@dataclass(frozen=True, slots=True, repr=False)
class Comparison(Displayed):
    """Two steps side by side; ``a`` and ``b`` are their sides.

    Example:
        >>> comparison = memplan.compare(model, model, images, device="h100", b_options={"autocast": "bf16"})
        >>> comparison.difference, [row.difference for row in comparison.by_cause if row.cause == "saved"]
        (-723968, [-368640])
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
        """Return a row for each cause that either holds at its peak."""
        one, other = self.a.by_cause, self.b.by_cause
        names = [*(name for name in _ORDER if name in one or name in other)]
        names += [name for name in (*one, *other) if name not in names]
        rows = [CauseRow(name, one.get(name, 0), other.get(name, 0)) for name in dict.fromkeys(names)]
        return tuple(row for row in rows if row.a or row.b)

    @property
    def layers(self) -> tuple[LayerPair, ...]:
        """Return a row for each layer of either, in the order of the first, then those that only the second has."""
        one, other = _by_name(self.a.layers), _by_name(self.b.layers)
        if WHOLE not in one or WHOLE not in other:  # nothing to join: by the names that they have
            one, other = ({part.name: part for part in side.layers} for side in (self.a, self.b))
        return tuple(LayerPair(name, one.get(name), other.get(name)) for name in dict.fromkeys((*one, *other)))

    @property
    def decided_otherwise(self) -> tuple[tuple[Decided | None, Decided | None], ...]:
        """Values that two plans give another lever, the largest first; None on the side that decides nothing."""
        one, other = ({row.value: row for row in side.decided} for side in (self.a, self.b))
        pairs = [(one.get(value), other.get(value)) for value in dict.fromkeys((*one, *other))]
        apart = [(a, b) for a, b in pairs if (a and a.lever) != (b and b.lever)]
        return tuple(sorted(apart, key=lambda pair: -max(row.bytes for row in pair if row is not None)))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
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

        return summary(self)


def _derived(zero: Zeros) -> dict[str, int]:
    return {"fewer_channels": zero.fewer_channels, "bytes_of_fewer": zero.bytes_of_fewer}


def _by_name(parts: tuple[LayerPart, ...]) -> dict[str, LayerPart]:
    """Return layers by name; the outermost module, which goes by its class's name, by one that fits both sides."""
    roots = [part for part in parts if part.name == part.kind]
    return {WHOLE if len(roots) == 1 and part is roots[0] else part.name: part for part in parts}


CAUSE_LABELS = LABELS | {CAST_COPIES: "weights in another dtype", STEP: "what the step holds"}


_CAUSES = 3


_CHANGE = 0.005


def headline(comparison: Comparison) -> str:
    """Say ``1.1 GiB -> 0.7 GiB peak: 412.3 MiB less, -36 % (...)``, with the causes that differ most."""
    a, b = comparison.a, comparison.b
    text = f"{format_bytes(a.peak)} -> {format_bytes(b.peak)} peak: {changed(a.peak, b.peak)}"
    rows = sorted((row for row in comparison.by_cause if row.difference), key=lambda row: -abs(row.difference))
    parts = [f"{CAUSE_LABELS.get(row.cause, row.cause)} {signed(row.difference)}" for row in rows[:_CAUSES]]
    return text + (f" ({', '.join(parts)})" if parts else "")


def changed(a: int, b: int) -> str:
    """Say ``412.3 MiB less, -36 %``."""
    if a == b:
        return "the same"
    share = f", {100 * (b - a) / a:+.0f} %" if a and abs(b - a) >= _CHANGE * a else ""
    return f"{format_bytes(abs(b - a))} {'less' if b < a else 'more'}{share}"


def signed(size: int) -> str:
    """Return bytes with their sign: ``+1.2 MiB``."""
    return ("+" if size > 0 else "") + format_bytes(size)


def remarks(comparison: Comparison) -> Iterator[str]:
    """Yield sentences about outputs, results and zeros, in order."""
    a, b = comparison.a, comparison.b
    if a.outputs is not None and b.outputs is not None:
        if a.outputs == b.outputs:
            yield f"Both return {_listed(a.outputs)}."
        else:
            yield f"A returns {_listed(a.outputs)}, B {_listed(b.outputs)}."
    on = "On equal weights" if comparison.same_weights else "Each with its own weights"
    for row in comparison.apart:
        yield f"{on}, B's {row.what} {off_by(row, 'A')}."
    yield from zeros_of("A", a)
    yield from zeros_of("B", b)


def off_by(row: Apart, other: str) -> str:
    """Say ``are 1.2 % from A's (relative, L2; 0.5 at most for one element)``."""
    if row.relative == 0:
        return f"are {other}'s bit for bit"
    if row.relative is None or row.largest is None:
        return f"cannot be held against {other}'s: one is zero throughout, infinite or not a number"
    relative = f"{100 * row.relative:.2g} %" if row.relative >= 1e-4 else f"{row.relative:.1e}"
    return f"are {relative} from {other}'s (relative, L2; {row.largest:.3g} at most for one element)"


def zeros_of(name: str, side: Side) -> Iterator[str]:
    """Say what zeros among the weights of a side do not save."""
    known = [zero for zero in side.zeros if zero.zeros is not None]
    masks = sum(zero.mask_bytes for zero in side.zeros)
    if known:
        count, of = sum(zero.zeros or 0 for zero in known), sum(zero.elements for zero in known)
        size = sum(zero.bytes for zero in known)
        fewer = sum(zero.bytes_of_fewer for zero in known)
        layers = f"{len(known)} layer{'' if len(known) == 1 else 's'}"
        text = f"{name}'s weights hold zeros: {100 * count / of:.0f} % of {layers}, which take {format_bytes(size)} "
        text += "all the same: a dense tensor holds a zero like any other number."
        if fewer:
            text += f" As many weights left out as whole channels would take {format_bytes(fewer)} less of weights"
            text += f", and about {format_bytes(_outputs_of_fewer(side))} less of these layers' outputs."
        empty = sum(zero.empty_channels or 0 for zero in known)
        if empty:
            text += f" {empty} output channels are zero throughout: they could go without changing the result."
        yield text
    if masks:
        yield (
            f"{name}'s masks add {format_bytes(masks)}, and each masked weight is there twice: as it was and "
            "multiplied by its mask. torch.nn.utils.prune.remove takes the masks away; the zeros stay."
        )
        if not known:
            yield f"How many zeros {name}'s masks make, a recording does not know: measure it, or pass the module."


def _outputs_of_fewer(side: Side) -> int:
    """Return the bytes that the outputs of pruned layers would take less, in proportion to their channels."""
    output = {part.name: part.output_bytes for part in side.layers}
    return sum(output.get(zero.layer, 0) * zero.fewer_channels // zero.channels for zero in side.zeros)


def _listed(outputs: tuple[str, ...]) -> str:
    return ", ".join(outputs[:4]) + (f" and {len(outputs) - 4} more" if len(outputs) > 4 else "")


def by_one_measure(a: Side, b: Side) -> bool:
    """Return whether the seconds of two sides can be held against each other: both by a roofline, measured, or of
    plans."""
    return a.seconds_by.partition(" ")[0] == b.seconds_by.partition(" ")[0]


def seconds_sentence(comparison: Comparison) -> str | None:
    """Give both times, where both are known; their ratio only where they come from one measure."""
    a, b = comparison.a, comparison.b
    if a.seconds is None or b.seconds is None:
        return None
    one, other = format_seconds(a.seconds), format_seconds(b.seconds)
    if a.seconds_by != b.seconds_by:
        one, other = f"{one} ({a.seconds_by})", f"{other} ({b.seconds_by})"
    if not by_one_measure(a, b):
        return f"Time of a step: {one}, and {other}: not by one measure."
    ratio = f", {100 * (b.seconds / a.seconds - 1):+.0f} %" if a.seconds else ""
    how = f" ({a.seconds_by})" if a.seconds_by == b.seconds_by else ""
    return f"Time of a step: {one} -> {other}{ratio}{how}."


def summary(comparison: Comparison) -> str:
    """Return the paragraph."""
    lines = [f"A: {comparison.a.title}", f"B: {comparison.b.title}", headline(comparison)]
    seconds = seconds_sentence(comparison)
    lines += [seconds] if seconds else []
    lines += remarks(comparison)
    notes = dict.fromkeys((*comparison.notes, *comparison.a.notes, *comparison.b.notes))
    return "\n".join(printable(line) for line in (*lines, *(f"note: {note}" for note in notes)))
