"""Measured peaks of the first steps on the CPU, from the allocator's events in torch's profiler."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from memplan import _torch
from memplan.integrations.watching.window import Window
from memplan.trace.recording.ledger import Entry


class FirstSteps:
    """Profiles the first window, unless another profiler is active: torch has only one at a time."""

    def __init__(self) -> None:
        self._profile = _torch.YieldingProfile()
        """torch's profiler, unless another is active."""
        self._ends = list[int]()
        """Time at which each step ended, in ns."""

    def start(self) -> None:
        """Begin to profile, unless another profiler is active."""
        self._profile.start()

    def end_step(self) -> None:
        """Record that a step has ended."""
        self._ends.append(time.time_ns())

    def stop(self, window: Window | None) -> list[tuple[int, int]]:
        """Stop profiling. Return (peak, bytes allocated at its end) of each step; [] without a profile or a window."""
        profile = self._profile.stop()
        if profile is None or window is None:
            return []
        addresses = {event.address for event in profile.events}
        resident = [
            (entry, window.step_of_tick(entry.died)) for entry in window.observer.ledger.entries
            if entry.op is None and entry.address not in addresses
        ]  # fmt: skip
        return peaks_of(profile.events, self._ends, resident)


def peaks_of(
    events: Sequence[_torch.MemoryEvent], ends: Sequence[int], resident: Iterable[tuple[Entry, int | None]]
) -> list[tuple[int, int]]:
    """Return (peak, bytes allocated at its end) of each step. Steps end at ``ends``, in ns. ``resident`` are storages
    allocated before the first step, with the step (from 0) that freed them: the profiler does not record these frees,
    which are counted at the beginning of that step."""
    live: dict[int, int] = {}  # address -> bytes
    freed_in: dict[int | None, list[int]] = {}  # step -> addresses of resident storages
    for entry, step in resident:
        live[entry.address] = entry.bytes
        freed_in.setdefault(step, []).append(entry.address)
    level = sum(live.values())
    peaks, index = list[tuple[int, int]](), 0  # index of the next event
    for number, end in enumerate(ends):
        for address in freed_in.get(number, ()):
            level -= live.pop(address, 0)
        peak = level
        while index < len(events) and events[index].time <= end:
            event, index = events[index], index + 1
            if event.bytes > 0:
                live[event.address] = event.bytes
                level += event.bytes
            else:  # 0 bytes of what was allocated before profiling by something that is not watched
                level -= live.pop(event.address, 0)
            peak = max(peak, level)
        peaks.append((peak, level))
    return peaks
