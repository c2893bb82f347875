"""Records a step with other values of the scalars that it reads, to bound its memory."""

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
"""Records the step again with these overrides -> (trace or error, its choices, the overrides that took effect)."""

_MAX_RECORDINGS = 64
"""Recordings at most, over all scalar reads."""
SAME = 1.01
"""Peaks that differ by at most this factor count as equal."""


class EachValue:
    """Records a step with overrides for the scalars that it reads, each set of overrides once."""

    def __init__(self, again: Again) -> None:
        self._again = again
        self._left = _MAX_RECORDINGS
        self._known = dict[Way, tuple[Trace | RecordingError | None, Sequence[Choice], Way]]()

    def that_matter(self, reads: Sequence[Reading], base: Way, peak: int) -> list[Reading]:
        """Return all of the scalar reads if any changes the peak, else none.

        All are overridden at once, since most are only printed.

        Args:
            reads: of the first recording.
            base: overrides of everything else.
            peak: with ``base`` alone, in bytes.
        """
        for values in zip_longest(*(read.others for read in reads)):
            overrides = base.union(value for value in values if value is not None)
            trace, _, effective = self._record(overrides)
            if not isinstance(trace, Trace) or peak_live_bytes(trace.counted) != peak or effective != overrides:
                return sorted(reads, key=lambda read: -read.use)
        return []

    def of(self, read: Reading, base: Way, peak: int) -> Tried:
        """Record the step with the other values of a scalar read.

        Args:
            read: the scalar read.
            base: overrides of everything else.
            peak: with the read at its largest, in bytes.
        """
        tried = Tried(read, base, peak)
        for values in (read.others, read.all_others if read.use > Use.SIZE else ()):
            for value in values:
                self._try(tried, value)
            traces = tried.outcomes.values()
            if all(isinstance(trace, Trace) and peak_live_bytes(trace.counted) == peak for trace in traces):
                return tried  # the value does not matter
        by_peak = sorted(tried.peaks, key=lambda value: -tried.peaks[value])
        single = [value for value in by_peak if value is None or len(value.values) == 1]
        if read.is_few and len(single) > 1:
            numbers = [read.high if value is None else value.values[0] for value in single]
            for value in read.in_turn(numbers):
                self._try(tried, value)
        return tried

    def _try(self, tried: Tried, value: Taken) -> None:
        tried.cut |= self._left <= 0
        if value not in tried.outcomes and not tried.cut:
            outcome, choices, effective = self._record(tried.base | {value})
            tried.outcomes[value] = None if isinstance(outcome, Trace) and value not in effective else outcome
            tried.choices[value] = choices

    def _record(self, overrides: Way) -> tuple[Trace | RecordingError | None, Sequence[Choice], Way]:
        if overrides not in self._known:
            self._left -= 1
            self._known[overrides] = self._again(overrides)
        return self._known[overrides]


@dataclass
class Tried:
    """The recordings of a step with other values of a scalar read."""

    read: Reading
    base: Way
    """Overrides of everything else."""
    peak: int
    """With the read at its largest, in bytes."""
    outcomes: dict[Taken, Trace | RecordingError | None] = field(default_factory=dict)
    """None: the step did not reach the read."""
    choices: dict[Taken, Sequence[Choice]] = field(default_factory=dict)
    """Choices of these recordings."""
    cut: bool = False
    """Whether `_MAX_RECORDINGS` left values untried."""

    @property
    def peaks(self) -> dict[Taken | None, int]:
        """Return the peak of each recording, in bytes; None: with the read at its largest."""
        traces = {value: trace for value, trace in self.outcomes.items() if isinstance(trace, Trace)}
        return {None: self.peak, **{value: peak_live_bytes(trace.counted) for value, trace in traces.items()}}

    def row(self, shown: Way, steps: int) -> Assumption | None:
        """Return the Assumption to report for this scalar read, or None.

        Args:
            shown: overrides of the trace that the user sees.
            steps: recorded steps.
        """
        read, is_shown = self.read, not shown.isdisjoint(self.outcomes)
        if read.use <= Use.COMPARED and not is_shown:  # its size or branch has an assumption already
            return None
        text = self._unbounded_text() or self._comparison_text(is_shown, read.times // steps)
        return sampled(read) if text is None else Assumption("bound", text, format_frame(read.site.line))

    def _unbounded_text(self) -> str | None:
        """Return the text for values that were not recorded or whose recording failed, or None."""
        if self.cut or not self.outcomes:
            return _UNTRIED.format(end=self._value_text(None))
        failed = {value: error for value, error in self.outcomes.items() if not isinstance(error, Trace)}
        if self.read.is_few:  # values that raise here raise in the real step, too
            failed = {value: error for value, error in failed.items() if type(error) is not StepError}
        for value, error in failed.items():
            how = shorten(error.found, 120, placeholder=" ...") if error is not None else "was not recorded"
            return _NO_SMALLEST.format(end=self._value_text(None), other=self._value_text(value), how=how)
        return None

    def _comparison_text(self, is_shown: bool, times: int) -> str | None:
        """Return the text that compares the largest and the smallest peak, or None if they are equal.

        ``times``: reads per step, each of which may give another value.
        """
        read, peaks = self.read, self.peaks
        most, least = max(peaks, key=lambda value: peaks[value]), min(peaks, key=lambda value: peaks[value])
        is_sampled = read.use in (Use.KEPT, Use.CHOOSES) and not read.is_few
        order_matters = times > 1 and (is_sampled or read.is_few) and peaks[most] > peaks[least]
        if peaks[most] <= SAME * peaks[least] and not is_shown and not order_matters:
            return None
        text = _END.format(
            end=self._value_text(most), most=format_bytes(peaks[most]),
            less=format_bytes(peaks[least]), other=self._value_text(least),
        )  # fmt: skip
        text += _CHOOSES.format(low=read.low, high=read.high) if is_sampled else ""
        return text + _ORDERS.format(times=times) if order_matters else text

    def _value_text(self, value: Taken | None) -> str:
        """Return "as the largest it can be" (for None), "as the smallest", "as 3", ..."""
        ends = self.read.site.ends or _ENDS
        if value is None:
            return ends[0]
        if value.values in ((), (self.read.low,)):
            return ends[1]
        return f"as {value.values[0]:g}" if len(value.values) == 1 else "as one value after the other"


def sampled(read: Reading) -> Assumption | None:
    """Return the Assumption for a scalar read that did not change the peak but had too many values to try all."""
    if read.use is not Use.CHOOSES or read.is_few:
        return None
    text = _SAMPLED.format(low=read.low, high=read.high, times=len(read.others))
    return Assumption("scalar", text, format_frame(read.site.line))


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
