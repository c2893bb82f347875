"""How the peak of a step grows with its batch: exact lines from two recordings, not a fit."""

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

_LARGE = 20_000
"""Events from which on the second recording runs one step, to halve its time."""
_NEAR = 0.02
"""How far off, in shares of the peak, a third batch may be from the line through two."""


def scaled(
    explanation: Explanation, batch: int | None, build_at: Callable[[int], Build], target: Target
) -> Explanation:
    """Return the explanation with its fixed part and its part per sample, from one more recording at twice the batch.

    Unchanged where there is no batch; with a note where the step cannot be recorded at twice the batch, or takes other
    kernels there, so that the line through the two would have fewer bytes for a larger batch, or for none; or where a
    third batch does not lie on the line through 1 and 2.
    """
    if batch is None or batch < 1:
        return explanation
    steps = 1 if len(explanation.timeline.events) > _LARGE else 2

    def at(more: int) -> Timeline:
        return simulate(record_for(build_at(more), target, steps), workspace="low")

    try:
        doubled = at(2 * batch)
        scaling = scaling_of(explanation.timeline, doubled, batch)
        # many ops treat a batch of one apart: a line through it is believed where a third batch lies on it
        third = at(3) if batch == 1 else None
    except MemplanError as error:
        note = f"how the peak grows with the batch is not known: at batch {2 * batch}, {error.found}"
        return replace(explanation, notes=(*explanation.notes, note))
    low, high = map(format_bytes, scaling.peaks)
    if any(line.fixed < 0 or line.per_sample < 0 for line in scaling.lines):
        why = f"at batch {2 * batch} other kernels run ({low} at batch {batch}, {high} at {2 * batch})"
    elif third is not None and not _is_near(third.peak_allocated, scaling, doubled):
        why = (
            f"a batch of 1 is treated apart ({low} at batch 1, {high} at 2, {format_bytes(third.peak_allocated)} at 3)"
        )
    else:
        return replace(explanation, scaling=scaling)
    note = f"how the peak grows with the batch is not known: {why}"
    return replace(explanation, notes=(*explanation.notes, note))


def _is_near(third: int, scaling: Scaling, doubled: Timeline) -> bool:
    """Return whether the peak at batch 3 is that of the lines."""
    expected = scaling.peak(3)
    return abs(third + scaling.peaks[1] - doubled.peak_allocated - expected) <= _NEAR * expected


def scaling_of(once: Timeline, twice: Timeline, batch: int) -> Scaling:
    """Return every moment of a step holds a fixed number of bytes and a number per sample; the peak is the largest of
    them.

    Both are known where the two recordings have the same events: each moment gives a line through its two levels, and
    the peak at any batch is the upper envelope of these lines. Where the events differ (a model that takes another
    path at another batch), the one line through the two peaks is all that there is.
    """
    # of a large step one run is enough: what later ones hold more (the optimizer's state) does not depend on the batch
    end = once.steps[len(twice.steps) - 1].end
    events = [event for event in once.events if event[0] <= end]
    more = once.peak_allocated - max(once.build.peak_allocated, *(s.peak_allocated for s in once.steps if s.end <= end))
    if [tick for tick, _, _ in events] == [tick for tick, _, _ in twice.events]:
        levels = {(a + more, b + more) for (_, a, _), (_, b, _) in zip(events, twice.events, strict=True)}
    else:
        levels = {(once.peak_allocated, twice.peak_allocated + more)}
    lines = _envelope([((b - a) / batch, 2 * a - b) for a, b in levels])
    here = next(line for line in reversed(lines) if line.batch <= batch)
    return Scaling(
        (batch, 2 * batch),
        (once.peak_allocated, twice.peak_allocated + more),
        here.fixed,
        here.per_sample,
        tuple(lines),
    )


def _envelope(lines: list[tuple[float, float]]) -> list[Line]:
    """Return the upper envelope, from batch 0 on, of lines given as (slope, level at 0)."""
    hull: list[Line] = []
    slope, level = max(((slope, level) for slope, level in lines), key=lambda line: (line[1], line[0]))
    start = 0.0
    while True:
        hull.append(Line(start, level, slope))
        steeper = [
            ((level - other_level) / (other - slope), -other, other_level)
            for other, other_level in lines
            if other > slope
        ]
        if not steeper:
            return hull
        start, negative, level = min(steeper)
        slope = -negative
