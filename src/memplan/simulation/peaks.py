"""The peaks of a timeline: over all, and of each step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from memplan.simulation.timeline import AllocatorEvent, Segment, StepPeak, Timeline

Level = tuple[int, int, int]
"""(tick, allocated, reserved)."""


def timeline_of(
    device: str,
    events: Sequence[Level],
    bounds: Sequence[int],
    log: tuple[AllocatorEvent, ...] = (),
    segments: tuple[Segment, ...] = (),
) -> Timeline:
    """Return a Timeline of levels after each event; ``bounds`` are 0, the ticks at which steps begin, and the last
    tick."""
    peaks = _peaks(events, bounds)
    top = max(peaks, key=lambda peak: peak.peak_allocated)
    levels = {tick: allocated for tick, allocated, _ in events}
    reserved = max(peaks, key=lambda peak: (peak.peak_reserved, levels.get(peak.reserved_tick, 0)))
    return Timeline(
        device,
        tuple(events),
        peaks[0],
        tuple(peaks[1:]),
        top.peak_allocated,
        reserved.peak_reserved,
        top.peak_tick,
        reserved.reserved_tick,
        log,
        segments,
    )


def _peaks(events: Sequence[Level], bounds: Sequence[int]) -> list[StepPeak]:
    """Return the peak between each two bounds; what is held when a step begins counts for it."""
    peaks: list[StepPeak] = []
    position, allocated, reserved = 0, 0, 0
    for start, end in pairwise(bounds):
        most, most_tick = allocated, start
        held, beside, held_tick = (
            reserved,
            allocated,
            start,
        )  # reserved bytes seldom fall: where the most is used of them
        while position < len(events) and events[position][0] <= end:
            tick, allocated, reserved = events[position]
            if allocated > most:
                most, most_tick = allocated, tick
            if (reserved, allocated) > (held, beside):
                held, beside, held_tick = reserved, allocated, tick
            position += 1
        peaks.append(StepPeak(start, end, most, held, most_tick, held_tick))
    return peaks
