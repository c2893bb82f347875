"""Memory of a step on each card of the catalogue, and the largest batch or sequence that fits it (``--device all``).

Cards with the same kernels and workspaces (`Trace.alike`) share a recording.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from memplan._json import Saved
from memplan.devices import Device, find
from memplan.errors import InputError, MemplanError
from memplan.explanation.card import verdicts_on
from memplan.explanation.model import Verdict
from memplan.studies.axes.axes import axis_of, without_data
from memplan.studies.axes.subject import Subject
from memplan.studies.capacity.extrapolation import Sample, extrapolate_need
from memplan.studies.sweeps.points import record_trace
from memplan.trace.recording.session import Target
from memplan.trace.trace import Trace

_FIRST = {"batch": 1, "sequence": 128}
"""Axis -> smallest value to try."""
_MOST = {"batch": 1 << 16, "sequence": 1 << 20}
_GUESSES = 4
"""Extrapolated values to try on a card before the search bisects."""

TargetOf = Callable[[Device], Target]
"""Returns the target of a recording for a card."""
Progress = Callable[[str], None]


@dataclass(frozen=True)
class CardRow:
    """A step on a card: as it is, or at the largest value that fits. Sizes are bytes."""

    name: str
    capacity: int
    fits: bool
    peak: int
    """Allocated peak at ``value``, or at the smallest value if none fits."""
    need: int
    """Reserved peak and CUDA context at the same value."""
    value: int | None = None
    """Largest value that fits, 0 if none does; None for a step as it is."""
    end: int | None = None
    """Next value, which does not fit; None if ``value`` is the last value, or 0."""
    end_peak: int | None = None
    """Allocated peak at ``end``; None if it cannot be recorded."""


@dataclass(frozen=True)
class OnCards(Saved):
    """A row for each card, the smallest card first."""

    FORMAT: ClassVar[str] = "memplan.on_cards"

    title: str
    axis: str
    """Axis of the values; empty for a step as it is."""
    rows: tuple[CardRow, ...]
    recordings: int
    """Number of recordings behind the rows."""
    failed: str = ""
    """Smallest value that cannot be recorded, and why; empty if all could."""


def step_on_cards(
    subject: Subject, cards: Sequence[Device], target_of: TargetOf, settings: str | None = None,
    progress: Progress = lambda text: None,
) -> OnCards:  # fmt: skip
    """Return the memory of a step on each card. Raises MemplanError if the step cannot be recorded."""

    def record(value: int, target: Target) -> Trace:
        progress(f"on {target.name}")
        return record_trace(subject, target)

    recorder = _Recorder(record, target_of, settings)
    rows: list[CardRow] = []
    for card in _by_capacity(cards):
        peak, verdict = recorder.on(card, value=0)  # 0: the step as it is
        rows.append(CardRow(card.name, card.capacity, verdict.answer == "fits", peak, verdict.high))
    return OnCards(subject.title, axis="", rows=tuple(rows), recordings=recorder.recordings)


def largest_on_cards(
    subject: Subject, name: str, cards: Sequence[Device], target_of: TargetOf, *, most: int | None = None,
    settings: str | None = None, progress: Progress = lambda text: None,
) -> OnCards:  # fmt: skip
    """Return the largest of `tried_values` of an axis that fits each card. Larger values are assumed not to fit.

    It and the next value are recorded, for the card or a card with the same kernels.

    Raises:
        InputError: another axis than batch or sequence, or the step has no such axis.
        MemplanError: the smallest value cannot be recorded.
    """
    if name not in _FIRST:
        raise InputError(f"--axis {name} with --device all", expected="batch or sequence", do="Name one of them")
    axis, subject = axis_of(name, subject), without_data(subject)
    values = tried_values(name, most)
    axis.at(subject, values[0])  # raises where the step has no such axis

    def record(value: int, target: Target) -> Trace:
        progress(f"{name} {value} on {target.name}")
        return record_trace(axis.at(subject, value), target)

    recorder = _Recorder(record, target_of, settings)
    rows: list[CardRow] = []
    samples: list[Sample] = []
    for card in _by_capacity(cards):
        rows.append(_largest_on(card, values, recorder, samples))
        samples = recorder.samples(card)
    failed = recorder.failed
    reason = "" if failed is None else f"{name} {failed[0]} cannot be recorded: {failed[1].found}"
    return OnCards(subject.title, name, tuple(rows), recorder.recordings, reason)


def tried_values(axis: str, most: int | None = None) -> list[int]:
    """Return powers of two times 1, 1.25, 1.5 and 1.75, from a batch of 1 or a sequence of 128, up to and with
    ``most``.

    Example:
        >>> tried_values("batch", 11)
        [1, 2, 3, 4, 5, 6, 7, 8, 10, 11]
    """
    first, last = _FIRST[axis], _MOST[axis] if most is None else most
    powers = [first << exponent for exponent in range(last.bit_length())]
    steps = {power * quarters // 4 for power in powers for quarters in (4, 5, 6, 7)}
    return sorted({value for value in steps if value < last} | {last})


def _by_capacity(cards: Sequence[Device]) -> list[Device]:
    return sorted(cards, key=lambda card: (card.capacity, card.name))


class _Recorder:
    """Records values for cards, each once, and keeps the verdicts."""

    def __init__(self, record: Callable[[int, Target], Trace], target_of: TargetOf, settings: str | None) -> None:
        """``record(value, target)`` records the step at a value of the axis; ``target_of`` returns the target of a
        card."""
        self._record = record
        self._target_of = target_of
        self._settings = settings
        self._known: dict[str, dict[int, tuple[int, Verdict]]] = {}
        """Card -> value -> (allocated peak, verdict)."""
        self.recordings = 0
        """How many steps were recorded."""
        self.failed: tuple[int, MemplanError] | None = None
        """Smallest value that cannot be recorded, and its error."""

    def on(self, card: Device, value: int) -> tuple[int, Verdict]:
        """Return the allocated peak of a value, and its verdict on a card. Raises MemplanError if it cannot be
        recorded."""
        known = self._known.setdefault(card.name, {})
        if value not in known:
            if self.failed is not None and value >= self.failed[0]:
                raise self.failed[1]
            self.recordings += 1
            try:
                trace = self._record(value, self._target_of(card))
            except MemplanError as error:
                self.failed = value, error
                raise
            cards = [card, *map(find, trace.alike)]  # with the same kernels
            peak, verdicts = verdicts_on(trace, cards, self._settings)
            for verdict in verdicts:
                self._known.setdefault(verdict.device, {})[value] = peak, verdict
        return known[value]

    def samples(self, card: Device) -> list[Sample]:
        """Return the values recorded for a card, each with a lower bound of its need: allocated peak and CUDA
        context."""
        return [
            Sample(position=value, measure=value, need=peak + card.context[0], fits=verdict.answer == "fits")
            for value, (peak, verdict) in self._known.get(card.name, {}).items()
        ]


def _largest_on(card: Device, values: list[int], recorder: _Recorder, others: list[Sample]) -> CardRow:
    """Search for the largest of ``values`` that fits a card. ``others``: recordings for the card before it."""

    def fits(index: int) -> bool:
        """Return whether a value can be recorded and fits. Raises the error of a step that fails at the smallest."""
        try:
            return recorder.on(card, values[index])[1].answer == "fits"
        except MemplanError:
            if recorder.failed is None or recorder.failed[0] <= values[0]:
                raise
            return False

    low, high = -1, len(values)  # indices: ``low`` fits, ``high`` does not
    for sample in recorder.samples(card):
        if sample.fits:
            low = max(low, values.index(sample.position))
        else:
            high = min(high, values.index(sample.position))
    guesses = 0
    while high - low > 1:
        of_card = recorder.samples(card)
        index = None
        if guesses < _GUESSES:
            index = _guess(of_card if len(of_card) > 1 else others, values, card.capacity)
        if index is None:  # without a guess: the smallest value first if nothing is known, else the middle
            begins = not of_card and not any(sample.fits for sample in others)
            index = 0 if begins else (low + high) // 2
        guesses += 1
        index = min(max(index, low + 1), high - 1)
        low, high = (index, high) if fits(index) else (low, index)
    peak, verdict = recorder.on(card, values[max(low, 0)])
    row = CardRow(card.name, card.capacity, low >= 0, peak, verdict.high, values[low] if low >= 0 else 0)
    if low < 0 or high == len(values):
        return row
    failed = recorder.failed is not None and recorder.failed[0] <= values[high]
    return replace(row, end=values[high], end_peak=None if failed else recorder.on(card, values[high])[0])


def _guess(samples: list[Sample], values: list[int], capacity: int) -> int | None:
    """Return the index of the last of ``values`` that fits ``capacity`` bytes by extrapolation; None with one sample or
    none."""
    if len(samples) < 2:
        return None
    nearest_last = sorted(samples, key=lambda sample: -abs(sample.need - capacity))
    predicted = extrapolate_need(nearest_last, capacity, float)
    return None if predicted is None else sum(value <= predicted for value in values) - 1
