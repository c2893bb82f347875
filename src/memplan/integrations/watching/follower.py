"""What happens at the end of each step that is watched: a row, and from time to time a window and its judgement."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import torch

from memplan._bytes import format_bytes
from memplan._text import counted
from memplan.integrations.watching.counters import CardCounters, HostCounters, Reading
from memplan.integrations.watching.first_steps import FirstSteps
from memplan.integrations.watching.prediction import Prediction, grown
from memplan.integrations.watching.rows import Growth, Leak, Row
from memplan.integrations.watching.schedule import Schedule
from memplan.integrations.watching.survivors import Found, ended, find_leaks
from memplan.integrations.watching.window import OBSERVED, Subject, Window

KEPT = 10_000
"""Rows that are kept, the last ones: a watch must not grow itself."""
_NOISE = 1 << 20


class Follower:
    """Follows steps on one device. `begin` it, tell it each step's end, `close` it."""

    def __init__(self, subject: Subject, device: torch.device, say: Callable[[str], None]) -> None:
        self.subject = subject
        self.device = device
        self.steps = 0
        self.rows: deque[Row] = deque(maxlen=KEPT)
        self.growths = list[Growth]()
        self.notes = list[str]()
        self.prediction: Prediction | None = None
        self._found = list[Found]()
        self._say = say
        self._schedule = Schedule()
        self._counters = CardCounters(device) if device.type == "cuda" else HostCounters()
        self._first: FirstSteps | None = None if device.type == "cuda" else FirstSteps()
        self._window: Window | None = None
        self._basis: int | None = None
        """Of the first step after a prediction: by how much its peak is above it."""
        self._began = 0.0

    @property
    def leaks(self) -> tuple[Leak, ...]:
        """Return what leaks, in the order in which it was found."""
        return tuple(found.leak for found in self._found)

    def begin(self) -> None:
        """Begin with the first step."""
        self._counters.read()  # of a card, the peak counts from here on
        if self._first is not None:
            self._first.start()
        self._open()
        self._began = time.perf_counter()

    def end_step(self) -> Row:
        """Note that a step is over."""
        now = time.perf_counter()
        self.steps += 1
        reading = self._counters.read()
        observing = self._window is not None and self._window.ended < OBSERVED
        row = Row(
            self.steps, now - self._began, reading.peak, reading.held, self.prediction and self.prediction.peak,
            reading.resident, "" if reading.peak is None else "allocator", observing,
        )  # fmt: skip
        self.rows.append(row)
        if self._window is not None:
            self._in_window(self._window)
            self._schedule.note(reading, time.perf_counter() - self._began, observed=True)
        else:
            self._outside(row, reading)
        for number, found in enumerate(self._found):
            if found.leak.ended is None and found.is_over:
                self._found[number] = replace(found, leak=ended(found.leak, self.steps))
                self._say(str(self._found[number].leak))
        self._began = time.perf_counter()
        return row

    @property
    def is_observing(self) -> bool:
        """Return whether a window is open."""
        return self._window is not None

    def at_failure(self) -> tuple[Prediction | None, bool]:
        """Return the steps that were observed last, and whether the running one is among them; nothing is noted any
        more."""
        window = self._window
        if window is None or window.ended >= OBSERVED:
            return self.prediction, False
        window.end_step()
        window.stop()
        seen = self._simulated(window)
        return (seen, True) if seen is not None else (self.prediction, False)

    def close(self) -> None:
        """Put everything back."""
        if self._first is not None:
            self._first.stop(None)
            self._first = None
        if self._window is not None:
            self._window.close()
            self._window = None

    def _open(self) -> None:
        self._schedule.opened()
        self._window = Window(self.subject, self.steps + 1)
        self._window.open()

    def _outside(self, row: Row, reading: Reading) -> None:
        self._schedule.note(reading, row.seconds, observed=False)
        if row.drift is not None:
            self._basis = row.drift if self._basis is None else self._basis
            self._schedule.note_drift(row.drift - self._basis, row.predicted)
        if self._schedule.is_due(self.steps):
            self._open()

    def _in_window(self, window: Window) -> None:
        window.end_step()
        if self._first is not None:
            self._first.end_step()
        if window.ended == OBSERVED:
            window.stop()
            self._predict(window)
        elif window.ended > OBSERVED:
            self._judge(window)

    def _predict(self, window: Window) -> None:
        new, old = self._simulated(window), self.prediction
        if new is None:
            self.notes.append(f"steps from {window.first} on could not be observed: {window.broken}")
            return
        self.prediction = new
        if old is None:
            for number, peak in enumerate(new.peaks()):
                self._fill(window.first + number, predicted=peak)
        elif new.peak - old.peak > max(_NOISE, old.peak // 100):
            measured = self.rows[-1].peak
            growth = Growth(self.steps, measured or new.peak, old.peak, *grown(old, new))
            self.growths.append(growth)
            self._say(str(growth))
        self._basis = None

    def _simulated(self, window: Window) -> Prediction | None:
        trace = window.trace()
        if trace is None or not trace.steps:
            return None
        try:
            return Prediction.of(trace)
        except Exception as error:  # of a simulation: the training goes on
            window.broken = f"{type(error).__name__}: {error}"
            return None

    def _judge(self, window: Window) -> None:
        new = [one for one in find_leaks(window, self.subject) if not self._is_known(one.leak)]
        if self._first is not None:
            for number, (peak, held) in enumerate(self._first.stop(window)):
                self._fill(window.first + number, peak=peak, held=held, source="profiler")
            self._first = None
        window.close()
        self._window = None
        self._found += new
        for one in new:
            self._say(str(one.leak))
        self._schedule.closed()

    def _is_known(self, leak: Leak) -> bool:
        place = leak.where, leak.layer, leak.op
        return any(place == (one.where, one.layer, one.op) and one.ended is None for one in self.leaks)

    def _fill(self, step: int, **values: object) -> None:
        """Complete the row of a step that is known better by now."""
        for at, row in enumerate(self.rows):
            if row.step == step:
                self.rows[at] = replace(row, **values)  # pyright: ignore[reportArgumentType]


def summary(steps: int, rows: deque[Row], prediction: Prediction | None) -> str:
    """Return a sentence of what was watched."""
    peaks = [row.peak for row in rows if row.peak is not None]
    parts = [counted(steps, "step")]
    if peaks:
        parts.append(f"peak {format_bytes(max(peaks))}")
    if prediction is not None:
        parts.append(f"predicted {format_bytes(prediction.peak)}")
    return ", ".join(parts)
