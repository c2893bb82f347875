"""Compute how the peak of a step grows with its batch: exact lines from two recordings, not a fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from memplan._bytes import format_bytes
from memplan.errors import MemplanError
from memplan.explanation.model import Explanation, Line, Scaling
from memplan.simulation.simulate import simulate
from memplan.simulation.timeline import Timeline
from memplan.trace.record import record_for
from memplan.trace.recording.boundaries import Build
from memplan.trace.recording.session import Target
from memplan.trace.trace import at_least

_MANY_EVENTS = 20_000
"""Above this number of events the second recording runs a single step, to halve its time."""
_TOLERANCE = 0.02
"""Relative distance that the peak at a third batch may have from the line through two."""


def with_scaling(
    explanation: Explanation, batch: int | None, build_at: Callable[[int], Build], target: Target
) -> Explanation:
    """Add the scaling to an explanation: fixed bytes and bytes per sample, from another recording at twice the batch.

    Instead a note is added if the step cannot be recorded at twice the batch; if it runs other kernels there, which
    shows as a negative slope or intercept; or if, from batch 1, batch 3 does not lie on the line through 1 and 2.

    Args:
        batch: its batch size; None or 0 returns the explanation unchanged.
        build_at: returns the build of the step at another batch size.
    """
    if batch is None or batch < 1:
        return explanation
    steps = 1 if len(explanation.timeline.events) > _MANY_EVENTS else 2

    def timeline_at(size: int) -> Timeline:
        """Record and simulate the step at another batch size."""
        return simulate(at_least(record_for(build_at(size), target, steps)))

    try:
        doubled = timeline_at(2 * batch)
        scaling = scaling_of(explanation.timeline, doubled, batch)
        # Many ops have a special case for batch 1, so a line through it is checked at a third batch.
        third = timeline_at(3) if batch == 1 else None
    except MemplanError as error:
        note = f"how the peak grows with the batch is not known: at batch {2 * batch}, {error.found}"
        return replace(explanation, notes=(*explanation.notes, note))
    low, high = map(format_bytes, scaling.peaks)
    if any(line.fixed < 0 or line.per_sample < 0 for line in scaling.lines):
        why = f"at batch {2 * batch} other kernels run ({low} at batch {batch}, {high} at {2 * batch})"
    elif third is not None and not _is_on_lines(third.peak_allocated, scaling, doubled):
        why = (
            f"a batch of 1 is treated apart ({low} at batch 1, {high} at 2, {format_bytes(third.peak_allocated)} at 3)"
        )
    else:
        return replace(explanation, scaling=scaling)
    note = f"how the peak grows with the batch is not known: {why}"
    return replace(explanation, notes=(*explanation.notes, note))


def _is_on_lines(third: int, scaling: Scaling, doubled: Timeline) -> bool:
    """Return whether the peak at batch 3 (``third`` bytes) is about the peak that the scaling predicts.

    ``doubled``: the timeline at batch 2. Like it, the recording at batch 3 may have fewer steps than that at batch 1.
    """
    added_later = scaling.peaks[1] - doubled.peak_allocated
    expected = scaling.peak(3)
    return abs(third + added_later - expected) <= _TOLERANCE * expected


def scaling_of(once: Timeline, twice: Timeline, batch: int) -> Scaling:
    """Return the scaling of a step from its timelines at ``batch`` and at twice that.

    If both have the same events, each moment gives a line (fixed bytes, bytes per sample) through its two levels, and
    the peak at any batch is the upper envelope of these lines. If the events differ (a model that branches on the
    batch), the scaling is the line through the two peaks.
    """
    # ``twice`` can have fewer steps. What later steps add (optimizer state) does not depend on the batch.
    end = once.steps[len(twice.steps) - 1].end
    levels_once = {tick: allocated for tick, allocated, _ in once.events if tick <= end}
    levels_twice = {tick: allocated for tick, allocated, _ in twice.events}
    common_peak = max(once.build.peak_allocated, *(step.peak_allocated for step in once.steps if step.end <= end))
    added_later = once.peak_allocated - common_peak
    peaks = once.peak_allocated, twice.peak_allocated + added_later
    levels = {peaks}  # (bytes at the batch, bytes at twice the batch)
    if levels_once.keys() == levels_twice.keys():
        levels = {(level + added_later, levels_twice[tick] + added_later) for tick, level in levels_once.items()}
    # through (batch, single) and (2 * batch, doubled): its slope, and its bytes at batch 0
    lines = _envelope([((doubled - single) / batch, 2 * single - doubled) for single, doubled in levels])
    current = next(line for line in reversed(lines) if line.batch <= batch)
    return Scaling((batch, 2 * batch), peaks, current.fixed, current.per_sample, tuple(lines))


def _envelope(lines: list[tuple[float, float]]) -> list[Line]:
    """Return the upper envelope, from batch 0 on, of lines (slope, intercept)."""
    envelope: list[Line] = []
    slope, intercept = max(lines, key=lambda line: (line[1], line[0]))  # the highest at batch 0
    start = 0.0
    while True:
        envelope.append(Line(start, intercept, slope))
        # the next line is the first of the steeper lines to cross this; of several at that batch, the steepest
        crossings = [
            ((intercept - other_intercept) / (other_slope - slope), -other_slope, other_intercept)
            for other_slope, other_intercept in lines
            if other_slope > slope
        ]
        if not crossings:
            return envelope
        start, negative_slope, intercept = min(crossings)
        slope = -negative_slope
