"""The `Explanation` and its rows, and the sentences of its summary."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from memplan._bytes import format_bytes
from memplan._display import Displayed, Printed
from memplan._json import Saved, Signed, SignedInt, Unreadable
from memplan._text import format_share
from memplan.cudnn.questions import ExecutionPlan
from memplan.explanation.line_profile import LineProfile
from memplan.explanation.memory_timeline import MemoryTimeline
from memplan.simulation.host import HostUse
from memplan.simulation.timeline import Timeline
from memplan.trace.records import Assumption

_EVENTS = ("events", "log", "segments")
"""Fields of the timeline that are not saved: reports of a saved explanation need only its peaks."""
_BESIDE = ("script", "beside")
"""Keys that commands add: facts about a script, and a comparison of predicted and measured peaks."""


@dataclass(frozen=True, slots=True)
class SavedRow:
    """A storage that an op saves for backward.

    ``bytes`` are those of the whole storage. ``counted`` is true for exactly one of the ops that share the storage, so
    that the counted rows add up to the saved total.
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
    """A layer: the bytes that it outputs, saves and owns.

    ``saved_bytes`` counts a storage that several layers save for the first of them only, so that the column adds up
    to the saved total; ``kept_bytes`` counts it for each. ``needed_for`` has ``weight_gradient``, ``input_gradient``
    or both; if it is empty, no gradient reads what the layer saves.
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
    """The op that runs at the allocated peak. ``step`` is 0-based, -1 during the build."""

    op: str
    layer: str
    where: str | None
    phase: str
    step: SignedInt
    bytes: int


@dataclass(frozen=True, slots=True)
class OwnerRow:
    """Equal storages live at the allocated peak; ``bytes`` is the total of all ``count``.

    ``name`` is the parameter or buffer (of a gradient, its parameter), else the op that produced them. ``phase`` and
    ``step`` are those of the allocation; ``step`` is 0-based, -1 during the build.
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
    """From ``batch`` up to the batch of the next line, the peak is ``fixed + per_sample * batch`` bytes."""

    batch: Signed
    fixed: Signed
    per_sample: Signed


@dataclass(frozen=True, slots=True)
class Scaling:
    """How the peak grows with the batch, from recordings at ``batches`` with ``peaks``.

    ``lines`` has several lines if different moments of the step are the peak at different batches. ``fixed`` and
    ``per_sample`` are those of the line at the first of ``batches``.

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
    """A term of the memory that nvidia-smi would show, in bytes; ``low`` and ``high`` are bounds of uncertain terms."""

    name: ChargeName
    low: int
    high: int


Answer = Literal["fits", "low only", "does not fit"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a step fits on a card: it needs ``low`` to ``high`` of ``capacity`` bytes, including the CUDA context.

    With a ``band``, ``low`` and ``high`` are the same expected bytes, which decide, and the band holds the real ones
    in 95 % of steps.
    """

    device: str
    title: str
    capacity: int
    low: int
    high: int
    answer: Answer
    band: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class SmallerPlan(Printed):
    """A convolution whose first cuDNN plan does not fit on a card: the plan ``taken`` instead is slower."""

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
    """Memory of a step on its card, and the cards on which it fits.

    ``charges`` add up to what nvidia-smi would show: the allocated peak, the reserved bytes beyond it, and the CUDA
    context. ``others`` are the cards of the catalogue on which the step runs the same kernels, smallest first; on
    those of ``other_kernels`` it does not and has to be recorded for them. ``smallest`` is the first of ``others`` on
    which the high case fits.
    """

    charges: tuple[Charge, ...]
    verdict: Verdict
    others: tuple[Verdict, ...]
    other_kernels: tuple[str, ...]
    smallest: str | None
    peak_allocated_high: int
    """The allocated peak of the high case; the explanation's timeline is of the low case. With workspaces that are
    known or expected there is one case."""
    not_modelled: tuple[str, ...]
    smaller: tuple[SmallerPlan, ...] = ()
    """The smaller plans that make the step fit, in the order in which they run."""
    allocated_band: tuple[int, int] | None = None
    """What holds the allocated peak in 95 % of steps, where workspaces are expected; None where all are known."""


@dataclass(frozen=True, slots=True)
class HostNeed:
    """What a step or a run takes of the host's memory, and whether that is within a budget.

    ``first`` is the memory that is exceeded first, "" if neither is; without a budget the host's has no limit.
    """

    use: HostUse
    peak: PeakRow | None
    """The op that runs at the host's peak; None if that is before all ops."""
    budget: int | None
    first: Literal["", "host", "card"]

    @property
    def fits(self) -> bool:
        """Whether the host's memory is within the budget; True without a budget."""
        return self.budget is None or self.use.peak.bytes <= self.budget


@dataclass(frozen=True, slots=True, repr=False)
class Explanation(Saved, Displayed):
    """Where the memory of a step goes. All numbers are bytes.

    ``by_cause`` has the live bytes at the allocated peak and adds up to it exactly; ``by_cause_reserved`` the same at
    the reserved peak; ``by_cause_most`` the peak of each cause (not at the same time).
    """

    FORMAT: ClassVar[str] = "memplan.explanation"
    AGAIN: ClassVar[str] = "Explain the step again"

    title: str
    device: str
    train: bool
    timeline: Timeline
    by_cause: Mapping[str, int]
    by_cause_reserved: Mapping[str, int]
    by_cause_most: Mapping[str, int]
    layers: tuple[LayerRow, ...]
    saved: tuple[SavedRow, ...]
    """The storages saved at the moment of the step with the most saved bytes."""
    saved_bytes: int
    """Total of ``saved``, each storage counted once: the most that is saved for backward at any time."""
    peak: PeakRow | None
    holders: tuple[OwnerRow, ...]
    """The storages live at the allocated peak, the largest first; with ``rounding`` the bytes add up to it."""
    sentence: str
    scaling: Scaling | None
    notes: tuple[str, ...]
    assumptions: tuple[Assumption, ...]
    card: CardUse | None = None
    """What the step takes from its card; None on the CPU."""
    lines: tuple[LineProfile, ...] = ()
    """The functions followed line by line, marked with `memplan.profile`."""
    course: MemoryTimeline | None = None
    """The memory timeline by cause, and the storages live at the peak."""
    source: str = ""
    """The script that was written for a model and a recipe, and recorded; empty for other steps."""
    host: HostNeed | None = None
    """The host's memory, for a recorded step on a card, with workers of loaders, or with a budget."""

    def _plain(self) -> dict[str, Any]:
        """Return the fields to save: without the timeline's `_EVENTS`, and without an empty ``source``."""
        plain = Saved._plain(self)
        if not self.source:
            del plain["source"]
        return plain | {"timeline": {name: part for name, part in plain["timeline"].items() if name not in _EVENTS}}

    @classmethod
    def _prepared(cls, plain: dict[str, Any]) -> dict[str, Any]:
        """Return saved fields as the constructor needs them: without what commands added, and with no events."""
        plain = {key: part for key, part in plain.items() if key not in _BESIDE}
        if isinstance(plain.get("timeline"), dict):
            plain["timeline"] = {"events": [], **plain["timeline"]}
        return plain

    def _check(self) -> None:
        """Raise Unreadable if parts of a loaded file contradict each other."""
        causes = {
            *self.by_cause, *self.by_cause_reserved, *self.by_cause_most, *(row.cause for row in self.holders)
        }  # fmt: skip
        unknown = causes - LABELS.keys()
        if unknown:
            raise Unreadable(f"has the cause {min(unknown)!r:.40}, which is unknown")
        peak = self.timeline.peak_allocated
        if sum(self.by_cause.values()) != peak:
            raise Unreadable(f"has causes that do not add up to the peak of {peak} bytes")
        scaling = self.scaling
        if scaling is not None and not (scaling.lines and 0 < len(scaling.batches) == len(scaling.peaks)):
            raise Unreadable("has a scaling without lines, or without a peak for each batch")
        if self.course is not None and max(self.course.allocated, default=0) != peak:
            raise Unreadable("has another peak in its course than in its timeline")
        if self.card is not None:
            bands = [(peak, self.card.allocated_band)]
            bands += [(verdict.low, verdict.band) for verdict in (self.card.verdict, *self.card.others)]
            if any(band is not None and not band[0] <= expected <= band[1] for expected, band in bands):
                raise Unreadable("has expected bytes outside of their band")

    def __repr__(self) -> str:
        peak = self.timeline.peak_allocated
        return f"<Explanation of {self.title!r} on {self.device}: {format_bytes(peak)} peak, {len(self.layers)} layers>"


def verdict_sentence(use: CardUse) -> str:
    """Return the sentence on whether the step fits on its card, and on which smallest card it fits."""
    verdict = use.verdict
    needs = format_bytes(verdict.low)
    if verdict.band is not None:
        needs = f"about {needs} (95 %: {_range(*verdict.band)})"
    elif verdict.low != verdict.high:
        needs = _range(verdict.low, verdict.high)
    words = {"fits": "fits", "low only": "fits in the low case, not in the high one", "does not fit": "does not fit"}
    smallest = (
        f"the smallest card with these kernels that it fits on: {use.smallest}"
        if use.smallest
        else "with these kernels it fits on no card known here"
    )
    room = format_bytes(verdict.capacity)
    if verdict.low > verdict.capacity and verdict.answer != "does not fit":
        # the allocator releases cached segments before it runs out of memory
        usage = f"takes {needs} where there is room, and in {room} gives cached blocks back"
    else:
        usage = f"needs {needs} of {room}"
    return f"{words[verdict.answer]} on {verdict.title}: {usage}; {smallest}"


def _range(low: int, high: int) -> str:
    return f"{format_bytes(low)} to {format_bytes(high)}"


def smaller_plans_sentence(use: CardUse, most: int = 3) -> str:
    """Return the sentence on convolutions that run with a smaller cuDNN plan to fit; "" if there are none."""
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
    "gathered_weight": "gathered weights",
    "communication": "communication",
    "rounding": "rounding",
    "fragmentation": "fragmentation",
}


def headline(by_cause: dict[str, int], peak: int, whole: int) -> str:
    """Return the first sentence: ``44.7 MiB of weights -> 1.9 GiB peak: 61 % saved activations, ...``.

    ``whole``: the peak with building. If that is larger, as where a model is converted, the sentence ends with it.
    """
    largest = sorted(((size, cause) for cause, size in by_cause.items() if size), reverse=True)
    parts = [f"{format_share(size, peak)} {LABELS[cause]}" for size, cause in largest[:4]]
    other = peak - sum(size for size, _ in largest[:4])
    if other > 0:
        parts.append(f"{format_share(other, peak)} other")
    of_step = " in a step" if whole > peak else ""
    building = f"; {format_bytes(whole)} while building" if whole > peak else ""
    weights = format_bytes(by_cause["weight"])
    return f"{weights} of weights -> {format_bytes(peak)} peak{of_step}: {', '.join(parts)}{building}"


def scaling_sentence(explanation: Explanation) -> str | None:
    """Return ``0.2 GiB fixed + 58.1 MiB per sample from batch 3 on``, or None if the scaling is not known."""
    scaling = explanation.scaling
    if scaling is None:
        return None
    batch, last = scaling.batches[0], scaling.lines[-1]
    if last.batch > _FAR_BATCH * batch:  # lines that differ by the rounding of blocks
        return f"{_line(scaling.fixed, scaling.per_sample)} (from batch {batch} and {2 * batch})"
    if abs(last.fixed + last.per_sample * batch - scaling.peaks[0]) <= _TOLERANCE * scaling.peaks[0]:
        return f"{_line(last.fixed, last.per_sample)} (from batch {batch} and {2 * batch})"
    # at this batch the peak is at another moment than at large batches, where activations dominate
    return (
        f"{_line(scaling.fixed, scaling.per_sample)} at batch {batch}, "
        f"{_line(last.fixed, last.per_sample)} from batch {max(1, math.ceil(last.batch))} on"
    )


_FAR_BATCH = 16
"""A line that begins above this multiple of the batch is not mentioned."""
_TOLERANCE = 0.02
"""If the line of large batches is off by at most this share of the peak, only that line is mentioned."""


def _line(fixed: float, per_sample: float) -> str:
    return f"{format_bytes(round(fixed))} fixed + {format_bytes(round(per_sample))} per sample"


def workspace_sentence(explanation: Explanation) -> str | None:
    """Return the sentence on the peak with other workspaces than expected, or with the largest; None if all workspaces
    are known, or if the peak is the same."""
    peak = explanation.timeline.peak_allocated
    if explanation.card is None:
        return None
    if explanation.card.allocated_band is not None:
        low, high = map(format_bytes, explanation.card.allocated_band)
        return f"95 %: {low} to {high} peak, as cuDNN's workspaces are expected" if low != high else None
    if explanation.card.peak_allocated_high == peak:
        return None
    most = format_bytes(explanation.card.peak_allocated_high)
    return f"with the largest workspaces of the algorithms known of cuDNN: up to {most} peak"


def peak_sentence(explanation: Explanation) -> str | None:
    """Return the sentence on where the peak is: phase, op, layer, file:line; None if it is before all ops."""
    peak = explanation.peak
    if peak is None:
        return None
    step = "while building" if peak.step < 0 else f"in step {peak.step + 1}, {peak.phase}"
    layer = f" of {peak.layer}" if peak.layer else ""
    return f"the peak is {step}: {peak.op}{layer}" + (f" ({peak.where})" if peak.where else "")
