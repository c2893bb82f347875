"""Peak memory of a sequence of batches of different lengths, and changes that would lower it."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from memplan._display import Displayed
from memplan._json import Saved, Signed
from memplan.errors import InputError, MemplanError
from memplan.explanation.card import context_of
from memplan.simulation.allocator.allocator import OutOfMemory
from memplan.simulation.allocator.settings import parse_settings
from memplan.simulation.on_card import drive
from memplan.simulation.peaks import timeline_of
from memplan.simulation.simulate import simulate
from memplan.simulation.timeline import Timeline
from memplan.studies.axes.axes import Axis, axis_of, value_of
from memplan.studies.axes.subject import Subject
from memplan.studies.lengths.chained import chained
from memplan.studies.lengths.distribution import draw, padded
from memplan.studies.lengths.interpolation import interpolated, lengths_to_record
from memplan.trace.record import record_for
from memplan.trace.recording.session import Target
from memplan.trace.records import HOST
from memplan.trace.trace import Trace

BATCHES = 1000
"""Batches in the sequence."""
COMPARED = 200
"""Batches in each `ChangedSequence`."""
EPOCHS, EPOCH = 20, 50
"""Number of further sequences that are checked for running out of memory, and batches in each."""
_EXPANDABLE = "expandable_segments:True"
_MOMENTS = (1, 10, 100, 300)

Change = Literal["as drawn", "expandable", "largest first", "padded to 64", "padded to 256", "sorted"]


@dataclass(frozen=True)
class LengthPeak:
    """A length: the number of its batches in the sequence, and the peak bytes of a step by itself."""

    length: int
    batches: int
    allocated: int
    reserved: int
    recorded: bool
    """Whether the length was recorded; else its bytes are interpolated."""


@dataclass(frozen=True)
class ChangedSequence:
    """Peak bytes of the first batches in another order, padded, or with other settings of the allocator."""

    change: Change
    allocated: int
    reserved: int
    fits: bool | None
    """Whether the sequence fits on the card; None on the CPU."""


@dataclass(frozen=True, repr=False)
class Lengths(Saved, Displayed):
    """A sequence of batches whose lengths are drawn from a distribution.

    ``allocated`` and ``reserved`` are the peak bytes of the sequence on a device without a memory limit.
    """

    FORMAT: ClassVar[str] = "memplan.lengths"
    SCHEMA: ClassVar[int] = 1
    AGAIN: ClassVar[str] = "Run memplan explain --lengths again"

    title: str
    device: str
    axis: str
    lengths: tuple[LengthPeak, ...]
    batches: int
    worst_batch: int
    """Number of the first batch at the allocated peak, from 1."""
    worst_length: int
    allocated: int
    reserved: int
    moments: tuple[tuple[int, int], ...]
    """(number of a batch, peak reserved bytes up to its end)."""
    compared: int
    """Number of batches in each of ``changes``."""
    changes: tuple[ChangedSequence, ...]
    capacity: int | None
    """Bytes of the card without its CUDA context; None on the CPU."""
    epochs: int
    """Number of further sequences."""
    epoch: int
    """Number of batches in each of them."""
    ran_out: int
    """Number of further sequences that do not fit on the card."""
    checked: int | None = None
    """A length that was recorded to check the interpolation."""
    off: Signed = 0.0
    """Relative error of the interpolated allocated peak at ``checked``."""
    larger: int = 0
    """Number of lengths that could not be interpolated: the bytes of the next longer recorded length count for them."""

    @property
    def fragments(self) -> int:
        """Bytes reserved beyond the allocated peak."""
        return self.reserved - self.allocated


def lengths_of(
    subject: Subject, shares: Mapping[int, float], target: Target, *, settings: str | None = None, title: str = ""
) -> Lengths:
    """Predict the memory of a sequence of batches whose lengths, or image sizes, are drawn from a distribution.

    ``shares``: share of all batches by length. Raises InputError if the step has no sequence and no image, or its model
    depends on the length.
    """
    axis = _axis(subject)
    order = draw(shares, BATCHES, seed=0)
    longest = max(shares)
    short = order[:COMPARED]
    orders: dict[Change, tuple[int, ...]] = {
        "as drawn": short, "expandable": short, "largest first": (longest, *short[:-1]),
        "padded to 64": padded(short, 64), "padded to 256": padded(short, 256),
        "sorted": tuple(sorted(short, reverse=True)),
    }  # fmt: skip
    if target.card is None:
        del orders["expandable"]
    recordings = _Recordings(subject, axis, target)
    recordings.record(lengths_to_record(list(shares)))
    for change in ("padded to 64", "padded to 256"):
        try:
            recordings.record([max(orders[change])])
        except MemplanError:  # the model has fewer positions
            del orders[change]
    recordings.fill(sorted({*shares, *(length for lengths in orders.values() for length in lengths)}))
    with _without_collections():
        traces = recordings.traces
        capacity = None
        if target.card is not None:
            capacity = target.card.capacity - context_of(traces[longest], target.card)
        sequence = _run(chained(traces, order), settings)
        worst = max(range(len(order)), key=lambda number: sequence.steps[number].peak_allocated)
        counts = Counter(order)
        single = {length: _run(traces[length], settings) for length in sorted(shares)}
        changes = list[ChangedSequence]()
        known = dict[tuple[tuple[int, ...], str | None], ChangedSequence]()
        for change, lengths in orders.items():
            case = (lengths, _EXPANDABLE if change == "expandable" else settings)
            if case not in known:  # padding may not change any length
                known[case] = _changed(change, chained(traces, lengths), case[1], capacity)
            changes.append(replace(known[case], change=change))
        ran_out = 0
        if capacity is not None:
            drawn = (draw(shares, EPOCH, seed) for seed in range(1, EPOCHS + 1))
            ran_out = sum(not _fits(chained(traces, lengths), settings, capacity) for lengths in drawn)
    peaks = list[LengthPeak]()
    for length, timeline in single.items():
        recorded = length in recordings.recorded
        peaks.append(LengthPeak(length, counts[length], timeline.peak_allocated, timeline.peak_reserved, recorded))
    moments = [(batch, max(step.peak_reserved for step in sequence.steps[:batch])) for batch in (*_MOMENTS, len(order))]
    return Lengths(
        title or subject.title, target.name, axis.name, tuple(peaks), batches=len(order),
        worst_batch=worst + 1, worst_length=order[worst],
        allocated=sequence.peak_allocated, reserved=sequence.peak_reserved, moments=tuple(moments),
        compared=len(short), changes=tuple(changes), capacity=capacity,
        epochs=0 if capacity is None else EPOCHS, epoch=EPOCH, ran_out=ran_out,
        checked=recordings.checked, off=recordings.off, larger=recordings.larger,
    )  # fmt: skip


class _Recordings:
    """The traces of all lengths, recorded or interpolated."""

    def __init__(self, subject: Subject, axis: Axis, target: Target) -> None:
        """``axis``: that of the lengths, a sequence's or an image's size."""
        self._subject, self._axis, self._target = subject, axis, target
        self.traces: dict[int, Trace] = {}
        """By length: the step with a batch of that length."""
        self.recorded = set[int]()
        """Lengths that were recorded; the traces of the others are interpolated."""
        self.checked: int | None = None
        """A length that was recorded to check the interpolation; None: none yet."""
        self.off = 0.0
        """Relative error of the interpolated peak at ``checked``."""
        self.larger = 0
        """Number of lengths that could not be interpolated: they have the trace of the next longer recorded length."""

    def record(self, lengths: Sequence[int]) -> None:
        """Record the step at each of these lengths, unless it is recorded already."""
        for length in lengths:
            if length not in self.recorded:
                build = self._axis.at(self._subject, length).build(on_card=self._target.card is not None)
                self.traces[length] = record_for(build, self._target)
                self.recorded.add(length)

    def fill(self, lengths: Sequence[int]) -> None:
        """Interpolate the traces at lengths that are not recorded; a longer one than each must be recorded.

        The middle length is also recorded, to measure the error of the interpolation.
        """
        missing = [length for length in lengths if length not in self.recorded]
        if not missing:
            return
        recorded = dict(self.traces)
        for length in missing:
            trace = interpolated(recorded, length)
            if trace is None:
                self.larger += 1
                trace = recorded[min(known for known in recorded if known > length)]
            self.traces[length] = trace
        self.checked = missing[len(missing) // 2]
        expected = simulate(self.traces[self.checked]).peak_allocated
        self.record([self.checked])
        self.off = expected / simulate(self.traces[self.checked]).peak_allocated - 1


def _axis(subject: Subject) -> Axis:
    """Return the axis of the sequence length, or else of the image size. Raises InputError if the step has neither."""
    for name in ("sequence", "size"):
        axis = axis_of(name, subject)
        if value_of(axis, subject) is not None:
            return axis
    raise InputError(
        f"{subject.title} has neither a sequence nor an image whose size could vary",
        expected="an input such as 8x1024:int64<50257 or 32x3x224x224, or a target with an argument named sequence "
        "or size",
        do="Give the input",
    )


@contextmanager
def _without_collections() -> Iterator[None]:
    """Disable the garbage collector within this context: with millions of storages it takes half of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _run(trace: Trace, settings: str | None, capacity: int | None = None) -> Timeline:
    """Simulate a trace, without the log of its allocator. Raises OutOfMemory above ``capacity`` bytes of a card."""
    if trace.device == HOST:
        return simulate(trace)
    _, levels = drive(trace, parse_settings(settings or ""), low=False, capacity=capacity, log=False)
    return timeline_of(trace.device, levels, (0, *trace.steps, trace.end))


def _fits(trace: Trace, settings: str | None, capacity: int) -> bool:
    """Return whether a step runs within the capacity."""
    try:
        _run(trace, settings, capacity)
    except OutOfMemory:
        return False
    return True


def _changed(change: Change, trace: Trace, settings: str | None, capacity: int | None) -> ChangedSequence:
    """Return the peaks of a changed sequence, and whether it fits on the card."""
    timeline = _run(trace, settings)
    fits = None
    if capacity is not None:
        fits = timeline.peak_reserved <= capacity or _fits(trace, settings, capacity)
    return ChangedSequence(change, timeline.peak_allocated, timeline.peak_reserved, fits)
