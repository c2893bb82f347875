"""Build a `Timeline` with its peaks, overall and of each step."""

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
    """Return the timeline of ``events``, the levels after each event in order.

    Args:
        events: (tick, allocated, reserved), in bytes.
        bounds: 0, the ticks at which steps begin, and the last tick.
    """
    peaks = _peaks(events, bounds)
    highest = max(peaks, key=lambda peak: peak.peak_allocated)
    levels = {tick: allocated for tick, allocated, _ in events}
    most_reserved = max(peaks, key=lambda peak: (peak.peak_reserved, levels.get(peak.reserved_tick, 0)))
    return Timeline(
        device,
        tuple(events),
        build=peaks[0],
        steps=tuple(peaks[1:]),
        peak_allocated=highest.peak_allocated,
        peak_reserved=most_reserved.peak_reserved,
        peak_tick=highest.peak_tick,
        reserved_tick=most_reserved.reserved_tick,
        log=log,
        segments=segments,
    )


def _peaks(events: Sequence[Level], bounds: Sequence[int]) -> list[StepPeak]:
    """Return the peak between consecutive bounds. The level when a step begins counts for that step.

    Reserved bytes seldom fall, so the tick of their peak is the one at which the most is allocated, the first of these.
    """
    peaks: list[StepPeak] = []
    index, allocated, reserved = 0, 0, 0  # index of the next event; bytes after the last
    for start, end in pairwise(bounds):
        peak_allocated, peak_tick = allocated, start
        peak_reserved, allocated_then, reserved_tick = reserved, allocated, start
        while index < len(events) and events[index][0] <= end:
            tick, allocated, reserved = events[index]
            if allocated > peak_allocated:
                peak_allocated, peak_tick = allocated, tick
            if (reserved, allocated) > (peak_reserved, allocated_then):
                peak_reserved, allocated_then, reserved_tick = reserved, allocated, tick
            index += 1
        peaks.append(StepPeak(start, end, peak_allocated, peak_reserved, peak_tick, reserved_tick))
    return peaks
