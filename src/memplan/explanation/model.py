"""What an explanation is: immutable rows that know nothing of how they are printed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from memplan._bytes import format_bytes
from memplan._display import Displayed, Printed
from memplan._json import Signed, SignedInt
from memplan.cudnn.questions import ExecutionPlan
from memplan.explanation.course import Course
from memplan.explanation.line_profile import LineProfile
from memplan.simulation.timeline import Timeline
from memplan.trace.records import Assumption

FORMAT = "memplan.explanation"
SCHEMA = 1
"""Version of the JSON form. Raised whenever a reader of the old form would misread the new one."""


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
    step: SignedInt
    bytes: int


@dataclass(frozen=True, slots=True)
class HolderRow:
    """Storages alive at the allocated peak, alike in all that is told of them; ``bytes`` are those of all ``count``.

    ``name`` is that of the parameter or buffer (of a gradient: whose it is), else the op that made them. ``phase`` and
    ``step`` are those of their birth; ``step`` is 0-based, -1 while building.
    """

    name: str
    layer: str
    where: str | None
    cause: str
    phase: str
    step: SignedInt
    shape: tuple[int, ...]
    dtype: str
    count: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Line:
    """From ``batch`` on (up to the next line's), the peak is ``fixed + per_sample * batch`` bytes."""

    batch: Signed
    fixed: Signed
    per_sample: Signed


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
    fixed: Signed
    per_sample: Signed
    lines: tuple[Line, ...]

    def peak(self, batch: int) -> int:
        """Return the peak at any batch, in bytes."""
        return round(max(line.fixed + line.per_sample * batch for line in self.lines))


ChargeName = Literal["tensors", "workspace", "rounding", "fragmentation", "context"]


@dataclass(frozen=True, slots=True)
class Charge:
    """A term of what nvidia-smi would show, in bytes: in the low and in the high case of what is not known exactly.

    ``high`` is ``low`` and what the high case adds to it.
    """

    name: ChargeName
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
class SmallerPlan(Printed):
    """A convolution for whose first plan of cuDNN a card has no room: the plan that runs instead is slower."""

    layer: str
    op: str
    where: str | None
    first: ExecutionPlan
    taken: ExecutionPlan

    def __str__(self) -> str:
        of = f" of {self.layer}" if self.layer else ""
        return (
            f"{self.op}{of} runs {self.taken.engine} with {format_bytes(self.taken.workspace)} of workspace, instead "
            f"of {self.first.engine} with {format_bytes(self.first.workspace)}"
        )


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
    smaller: tuple[SmallerPlan, ...] = ()
    """In the order in which they run, where the step fits because of them."""


@dataclass(frozen=True, slots=True, repr=False)
class Explanation(Displayed):
    """Where the memory of a step goes. All numbers are bytes.

    ``by_cause`` is what is live at the allocated peak and adds up to it exactly; ``by_cause_reserved`` the same at the
    reserved peak; ``by_cause_most`` the most that each cause holds at any time (not at the same time).
    """

    title: str
    device: str
    train: bool
    timeline: Timeline
    by_cause: Mapping[str, int]
    by_cause_reserved: Mapping[str, int]
    by_cause_most: Mapping[str, int]
    layers: tuple[LayerRow, ...]
    saved: tuple[SavedRow, ...]
    """What is saved at the moment of the step at which the most is."""
    saved_bytes: int
    """Of ``saved``, each storage once: the most that is kept from forward to backward at any one time."""
    peak: PeakRow | None
    holders: tuple[HolderRow, ...]
    """All that is alive at the allocated peak, the largest first; with ``rounding`` the bytes add up to it."""
    sentence: str
    scaling: Scaling | None
    notes: tuple[str, ...]
    assumptions: tuple[Assumption, ...]
    card: CardUse | None = None
    """Of a step for a card: what it takes from it."""
    lines: tuple[LineProfile, ...] = ()
    """The functions that were followed line by line, as `memplan.profile` asks for."""
    course: Course | None = None
    """Memory over time by cause, and what is alive at the peak."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON: every number and text of the explanation, without the events of the timeline.
        Rows of ``course`` are lists."""
        apart = ("timeline", "course")
        names = [field.name for field in dataclasses.fields(self) if field.name not in apart]
        timeline = self.timeline
        return {
            "format": FORMAT,
            "schema": SCHEMA,
            **{name: _plain(getattr(self, name)) for name in names},
            "timeline": {
                "device": timeline.device,
                "peak_allocated": timeline.peak_allocated,
                "peak_reserved": timeline.peak_reserved,
                "peak_tick": timeline.peak_tick,
                "reserved_tick": timeline.reserved_tick,
                "build": _plain(timeline.build),
                "steps": _plain(timeline.steps),
            },
            "course": None if self.course is None else self.course.to_dict(),
        }

    def __str__(self) -> str:
        return summary(self)

    def __repr__(self) -> str:
        peak = self.timeline.peak_allocated
        return f"<Explanation of {self.title!r} on {self.device}: {format_bytes(peak)} peak, {len(self.layers)} layers>"


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return dict(value) if isinstance(value, dict) else value


def verdict_sentence(use: CardUse) -> str:
    """Return whether the step fits on its card, and which is the smallest that it fits on."""
    verdict = use.verdict
    needs = format_bytes(verdict.low)
    if verdict.low != verdict.high:
        needs += f" to {format_bytes(verdict.high)}"
    words = {"fits": "fits", "low only": "fits in the low case, not in the high one", "does not fit": "does not fit"}
    smallest = (
        f"the smallest card with these kernels that it fits on: {use.smallest}"
        if use.smallest
        else "with these kernels it fits on no card known here"
    )
    room = format_bytes(verdict.capacity)
    if verdict.low > verdict.capacity and verdict.answer != "does not fit":
        # the allocator gives cached segments back before it gives up
        taken = f"takes {needs} where there is room, and in {room} gives cached blocks back"
    else:
        taken = f"needs {needs} of {room}"
    return f"{words[verdict.answer]} on {verdict.title}: {taken}; {smallest}"


def smaller_plans_sentence(use: CardUse, most: int = 3) -> str:
    """Return which convolutions run with a smaller plan, for want of room; empty where none does."""
    different = list(dict.fromkeys(map(str, use.smaller)))
    if not different:
        return ""
    more = f"; and {len(different) - most} more" if len(different) > most else ""
    return f"no room for cuDNN's first plan: {'; '.join(different[:most])}{more}"


LABELS = {
    "weight": "weights",
    "buffer": "buffers",
    "input": "inputs",
    "parameter_gradient": "weights' gradients",
    "activation_gradient": "activations' gradients",
    "optimizer_state": "optimizer state",
    "saved": "saved activations",
    "activation": "other activations",
    "temporary": "temporaries",
    "workspace": "workspaces",
    "rounding": "rounding",
    "fragmentation": "fragmentation",
}


def headline(by_cause: dict[str, int], weight_bytes: int, peak: int) -> str:
    """Return the sentence that answers "why so much": ``44.7 MiB of weights -> 1.9 GiB peak: 61 % saved activations,
    ...``."""
    largest = sorted(((size, cause) for cause, size in by_cause.items() if size), reverse=True)
    parts = [f"{_percent(size, peak)} {LABELS[cause]}" for size, cause in largest[:4]]
    rest = peak - sum(size for size, _ in largest[:4])
    if rest > 0:
        parts.append(f"{_percent(rest, peak)} other")
    return f"{format_bytes(weight_bytes)} of weights -> {format_bytes(peak)} peak: {', '.join(parts)}"


def scaling_sentence(explanation: Explanation) -> str | None:
    """``0.2 GiB fixed + 58.1 MiB per sample from batch 3 on``, None where it is not known."""
    scaling = explanation.scaling
    if scaling is None:
        return None
    batch, last = scaling.batches[0], scaling.lines[-1]
    if last.batch > _FAR * batch:  # lines that differ by the rounding of blocks
        return f"{_line(scaling.fixed, scaling.per_sample)} (from batch {batch} and {2 * batch})"
    if abs(last.fixed + last.per_sample * batch - scaling.peaks[0]) <= _NEAR * scaling.peaks[0]:
        return f"{_line(last.fixed, last.per_sample)} (from batch {batch} and {2 * batch})"
    # at this batch another moment of the step is the highest than where activations rule
    return (
        f"{_line(scaling.fixed, scaling.per_sample)} at batch {batch}, "
        f"{_line(last.fixed, last.per_sample)} from batch {max(1, math.ceil(last.batch))} on"
    )


_FAR = 16
"""How many times the batch another line may begin at and still be told."""


_NEAR = 0.02
"""How far off, in shares of the peak, the line of large batches may be for the one line to be told."""


def _line(fixed: float, per_sample: float) -> str:
    return f"{format_bytes(round(fixed))} fixed + {format_bytes(round(per_sample))} per sample"


def workspace_sentence(explanation: Explanation) -> str | None:
    """Return how much higher the peak can be; None where every workspace is known."""
    peak = explanation.timeline.peak_allocated
    if explanation.card is None or explanation.card.peak_allocated_high == peak:
        return None
    most = format_bytes(explanation.card.peak_allocated_high)
    return f"with the largest workspaces of the algorithms known of cuDNN: up to {most} peak"


def peak_sentence(explanation: Explanation) -> str | None:
    """Return where the peak is: phase, op, layer, file:line."""
    peak = explanation.peak
    if peak is None:
        return None
    step = "while building" if peak.step < 0 else f"in step {peak.step + 1}, {peak.phase}"
    layer = f" of {peak.layer}" if peak.layer else ""
    return f"the peak is {step}: {peak.op}{layer}" + (f" ({peak.where})" if peak.where else "")


def summary(explanation: Explanation) -> str:
    """Return the paragraph."""
    lines = [
        explanation.sentence,
        workspace_sentence(explanation),
        peak_sentence(explanation),
        scaling_sentence(explanation),
    ]
    if explanation.card is not None:
        lines.append(verdict_sentence(explanation.card))
        lines += [text] if (text := smaller_plans_sentence(explanation.card)) else []
    lines += [f"note: {note}" for note in explanation.notes]
    for assumption in explanation.assumptions:
        times = f" ({assumption.count} times)" if assumption.count > 1 else ""
        kind = "kernel" if assumption.kind == "kernel" else "assumed"
        lines.append(f"{kind}: {assumption.text}{times}" + (f", at {assumption.where}" if assumption.where else ""))
    return "\n".join(line for line in lines if line)


def _percent(part: int, whole: int) -> str:
    share = 100 * part / whole if whole else 0.0
    return "<1 %" if 0 < share < 0.5 else f"{share:.0f} %"
