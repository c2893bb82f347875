"""When a window is opened: at the start, where memory grows from step to step, and now and then."""

from __future__ import annotations

import itertools
from collections import deque

from memplan.integrations.watching.counters import NOTHING, Reading

SHARE = 0.005
"""Of the time that steps take, so much may go into windows that nothing asked for."""
_RISES = 3
"""Readings in a row, one a step on a card, that are each above the one before."""
_NOISE = 1 << 20
"""Bytes by which the process has to grow in these, where an allocator has no counters; a step's peak likewise."""
_WAIT = 8
"""Steps between the first two windows that growth opens; four times as many before each further one."""


class Schedule:
    """Says whether a window is due, by what each step's end shows."""

    def __init__(self) -> None:
        self._readings: deque[Reading] = deque(maxlen=_RISES + 1)
        self._plain: deque[float] = deque(maxlen=32)
        self._elapsed = self._window = self._spent = 0.0
        self._windows = self._asked = self._wait_until = 0
        self._new = False
        """Whether the last step's end was read."""
        self._off: deque[bool] = deque(maxlen=2)

    def note(self, reading: Reading, seconds: float, *, observed: bool) -> None:
        """Note a step's end."""
        if reading is not NOTHING:
            self._readings.append(reading)
        self._new = reading is not NOTHING
        self._elapsed += seconds
        if observed:
            self._window += seconds
        else:
            self._plain.append(seconds)

    def note_drift(self, drift: int | None, predicted: int | None) -> None:
        """Note by how much a step's peak is further from the prediction than it was at first."""
        self._off.append(drift is not None and drift > max(_NOISE, (predicted or 0) // 100))

    def opened(self) -> None:
        """Note that a window is opened."""
        self._window = 0.0

    def closed(self) -> None:
        """Note that a window was closed."""
        if self._windows:  # the first one is the price of a watch
            self._spent += self._window
        self._windows += 1
        self._readings.clear()
        self._off.clear()

    def is_due(self, step: int) -> bool:
        """Return whether a window is to be opened for the next steps."""
        if step >= self._wait_until and ((self._new and self._grows()) or (len(self._off) == 2 and all(self._off))):
            self._wait_until = step + _WAIT * 4 ** min(self._asked, 8)
            self._asked += 1
            return True
        return len(self._plain) == self._plain.maxlen and self._spent + self._window <= SHARE * self._elapsed

    def _grows(self) -> bool:
        """Return whether each of the last steps held more than the one before."""
        if len(self._readings) <= _RISES:
            return False
        blocks = [reading.blocks for reading in self._readings]
        held = [reading.held for reading in self._readings]
        resident = [reading.resident for reading in self._readings]
        if blocks[0] is not None:
            return _rises(blocks) or _rises(held)
        return _rises(resident) and (resident[-1] or 0) - (resident[0] or 0) >= _NOISE


def _rises(numbers: list[int | None]) -> bool:
    known = [number for number in numbers if number is not None]
    return len(known) == len(numbers) and all(a < b for a, b in itertools.pairwise(known))
