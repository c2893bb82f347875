"""When to observe steps again: when memory grows from step to step, and otherwise as often as the time share allows."""

from __future__ import annotations

import itertools
from collections import deque

from memplan.integrations.watching.counters import NO_READING, Reading

SHARE = 0.005
"""Share of the training's time that windows without growth may take."""
_RISES = 3
"""Consecutive rises of the counters that count as growth; on a card there is a reading for every step."""
_NOISE = 1 << 20
"""Bytes. Smaller growth of the resident set over these readings, or of a step's peak over the prediction, is noise."""
_WAIT = 8
"""Steps between the first two windows opened because of growth. Each further one waits four times as long."""


class Schedule:
    """Decides from the counters at each step's end whether to open a window."""

    def __init__(self) -> None:
        self._readings: deque[Reading] = deque(maxlen=_RISES + 1)
        """Counters at the ends of the last steps; empty after a window."""
        self._unobserved_seconds: deque[float] = deque(maxlen=32)
        """Seconds of each of the last steps outside of windows."""
        self._elapsed = self._window_seconds = self._past_windows_seconds = 0.0
        """Seconds of all steps, of those in the current window, and of those in earlier windows except the first."""
        self._windows = self._growth_windows = self._wait_until = 0
        """Closed windows, windows that growth has opened, and the step before which growth opens no other."""
        self._has_new_reading = False
        """Whether there are counters of the last step's end."""
        self._drifts: deque[bool] = deque(maxlen=2)
        """Whether the peaks of the last steps have clearly moved from the prediction."""

    def note(self, reading: Reading, seconds: float, *, observed: bool) -> None:
        """Record a step's end. ``observed``: whether the step ran in a window."""
        if reading is not NO_READING:
            self._readings.append(reading)
        self._has_new_reading = reading is not NO_READING
        self._elapsed += seconds
        if observed:
            self._window_seconds += seconds
        else:
            self._unobserved_seconds.append(seconds)

    def note_drift(self, drift: int | None, predicted: int | None) -> None:
        """Record how far a step's peak moved from the prediction: ``drift`` bytes since the first predicted step."""
        self._drifts.append(drift is not None and drift > max(_NOISE, (predicted or 0) // 100))

    def opened(self) -> None:
        """Record that a window is opened."""
        self._window_seconds = 0.0

    def closed(self) -> None:
        """Record that a window was closed."""
        if self._windows:  # the first window is not charged to the share
            self._past_windows_seconds += self._window_seconds
        self._windows += 1
        self._readings.clear()
        self._drifts.clear()

    def is_due(self, step: int) -> bool:
        """Return whether to open a window after this step (numbered from 1)."""
        has_drifted = len(self._drifts) == 2 and all(self._drifts)
        if step >= self._wait_until and (has_drifted or (self._has_new_reading and self._grows())):
            # growth that goes on opens windows less and less often
            self._wait_until = step + _WAIT * 4 ** min(self._growth_windows, 8)
            self._growth_windows += 1
            return True
        enough_steps = len(self._unobserved_seconds) == self._unobserved_seconds.maxlen
        # the next window is expected to take as long as the last one
        return enough_steps and self._past_windows_seconds + self._window_seconds <= SHARE * self._elapsed

    def _grows(self) -> bool:
        """Return whether the counters rose at each of the last readings."""
        if len(self._readings) <= _RISES:
            return False
        blocks = [reading.blocks for reading in self._readings]
        allocated = [reading.allocated for reading in self._readings]
        resident = [reading.resident for reading in self._readings]
        if blocks[0] is not None:
            return _rises(blocks) or _rises(allocated)
        return _rises(resident) and (resident[-1] or 0) - (resident[0] or 0) >= _NOISE


def _rises(numbers: list[int | None]) -> bool:
    """Return whether all numbers are known, and each is larger than the one before."""
    known = [number for number in numbers if number is not None]
    return len(known) == len(numbers) and all(a < b for a, b in itertools.pairwise(known))
