"""Records a step again with other branches and other values of scalar reads, to find the trace with the largest peak.

In the first recording, scalar reads of known range return the largest possible value (`ScalarPolicy`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from textwrap import shorten
from typing import NamedTuple

from memplan._bytes import format_bytes
from memplan.errors import EndlessError, RecordingError
from memplan.trace.live_bytes import peak_live_bytes
from memplan.trace.recording.place import Line, format_frame
from memplan.trace.recording.symbolic_scalars import Choice, Decisions, Overrides
from memplan.trace.records import Assumption
from memplan.trace.trace import Trace

_MAX_RECORDINGS = 8
"""Most further recordings. The assumptions report the choices that were not explored."""
_SAME = 1.01
"""Peaks that differ by at most this factor count as equal."""


class Recorded(NamedTuple):
    """A recording of the step."""

    outcome: Trace | RecordingError | None
    overrides: Overrides
    decisions: Decisions

    @property
    def peak(self) -> int:
        """Return the recording's peak in bytes; 0 if the step raised."""
        return peak_live_bytes(self.outcome.counted) if isinstance(self.outcome, Trace) else 0

    @property
    def bytes(self) -> int:
        """Return the bytes of all of the recording's storages; 0 if the step raised."""
        return sum(storage.bytes for storage in self.outcome.storages) if isinstance(self.outcome, Trace) else 0

    def reaches(self, choice: Choice) -> bool:
        """Return whether the recorded step ran the line of a choice."""
        lines = self.decisions.branches if choice.kind == "branch" else self.decisions.reads
        return isinstance(self.outcome, Trace) and choice.line in lines


def explore_branches(
    first: Recorded, record_again: Callable[[Overrides], Recorded], has_time: Callable[[], bool] = lambda: True
) -> Trace:
    """Record a step again with other values and branches, and return the trace with the largest peak. Its assumptions
    compare the outcomes of each choice.

    ``record_again`` records the step under overrides; ``has_time`` returns whether it may be called once more.
    """
    exploration = _Exploration(first, record_again, has_time)
    exploration.run()
    return exploration.result()


class _Exploration:
    """Overrides a recording's choices one after the other, on top of the overrides with the largest peak so far."""

    def __init__(
        self, first: Recorded, record_again: Callable[[Overrides], Recorded], has_time: Callable[[], bool]
    ) -> None:
        """Begin with the first recording. ``record_again`` records the step under overrides; ``has_time`` returns
        whether it may be called once more."""
        assert isinstance(first.outcome, Trace)
        self._has_time = has_time
        self._record_again = record_again
        self._first = self._best = first
        """The first recording, and the one with the largest peak so far."""
        self._trace = first.outcome
        """Trace of the best recording."""
        self._recorded = {first.overrides: first}
        """Overrides -> the recording under them."""
        self._first_reached_in: dict[Choice, Recorded] = {}
        """Choice -> the first recording that reached it."""
        self._tried: dict[Choice, tuple[Recorded, Recorded]] = {}
        """Explored choice -> the recordings without and with its override."""
        self._without_effect: set[Choice] = set()
        """Scalar reads whose other values need no more memory."""

    def run(self) -> None:
        """Override all scalar reads at once, since most are only logged; then each branch; then each scalar read that
        has an effect on memory."""
        queue = self._new_choices(self._first)
        # all reads return their smallest value; then all return the values of their range in turn
        for kind in ("other value", "in turn"):
            reads = [choice for choice in queue if choice.kind == kind]
            other = self._record(self._first.overrides ^ frozenset(reads)) if reads else None
            if other is not None and other.peak == self._first.peak and all(map(other.reaches, reads)):
                # without a known range, another value proves no effect only if all storages have the same bytes
                ranges, same_bytes = self._first.decisions.reads, other.bytes == self._first.bytes
                self._without_effect.update(choice for choice in reads if same_bytes or ranges[choice.line].bounded)
        queue.sort(key=lambda choice: choice.kind != "branch")  # branches first
        while queue:
            choice = queue.pop(0)
            if choice not in self._without_effect:
                queue += self._try(choice)

    def _new_choices(self, recorded: Recorded) -> list[Choice]:
        """Return the choices of a recording that no earlier recording reached, and note the recording for each.

        A scalar read can return the values of its range "in turn" if they are integers, the range is always the same,
        and the line reads more than once per step.
        """
        if not isinstance(recorded.outcome, Trace):
            return []
        (branches, reads), steps = recorded.decisions, len(recorded.outcome.steps)
        choices = [Choice(line, "branch") for line in branches]
        choices += [Choice(line, "other value") for line in reads]
        for line, read in reads.items():
            if read.bounded and read.alike and isinstance(read.value, int) and read.times > steps:
                choices.append(Choice(line, "in turn"))
        overridden = {choice for choice in recorded.overrides if choice.kind == "branch"}
        new = [choice for choice in choices if choice not in self._first_reached_in and choice not in overridden]
        for choice in new:
            self._first_reached_in[choice] = recorded
        return new

    def _try(self, choice: Choice) -> list[Choice]:
        """Record the step with a choice overridden, in addition to the overrides of the best recording that reaches it.
        Returns the choices that no earlier recording reached."""
        base = self._best if self._best.reaches(choice) else self._first_reached_in[choice]
        other = self._record(base.overrides ^ {choice})
        if other is None:
            return []
        self._tried[choice] = base, other
        return self._new_choices(other)

    def _record(self, overrides: Overrides) -> Recorded | None:
        """Record the step under these overrides, and note it if its peak is the highest. None if recordings or time are
        used up."""
        if overrides not in self._recorded:
            if len(self._recorded) > _MAX_RECORDINGS or not self._has_time():
                return None
            other = self._recorded[overrides] = self._record_again(overrides)
            if isinstance(other.outcome, Trace):
                # at about equal peaks, the trace with more steps is the better
                steps, best_steps = len(other.outcome.steps), len(self._trace.steps)
                peak = other.peak * (_SAME if steps > best_steps else 1)
                if peak > self._best.peak * (_SAME if steps < best_steps else 1):
                    self._best, self._trace = other, other.outcome
        return self._recorded[overrides]

    def result(self) -> Trace:
        """Return the trace with the largest peak, with the assumptions about all choices."""
        branches = [choice for choice in self._first_reached_in if choice.kind == "branch"]
        read_lines = dict.fromkeys(choice.line for choice in self._first_reached_in if choice.kind != "branch")
        rows = [*(self._branch_row(choice) for choice in branches), *(self._read_row(line) for line in read_lines)]
        at_branches = {format_frame(choice.line) for choice in branches}
        others = [row for row in self._trace.assumptions if row.where not in at_branches or not _is_of_branch(row)]
        assumptions = (*(row for row in rows if row is not None), *others)
        ordered = sorted(assumptions, key=lambda row: row.kind not in ("branch", "bound"))
        return replace(self._trace, assumptions=tuple(ordered))

    def _branch_row(self, choice: Choice) -> Assumption:
        """Return the Assumption to report for a branch: whether both directions were recorded, and their peaks."""
        where = format_frame(choice.line)
        base, other = self._tried.get(choice, (None, None))
        if base is None or other is None or (isinstance(other.outcome, Trace) and not other.reaches(choice)):
            return Assumption("branch", _ONE_WAY, where)
        if isinstance(other.outcome, EndlessError):
            return Assumption("branch", _ENDLESS, where)
        if isinstance(other.outcome, RecordingError):
            return Assumption("scalar", _ENDS.format(how=shorten(other.outcome.found, 120, placeholder=" ...")), where)
        least, most = sorted((base.peak, other.peak))
        is_same = most <= _SAME * least
        text = (_SAME_PEAK if is_same else _DIFFER).format(most=format_bytes(most), least=format_bytes(least))
        times = self._first_reached_in[choice].decisions.branches[choice.line] // len(self._trace.steps)
        if times > 1:  # iterations that go different directions in the same step were not recorded
            text += _ROUNDS.format(times=times)
        if is_same:
            return Assumption("scalar", text, where)
        return Assumption("branch" if times > 1 else "bound", text, where)

    def _read_row(self, line: Line) -> Assumption | None:
        """Return the Assumption to report for the scalar reads of a line, or None if the peak does not depend on it.

        It names the values with the largest and the smallest peak; or that other values were not recorded, or raised.
        """
        choices = (Choice(line, "other value"), Choice(line, "in turn"))
        relevant = [choice for choice in choices if choice in self._first_reached_in.keys() - self._without_effect]
        if not relevant:
            return None
        where, read = format_frame(line), self._first_reached_in[relevant[0]].decisions.reads[line]
        # of each choice, first the recording without its override, with the largest value
        recordings = [recorded for choice in relevant for recorded in self._tried.get(choice, ())]
        by_value = {_value_text(line, recorded.overrides): recorded for recorded in recordings}
        peaks = {value: recorded.peak for value, recorded in by_value.items() if isinstance(recorded.outcome, Trace)}
        if not read.bounded:
            changes = len({recorded.bytes for recorded in by_value.values() if recorded.peak}) != 1
            return Assumption("branch", _UNBOUNDED.format(value=read.value), where) if changes else None
        for value, recorded in by_value.items():
            if isinstance(recorded.outcome, RecordingError):
                how = shorten(recorded.outcome.found, 120, placeholder=" ...")
                return Assumption("bound", _RAISED.format(end=next(iter(peaks)), other=value, how=how), where)
        if any(choice not in self._tried for choice in relevant):
            return Assumption("bound", _UNTRIED, where)
        most, least = max(peaks, key=lambda value: peaks[value]), min(peaks, key=lambda value: peaks[value])
        if peaks[most] <= _SAME * peaks[least]:
            return None
        sizes = {"most": format_bytes(peaks[most]), "less": format_bytes(peaks[least])}
        text = _SIZES.format(end=most, other=least, **sizes)
        reads_per_step = read.times // len(self._trace.steps)
        if reads_per_step > 1:
            text += _MIXED.format(times=reads_per_step)
        return Assumption("bound", text, where)


_ENDS = "a value decides a branch: the other way {how}"
_ENDLESS = "a value DECIDES WHETHER A LOOP GOES ON, which was recorded as it ends: what more rounds take IS NOT BOUNDED"
_SAME_PEAK = "a value decides a branch: the peak is the same either way ({most})"
_ONE_WAY = "a value DECIDES A BRANCH, which was recorded one way only: what the other way takes IS NOT BOUNDED"
_ROUNDS = "; it is decided {times} times in a step, which are all taken to go the same way"
_DIFFER = "a value decides a branch: one way the step takes {most}, the other way {least}; what takes more is shown"
_SIZES = (
    "a value that is read decides sizes: taken {end}, the step takes {most}, {other} {less}; "
    "values between the smallest and the largest were not recorded"
)
_MIXED = "; it is read {times} times in a step, and what other orders of its values take IS NOT BOUNDED"
_RAISED = "a value that is read is taken {end}, and what others take IS NOT BOUNDED: {other}, {how}"
_UNTRIED = "a value that is read is taken as the largest it can be: what smaller ones take IS NOT BOUNDED"
_UNBOUNDED = "a value of unknown range that is read decides sizes: it is taken as {value}, and others ARE NOT BOUNDED"


def _value_text(line: Line, overrides: Overrides) -> str:
    """Return how a message names the value that the scalar reads of a line return under overrides."""
    if Choice(line, "in turn") in overrides:
        return "as one value after the other"
    return "as the smallest" if Choice(line, "other value") in overrides else "as the largest it can be"


def _is_of_branch(assumption: Assumption) -> bool:
    """Return whether a recording's Assumption is about a branch, which the exploration reports in its own words."""
    return assumption.kind == "branch" or "decided a branch" in assumption.text
