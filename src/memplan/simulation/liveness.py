"""Trace -> Timeline: how many bytes are live after every event of the allocator."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

from memplan.errors import UsageError
from memplan.simulation.model import StepPeak, Timeline
from memplan.trace.model import Storage, Trace


def simulate(
    trace: Trace, *, settings: str | None = None, workspace: Literal["low", "high", "measured"] = "high"
) -> Timeline:
    """Bytes live over build and all steps of a trace.

    On the CPU bytes are as requested: torch's CPU allocator neither rounds nor caches, so ``reserved`` equals
    ``allocated``, and ``workspace`` (the case of an interval to take) makes no difference.

    Raises:
        UsageError: ``settings`` (of the CUDA caching allocator) for a device that has none.

    Example:
        >>> memplan.simulate(memplan.record(build)).peak_allocated
        1932735283
    """
    if settings is not None:
        raise UsageError(
            f"allocator settings {settings!r} for device {trace.device!r}",
            expected="settings only for a device with a caching allocator; the CPU has none",
            do="Leave settings out.",
        )
    if workspace not in ("low", "high", "measured"):
        raise UsageError(f"workspace {workspace!r}", expected="'low', 'high' or 'measured'", do="Choose one of these.")
    changes = _changes(trace.storages)
    events: list[tuple[int, int, int]] = []
    level = 0
    for tick, size in changes:
        level += size
        events.append((tick, level, level))
    bounds = (0, *trace.steps, trace.end)
    peaks = _peaks(events, bounds)
    top = max(peaks, key=lambda peak: peak.peak_allocated)
    return Timeline(
        trace.device,
        tuple(events),
        peaks[0],
        tuple(peaks[1:]),
        top.peak_allocated,
        top.peak_reserved,
        top.peak_tick,
        top.reserved_tick,
    )


def live_at(trace: Trace, tick: int) -> list[Storage]:
    """The storages that are allocated right after the event ``tick``."""
    return [s for s in trace.storages if s.born <= tick and (s.died is None or s.died > tick)]


def _changes(storages: tuple[Storage, ...]) -> list[tuple[int, int]]:
    changes = [(s.born, s.bytes) for s in storages]
    changes += [(s.died, -s.bytes) for s in storages if s.died is not None]
    return sorted(changes)


def _peaks(events: list[tuple[int, int, int]], bounds: tuple[int, ...]) -> list[StepPeak]:
    """The peak between each two bounds; what is held when a step begins counts for it."""
    peaks: list[StepPeak] = []
    position, level = 0, 0
    for start, end in pairwise(bounds):
        best, best_tick = level, start
        while position < len(events) and events[position][0] <= end:
            tick, level, _ = events[position]
            if level > best:
                best, best_tick = level, tick
            position += 1
        peaks.append(StepPeak(start, end, best, best, best_tick, best_tick))
    return peaks
