"""The result of comparing two steps, and its sentences. All sizes are bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from memplan._bytes import format_bytes, signed
from memplan._display import Displayed
from memplan._json import Saved
from memplan._text import format_seconds
from memplan.explanation.model import LABELS
from memplan.trace.records import CAUSES

Origin = Literal["recorded", "measured", "dry", "explained", "planned", "swept"]

CAST_COPIES = "cast_copies"
"""Copies of weights in another dtype, as autocast makes them. Only comparisons have this cause; elsewhere these bytes
count under the cause of the storage."""
STEP = "step"
"""Of a plan: bytes of the step itself at its peak, beyond what is resident throughout (weights, optimizer states)."""
_ORDER = (*CAUSES, CAST_COPIES, STEP, "rounding", "fragmentation")
WHOLE = "(the model itself)"
"""Name under which the root modules of both sides are compared, whatever their classes are called."""


@dataclass(frozen=True, slots=True)
class LayerPart:
    """Bytes of a layer: of its outputs, its tensors saved for backward, and its weights."""

    name: str
    kind: str
    output_bytes: int
    saved_bytes: int
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class Zeros:
    """A weight that contains zeros. ``zeros`` is None if values are unknown, as in a recording of a masked weight."""

    DERIVED: ClassVar[tuple[str, ...]] = ("fewer_channels", "bytes_of_fewer")

    layer: str
    name: str
    elements: int
    zeros: int | None
    bytes: int
    """Bytes of the dense tensor, including zeros."""
    mask_bytes: int
    """Bytes of the mask of `torch.nn.utils.prune`; 0 without a mask."""
    channels: int
    """Number of output channels of the layer."""
    empty_channels: int | None
    """Number of output channels whose weights are all zero."""

    @property
    def fewer_channels(self) -> int:
        """Number of whole output channels with as many elements as there are zeros."""
        return (self.zeros or 0) * self.channels // self.elements

    @property
    def bytes_of_fewer(self) -> int:
        """Bytes that the dense weight would shrink by without ``fewer_channels`` channels."""
        return self.fewer_channels * (self.bytes // self.channels)


@dataclass(frozen=True, slots=True)
class Decided:
    """A plan's decision about a forward value: its lever, and the bytes that it saves (``keep``) or frees."""

    value: str
    layer: str
    lever: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two steps of a comparison."""

    title: str
    origin: Origin
    device: str
    train: bool | None
    """Whether the step trains; None if unknown."""
    peak: int
    """Peak of allocated bytes."""
    reserved: int
    """Peak of reserved bytes; equal to ``peak`` without a caching allocator."""
    by_cause: dict[str, int]
    """Bytes at the peak by cause, which add up to ``peak``."""
    layers: tuple[LayerPart, ...]
    saved_bytes: int | None = None
    """Peak of tensors saved for backward."""
    weight_bytes: int | None = None
    cast_bytes: int = 0
    """Peak of copies of weights in another dtype."""
    activation_bytes: int | None = None
    """Peak of activations, saved for backward or not, without copies of weights."""
    parameters: int | None = None
    """Number of elements of all weights."""
    outputs: tuple[str, ...] | None = None
    """Shape and dtype of each output of the model, in order; None if unknown."""
    seconds: float | None = None
    """Seconds of a step."""
    seconds_by: str = ""
    """Source of ``seconds``: a roofline, a measurement, a plan."""
    zeros: tuple[Zeros, ...] = ()
    decided: tuple[Decided, ...] = ()
    """Decisions of a plan about values."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CauseRow:
    """Bytes of a cause at the peak of each side (two different moments)."""

    DERIVED: ClassVar[tuple[str, ...]] = ("difference",)

    cause: str
    a: int
    b: int

    @property
    def difference(self) -> int:
        """Bytes of B minus bytes of A."""
        return self.b - self.a


@dataclass(frozen=True, slots=True)
class LayerPair:
    """The layers of A and B with the same name; None on a side without such a layer."""

    name: str
    a: LayerPart | None
    b: LayerPart | None

    def difference(self, field: str) -> int:
        """Return field ``field`` of B's `LayerPart` minus that of A's; a missing layer counts as 0."""
        return getattr(self.b, field, 0) - getattr(self.a, field, 0)

    def to_dict(self) -> dict[str, Any]:
        """Return the names of both layers and the differences of their bytes."""
        names = {"name": self.name, "a": self.a and self.a.name, "b": self.b and self.b.name}
        return names | {name: self.difference(name) for name in ("output_bytes", "saved_bytes", "weight_bytes")}


@dataclass(frozen=True, slots=True)
class ResultDifference:
    """Difference between the tensors that A and B computed from the same inputs.

    ``relative`` is the L2 norm of the difference over that of A; ``largest`` is the largest absolute difference of an
    element. None: infinite or not a number (A is zero throughout, or A or B overflows).
    """

    what: str
    """``outputs`` or ``gradients``."""
    tensors: int
    relative: float | None
    largest: float | None


@dataclass(frozen=True, slots=True, repr=False)
class Comparison(Saved, Displayed):
    """Comparison of two steps, ``a`` and ``b``.

    Example:
        >>> comparison = memplan.compare(model, model, images, device="h100", b_options={"autocast": "bf16"})
        >>> comparison.difference, [row.difference for row in comparison.by_cause if row.cause == "saved"]
        (-843776, [155776])
    """

    FORMAT: ClassVar[str] = "memplan.compare"
    DERIVED: ClassVar[tuple[str, ...]] = ("difference", "by_cause", "layers", "decided_otherwise")

    a: Side
    b: Side
    apart: tuple[ResultDifference, ...] = ()
    """Differences of outputs and gradients; empty unless both steps really ran."""
    same_weights: bool | None = None
    """Whether both ran with equal weights; None if they did not run."""
    notes: tuple[str, ...] = ()

    @property
    def difference(self) -> int:
        """Peak of B minus peak of A, in bytes."""
        return self.b.peak - self.a.peak

    @property
    def by_cause(self) -> tuple[CauseRow, ...]:
        """Return a row for each cause with bytes at either peak."""
        a, b = self.a.by_cause, self.b.by_cause
        causes = dict.fromkeys((*(cause for cause in _ORDER if cause in a or cause in b), *a, *b))
        rows = [CauseRow(cause, a.get(cause, 0), b.get(cause, 0)) for cause in causes]
        return tuple(row for row in rows if row.a or row.b)

    @property
    def layers(self) -> tuple[LayerPair, ...]:
        """Return a row for each name of a layer: the layers of A in order, then those that only B has."""
        a, b = _by_name(self.a.layers), _by_name(self.b.layers)
        if WHOLE not in a or WHOLE not in b:  # a side without a root module: keep the class names
            a, b = ({part.name: part for part in side.layers} for side in (self.a, self.b))
        return tuple(LayerPair(name, a.get(name), b.get(name)) for name in dict.fromkeys((*a, *b)))

    @property
    def decided_otherwise(self) -> tuple[tuple[Decided | None, Decided | None], ...]:
        """Values for which two plans choose different levers, the largest first; None where a plan has no decision."""
        decided_a, decided_b = ({row.value: row for row in side.decided} for side in (self.a, self.b))
        pairs = [(decided_a.get(value), decided_b.get(value)) for value in dict.fromkeys((*decided_a, *decided_b))]
        differing = [(a, b) for a, b in pairs if a is None or b is None or a.lever != b.lever]
        return tuple(sorted(differing, key=lambda pair: -max(row.bytes for row in pair if row is not None)))


def _by_name(parts: tuple[LayerPart, ...]) -> dict[str, LayerPart]:
    """Return layers by name. The root module, which is named after its class, gets the name `WHOLE`."""
    roots = [part for part in parts if part.name == part.kind]
    return {WHOLE if len(roots) == 1 and part is roots[0] else part.name: part for part in parts}


CAUSE_LABELS = LABELS | {CAST_COPIES: "weights in another dtype", STEP: "what the step holds"}
_CAUSES = 3
"""Causes that the headline lists."""
_CHANGE = 0.005
"""Change, as a share of A, from which on it is also stated in percent."""


def headline(comparison: Comparison) -> str:
    """Return ``1.1 GiB -> 0.7 GiB peak: 412.3 MiB less, -36 % (...)``, with the causes that differ most."""
    a, b = comparison.a, comparison.b
    text = f"{format_bytes(a.peak)} -> {format_bytes(b.peak)} peak: {change_text(a.peak, b.peak)}"
    rows = sorted((row for row in comparison.by_cause if row.difference), key=lambda row: -abs(row.difference))
    parts = [f"{CAUSE_LABELS.get(row.cause, row.cause)} {signed(row.difference)}" for row in rows[:_CAUSES]]
    return text + (f" ({', '.join(parts)})" if parts else "")


def change_text(a: int, b: int) -> str:
    """Return the change from ``a`` to ``b`` bytes in words: ``412.3 MiB less, -36 %``."""
    if a == b:
        return "the same"
    share = f", {100 * (b - a) / a:+.0f} %" if a and abs(b - a) >= _CHANGE * a else ""
    return f"{format_bytes(abs(b - a))} {'less' if b < a else 'more'}{share}"


def remarks(comparison: Comparison) -> Iterator[str]:
    """Yield sentences about outputs, differences of results, and zeros among the weights."""
    a, b = comparison.a, comparison.b
    if a.outputs is not None and b.outputs is not None:
        if a.outputs == b.outputs:
            yield f"Both return {_outputs_text(a.outputs)}."
        else:
            yield f"A returns {_outputs_text(a.outputs)}, B {_outputs_text(b.outputs)}."
    on = "On equal weights" if comparison.same_weights else "Each with its own weights"
    for difference in comparison.apart:
        yield f"{on}, B's {difference.what} {distance_text(difference, 'A')}."
    yield from zeros_of("A", a)
    yield from zeros_of("B", b)


def distance_text(difference: ResultDifference, reference: str) -> str:
    """Return ``are 1.2 % from A's (relative, L2; 0.5 at most for one element)``; ``reference`` is ``A``."""
    if difference.relative == 0:
        return f"are {reference}'s bit for bit"
    if difference.relative is None or difference.largest is None:
        return f"cannot be held against {reference}'s: one is zero throughout, infinite or not a number"
    share = difference.relative
    relative = f"{100 * share:.2g} %" if share >= 1e-4 else f"{share:.1e}"
    return f"are {relative} from {reference}'s (relative, L2; {difference.largest:.3g} at most for one element)"


def zeros_of(name: str, side: Side) -> Iterator[str]:
    """Yield sentences on the zeros among a side's weights: their bytes, and what pruning whole channels would save."""
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
    """Return the bytes by which outputs would shrink without ``fewer_channels`` of each pruned layer."""
    output = {part.name: part.output_bytes for part in side.layers}
    return sum(output.get(zero.layer, 0) * zero.fewer_channels // zero.channels for zero in side.zeros)


def _outputs_text(outputs: tuple[str, ...]) -> str:
    return ", ".join(outputs[:4]) + (f" and {len(outputs) - 4} more" if len(outputs) > 4 else "")


def have_comparable_seconds(a: Side, b: Side) -> bool:
    """Return whether the seconds of two sides are comparable: from the same source, as rooflines or measurements."""
    return a.seconds_by.partition(" ")[0] == b.seconds_by.partition(" ")[0]


def seconds_sentence(comparison: Comparison) -> str | None:
    """Return the sentence on step times, with their ratio if they are comparable; None if a time is unknown."""
    a, b = comparison.a, comparison.b
    if a.seconds is None or b.seconds is None:
        return None
    time_a, time_b = format_seconds(a.seconds), format_seconds(b.seconds)
    if a.seconds_by != b.seconds_by:
        time_a, time_b = f"{time_a} ({a.seconds_by})", f"{time_b} ({b.seconds_by})"
    if not have_comparable_seconds(a, b):
        return f"Time of a step: {time_a}, and {time_b}: not by one measure."
    ratio = f", {100 * (b.seconds / a.seconds - 1):+.0f} %" if a.seconds else ""
    how = f" ({a.seconds_by})" if a.seconds_by == b.seconds_by else ""
    return f"Time of a step: {time_a} -> {time_b}{ratio}{how}."
