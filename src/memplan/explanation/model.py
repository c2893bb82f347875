"""What an explanation is: immutable rows that know nothing of how they are printed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from memplan.simulation.model import Timeline
from memplan.trace.model import Assumption


@dataclass(frozen=True, slots=True)
class SavedRow:
    """A storage kept from forward to backward, as one op keeps it.

    ``bytes`` are those of the whole storage; ``counted`` is true for the one op among its sharers that it counts for,
    so that the counted rows add up to the saved total.
    """

    layer: str
    op: str
    role: str
    bytes: int
    counted: bool
    shape: tuple[int, ...]
    dtype: str
    needed_for: tuple[str, ...]
    shared_with: tuple[str, ...]
    why: str
    where: str | None


@dataclass(frozen=True, slots=True)
class LayerRow:
    """A layer: what it outputs, keeps, owns, in bytes.

    ``saved_bytes`` counts a storage that several layers keep for the first of them only, so that the column adds up
    to the saved total; ``kept_bytes`` counts it for each. ``needed_for`` is out of ``weight_gradient`` and
    ``input_gradient``; a layer that keeps bytes for neither keeps them for nothing.
    """

    name: str
    kind: str
    output_bytes: int
    saved_bytes: int
    kept_bytes: int
    shared_with: tuple[str, ...]
    needed_for: tuple[str, ...]
    weight_bytes: int
    gradient_bytes: int
    why: tuple[str, ...]
    where: str | None


@dataclass(frozen=True, slots=True)
class PeakRow:
    """The op that is running when the most is allocated. ``step`` is 0-based, -1 while building."""

    op: str
    layer: str
    where: str | None
    phase: str
    step: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Line:
    """From ``batch`` on (up to the next line's), the peak is ``fixed + per_sample * batch`` bytes."""

    batch: float
    fixed: float
    per_sample: float


@dataclass(frozen=True, slots=True)
class Scaling:
    """How the peak grows with the batch, from recordings at the ``batches`` given, which had the ``peaks`` given.

    ``fixed`` and ``per_sample`` are those of the line that the batch itself lies on; ``lines`` are all of them, since
    at another batch another moment of the step can be the highest.

    Example:
        >>> scaling.peak(256)
        649662128
    """

    batches: tuple[int, ...]
    peaks: tuple[int, ...]
    fixed: float
    per_sample: float
    lines: tuple[Line, ...]

    def peak(self, batch: int) -> int:
        """The peak at any batch, in bytes."""
        return round(max(line.fixed + line.per_sample * batch for line in self.lines))


@dataclass(frozen=True, slots=True)
class Charge:
    """A term of what nvidia-smi would show, in bytes: in the low and in the high case of what is not known exactly."""

    name: str
    """``tensors``, ``workspace``, ``rounding``, ``fragmentation`` or ``context``."""
    low: int
    high: int


Answer = Literal["fits", "low only", "does not fit"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a step fits on a card: ``low`` to ``high`` bytes are needed, context included, of ``capacity``."""

    device: str
    title: str
    capacity: int
    low: int
    high: int
    answer: Answer


@dataclass(frozen=True, slots=True)
class CardUse:
    """What a step takes from its card at most, and where it fits.

    ``charges`` add up to what nvidia-smi would show: what is in blocks at the allocated peak, what the allocator ever
    holds beyond that, and the context. ``others`` are the cards of the catalogue on which the step takes the same
    kernels, smallest first; on those of ``other_kernels`` an op takes another one, so that it has to be recorded for
    them. ``smallest`` is the first of the others that it fits on in the high case.
    """

    charges: tuple[Charge, ...]
    verdict: Verdict
    others: tuple[Verdict, ...]
    other_kernels: tuple[str, ...]
    smallest: str | None
    peak_allocated_high: int
    """The allocated peak in the high case; the explanation's timeline is that of the low case."""
    not_modelled: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Where the memory of a step goes. All numbers are bytes.

    ``by_cause`` is what is live at the allocated peak and adds up to it exactly; ``by_cause_reserved`` the same at the
    reserved peak; ``by_cause_most`` the most that each cause holds at any time (not at the same time).
    """

    title: str
    device: str
    train: bool
    timeline: Timeline
    by_cause: dict[str, int]
    by_cause_reserved: dict[str, int]
    by_cause_most: dict[str, int]
    layers: tuple[LayerRow, ...]
    saved: tuple[SavedRow, ...]
    """What is saved at the moment of the step at which the most is."""
    saved_bytes: int
    """Of ``saved``, each storage once: the most that is kept from forward to backward at any one time."""
    peak: PeakRow | None
    sentence: str
    scaling: Scaling | None
    notes: tuple[str, ...]
    assumptions: tuple[Assumption, ...]
    card: CardUse | None = None
    """Of a step for a card: what it takes from it."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: every number and text of the explanation, without the events of the timeline."""
        data = {
            field.name: _plain(getattr(self, field.name))
            for field in dataclasses.fields(self)
            if field.name != "timeline"
        }
        timeline = self.timeline
        data["timeline"] = {
            "device": timeline.device,
            "peak_allocated": timeline.peak_allocated,
            "peak_reserved": timeline.peak_reserved,
            "build": _plain(timeline.build),
            "steps": _plain(timeline.steps),
        }
        return data

    def __str__(self) -> str:
        from memplan.explanation.text import summary

        return summary(self)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return dict(value) if isinstance(value, dict) else value
