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
        device: its name.
        events: (tick, allocated, reserved), in bytes.
        bounds: 0, the ticks at which steps begin, and the last tick.
        log: all events of the caching allocator.
        segments: its segments at the end.
    """
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
    """Return the peak between consecutive bounds. The level when a step begins counts for that step.

    Reserved bytes seldom fall, so their tick is the first at which the most of the peak is allocated.
    """
    peaks: list[StepPeak] = []
    position, allocated, reserved = 0, 0, 0
    for start, end in pairwise(bounds):
        peak_allocated, peak_tick = allocated, start
        peak_reserved, allocated_then, reserved_tick = reserved, allocated, start
        while position < len(events) and events[position][0] <= end:
            tick, allocated, reserved = events[position]
            if allocated > peak_allocated:
                peak_allocated, peak_tick = allocated, tick
            if (reserved, allocated) > (peak_reserved, allocated_then):
                peak_reserved, allocated_then, reserved_tick = reserved, allocated, tick
            position += 1
        peaks.append(StepPeak(start, end, peak_allocated, peak_reserved, peak_tick, reserved_tick))
    return peaks
