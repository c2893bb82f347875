"""The first steps on the CPU as torch's profiler sees them: the one way in which its allocator says what it gave."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from memplan import _torch
from memplan.integrations.watching.window import Window
from memplan.trace.recording.ledger import Entry


class FirstSteps:
    """Profiles the first window, unless somebody else profiles: torch has one profiler at a time."""

    def __init__(self) -> None:
        self._profile = _torch.YieldingProfile()
        self._ends = list[int]()

    def start(self) -> None:
        """Begin, where nobody profiles."""
        self._profile.start()

    def end_step(self) -> None:
        """Note when a step ended."""
        self._ends.append(time.time_ns())

    def stop(self, window: Window | None) -> list[tuple[int, int]]:
        """End it. Return of each step the most that was allocated and what was at its end; [] where that is unknown."""
        profile = self._profile.stop()
        if profile is None or window is None:
            return []
        made = {event.address for event in profile.events}
        before = [
            (entry, window.step_of_tick(entry.died)) for entry in window.observer.ledger.entries
            if entry.op is None and entry.address not in made
        ]  # fmt: skip
        return peaks_of(profile.events, self._ends, before)


def peaks_of(
    events: Sequence[_torch.MemoryEvent], ends: Sequence[int], before: Iterable[tuple[Entry, int | None]]
) -> list[tuple[int, int]]:
    """Return the peak of each step, and the bytes held when it ended.

    Args:
        events: of the allocator, in order of time.
        ends: times at which the steps ended, in ns.
        before: storages that were there when the first step began, with the step that freed them, from 0; the profiler
            does not see these releases. Each is taken to be free when that step begins.
    """
    there = {entry.address: (entry.bytes, step) for entry, step in before}
    level = sum(size for size, _ in there.values())
    found, at = list[tuple[int, int]](), 0
    for number, end in enumerate(ends):
        for address in [address for address, (_, step) in there.items() if step == number]:
            level -= there.pop(address)[0]
        peak = level
        while at < len(events) and events[at].time <= end:
            event, at = events[at], at + 1
            if event.bytes > 0:
                there[event.address] = event.bytes, None
                level += event.bytes
            elif event.address in there:  # else of something older, that nobody counts
                level -= there.pop(event.address)[0]
            peak = max(peak, level)
        found.append((peak, level))
    return found
