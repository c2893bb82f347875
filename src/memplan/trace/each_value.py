"""What is read in a step, recorded as other values: what the step takes at most."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from textwrap import shorten

from memplan._bytes import format_bytes
from memplan.errors import RecordingError, StepError
from memplan.trace.live_bytes import peak_live_bytes
from memplan.trace.recording.place import format_frame
from memplan.trace.recording.values.readings import Choice, Reading, Taken, Use, Way
from memplan.trace.records import Assumption
from memplan.trace.trace import Trace

Again = Callable[[Way], tuple[Trace | RecordingError | None, Sequence[Choice], Way]]
"""Records the step once more, with these choices taken otherwise; what comes of it, its choices, and which of those
taken otherwise it reached."""

_RECORDINGS = 64
"""Recordings at most for what is read."""
SAME = 1.01
"""Peaks count as the same up to this factor."""


class EachValue:
    """Records a step with what is read taken as other values.

    Args:
        again: records the step once more.
    """

    def __init__(self, again: Again) -> None:
        self._again = again
        self._left = _RECORDINGS
        self._known = dict[Way, tuple[Trace | RecordingError | None, Sequence[Choice], Way]]()

    def that_matter(self, readings: Sequence[Reading], beside: Way, peak: int) -> list[Reading]:
        """Return those of which anything depends; all are taken otherwise at once, since most are only printed.

        Args:
            readings: of the first recording.
            beside: what else is taken otherwise.
            peak: of that way, in bytes.
        """
        for each in zip_longest(*(one.others for one in readings)):
            way = beside.union(one for one in each if one is not None)
            trace, _, reached = self._recorded(way)
            if not isinstance(trace, Trace) or peak_live_bytes(trace.counted) != peak or reached != way:
                return sorted(readings, key=lambda one: -one.use)
        return []

    def of(self, reading: Reading, way: Way, peak: int) -> Tried:
        """Return what comes of taking a reading otherwise, and the choices that are only there then.

        Args:
            reading: what is read.
            way: what else is taken otherwise.
            peak: of that way, in bytes, with the reading at its largest.
        """
        tried = Tried(reading, way, peak)
        for values in (reading.others, reading.all_others if reading.use > Use.SIZE else ()):
            for one in values:
                self._try(tried, one)
            if all(isinstance(one, Trace) and peak_live_bytes(one.counted) == peak for one in tried.found.values()):
                return tried  # it matters in none of them
        by_peak = sorted(tried.peaks, key=lambda one: -tried.peaks[one])
        several = [one for one in by_peak if one is None or len(one.values) == 1]
        if reading.is_few and len(several) > 1:
            for one in reading.in_turn([reading.high if one is None else one.values[0] for one in several]):
                self._try(tried, one)
        return tried

    def _try(self, tried: Tried, one: Taken) -> None:
        tried.cut |= self._left <= 0
        if one not in tried.found and not tried.cut:
            other, choices, reached = self._recorded(tried.way | {one})
            tried.found[one] = None if isinstance(other, Trace) and one not in reached else other
            tried.below[one] = choices

    def _recorded(self, way: Way) -> tuple[Trace | RecordingError | None, Sequence[Choice], Way]:
        if way not in self._known:
            self._left -= 1
            self._known[way] = self._again(way)
        return self._known[way]


@dataclass
class Tried:
    """What comes of taking a reading otherwise."""

    reading: Reading
    way: Way
    peak: int
    """Of the way with the reading at its largest, in bytes."""
    found: dict[Taken, Trace | RecordingError | None] = field(default_factory=dict)
    """None: the step did not read it there."""
    below: dict[Taken, Sequence[Choice]] = field(default_factory=dict)
    """Choices of these recordings."""
    cut: bool = False
    """Whether there were too many recordings to take it as all that it can be."""

    @property
    def peaks(self) -> dict[Taken | None, int]:
        """Return the peak of each way that ran, in bytes; None: with the reading at its largest."""
        found = {one: peak_live_bytes(trace.counted) for one, trace in self.found.items() if isinstance(trace, Trace)}
        return {None: self.peak, **found}

    def row(self, shown: Way, steps: int) -> Assumption | None:
        """Return what has to be said of the reading; None where there is nothing.

        Args:
            shown: the way that is shown.
            steps: how many were recorded.
        """
        reading, is_shown = self.reading, not shown.isdisjoint(self.found)
        if reading.use <= Use.COMPARED and not is_shown:  # what is followed of it has been said
            return None
        text = self._not_bounded() or self._compared(is_shown, reading.times // steps)
        where = format_frame(reading.site.line)
        return sampled(reading) if text is None else Assumption("bound", text, where)

    def _not_bounded(self) -> str | None:
        """Return what has to be said of values that were not recorded, or of which no peak came."""
        if self.cut or not self.found:
            return _UNTRIED.format(end=self._end(None))
        failed = {one: error for one, error in self.found.items() if not isinstance(error, Trace)}
        if self.reading.is_few:  # such values end the step when it really runs, too
            failed = {one: error for one, error in failed.items() if type(error) is not StepError}
        for one, error in failed.items():
            how = shorten(error.found, 120, placeholder=" ...") if error is not None else "was not recorded"
            return _NO_SMALLEST.format(end=self._end(None), other=self._end(one), how=how)
        return None

    def _compared(self, is_shown: bool, times: int) -> str | None:
        """Return what ways of taking it take; ``times``: how often it is read in a step, where each can be another."""
        reading, peaks = self.reading, self.peaks
        most, least = max(peaks, key=lambda one: peaks[one]), min(peaks, key=lambda one: peaks[one])
        of_many = reading.use in (Use.KEPT, Use.CHOOSES) and not reading.is_few
        in_turn = times > 1 and (of_many or reading.is_few) and peaks[most] > peaks[least]
        if peaks[most] <= SAME * peaks[least] and not is_shown and not in_turn:
            return None
        said = _END.format(
            end=self._end(most), most=format_bytes(peaks[most]), less=format_bytes(peaks[least]), other=self._end(least)
        )
        said += _CHOOSES.format(low=reading.low, high=reading.high) if of_many else ""
        return said + _ORDERS.format(times=times) if in_turn else said

    def _end(self, taken: Taken | None) -> str:
        """Return how a reading is taken; None: at its largest."""
        ends = self.reading.site.ends or _ENDS
        if taken is None:
            return ends[0]
        if taken.values in ((), (self.reading.low,)):
            return ends[1]
        return f"as {taken.values[0]:g}" if len(taken.values) == 1 else "as one value after the other"


def sampled(reading: Reading) -> Assumption | None:
    """Return what has to be said of a reading of which nothing depended where it was taken otherwise."""
    if reading.use is not Use.CHOOSES or reading.is_few:
        return None
    text = _SAMPLED.format(low=reading.low, high=reading.high, times=len(reading.others))
    return Assumption("scalar", text, format_frame(reading.site.line))


_SAMPLED = (
    "a number that is read, from {low} to {high}, is written as text or looked up: the peak is the same with {times} "
    "others of these, and the rest was not recorded"
)
_ENDS = ("as the largest it can be", "as the smallest")
_END = "a value that is read decides sizes: taken {end}, the step takes {most}, {other} {less}"
_CHOOSES = "; it is from {low} to {high}, MAY CHOOSE what is used, and what other values choose IS NOT BOUNDED"
_ORDERS = "; it is read {times} times in a step, and what other orders of its values take IS NOT BOUNDED"
_NO_SMALLEST = "a value that is read is taken {end}, and what shrinks as it grows IS NOT BOUNDED: {other}, {how}"
_UNTRIED = "a value that is read is taken {end}: what shrinks as it grows IS NOT BOUNDED"
