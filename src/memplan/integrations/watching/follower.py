"""At the end of each watched step: record its row, and open, simulate or close a window."""

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
from memplan.integrations.watching.survivors import DetectedLeak, find_leaks
from memplan.integrations.watching.window import OBSERVED, Subject, Window

MAX_ROWS = 10_000
"""Older rows are dropped, so that a watch itself does not grow."""
_NOISE = 1 << 20
"""Bytes. Smaller growth of the predicted peak is not reported."""


class Follower:
    """Watches steps on one device: call `begin`, then `end_step` after each step, then `close`."""

    def __init__(self, subject: Subject, device: torch.device, say: Callable[[str], None]) -> None:
        """``say(text)`` prints a message unless the watch is quiet."""
        self.subject = subject
        self.device = device
        self.steps = 0
        """Steps that have ended."""
        self.rows: deque[Row] = deque(maxlen=MAX_ROWS)
        """What each of the last steps allocated."""
        self.growths = list[Growth]()
        """Steps whose peak rose above the prediction."""
        self.notes = list[str]()
        """Notes for the user, as sentences."""
        self.prediction: Prediction | None = None
        """From the last window that could predict; None before."""
        self._leaks = list[DetectedLeak]()
        """All leaks so far, also those that have ended."""
        self._say = say
        self._schedule = Schedule()
        """Decides when a window is opened: a few steps whose ops are recorded."""
        self._counters = CardCounters(device) if device.type == "cuda" else HostCounters()
        """Memory counters, read at each step's end."""
        self._first_steps: FirstSteps | None = None if device.type == "cuda" else FirstSteps()
        """Measures the first steps on the CPU; None once they are over, and on a card, which counts every step."""
        self._window: Window | None = None
        """The open window; None if there is none."""
        self._first_drift: int | None = None
        """Drift of the first step after the prediction, in bytes."""
        self._began = 0.0
        """When the current step began, in seconds of `time.perf_counter`."""

    @property
    def leaks(self) -> tuple[Leak, ...]:
        """All leaks in the order of detection."""
        return tuple(detected.leak for detected in self._leaks)

    def begin(self) -> None:
        """Observe the first step from now on."""
        self._counters.read()  # resets the card's peak
        if self._first_steps is not None:
            self._first_steps.start()
        self._open_window()
        self._began = time.perf_counter()

    def end_step(self) -> Row:
        """Record the end of a step and return its row."""
        now = time.perf_counter()
        self.steps += 1
        reading = self._counters.read()
        observing = self._window is not None and self._window.ended < OBSERVED
        row = Row(
            self.steps, now - self._began, reading.peak, reading.allocated, self.prediction and self.prediction.peak,
            reading.resident, "" if reading.peak is None else "allocator", observing,
        )  # fmt: skip
        self.rows.append(row)
        if self._window is not None:
            self._end_step_in_window(self._window)
            self._schedule.note(reading, time.perf_counter() - self._began, observed=True)
        else:
            self._end_unobserved_step(row, reading)
        for index, detected in enumerate(self._leaks):
            if detected.leak.ended is None and detected.is_over:
                self._leaks[index] = replace(detected, leak=replace(detected.leak, ended=self.steps))
                self._say(str(self._leaks[index].leak))
        self._began = time.perf_counter()
        return row

    @property
    def is_observing(self) -> bool:
        """Whether a window is open."""
        return self._window is not None

    def at_failure(self) -> tuple[Prediction | None, bool]:
        """Stop observing. Return the latest prediction, and whether it is of the failed step itself."""
        window = self._window
        if window is None or window.ended >= OBSERVED:
            return self.prediction, False
        window.end_step()
        window.stop()
        prediction = self._prediction_of(window)
        return (prediction, True) if prediction is not None else (self.prediction, False)

    def close(self) -> None:
        """Stop profiling and observing."""
        if self._first_steps is not None:
            self._first_steps.stop(window=None)
            self._first_steps = None
        if self._window is not None:
            self._window.close()
            self._window = None

    def _open_window(self) -> None:
        """Record every op from now on."""
        self._schedule.opened()
        self._window = Window(self.subject, self.steps + 1)
        self._window.open()

    def _end_unobserved_step(self, row: Row, reading: Reading) -> None:
        """Pass the step's counters and its drift from the prediction to the schedule; open a window if one is due."""
        self._schedule.note(reading, row.seconds, observed=False)
        if row.drift is not None:
            if self._first_drift is None:
                self._first_drift = row.drift
            self._schedule.note_drift(row.drift - self._first_drift, row.predicted)
        if self._schedule.is_due(self.steps):
            self._open_window()

    def _end_step_in_window(self, window: Window) -> None:
        """Stop recording after the observed steps, and close the window one step later, when leaks are visible."""
        window.end_step()
        if self._first_steps is not None:
            self._first_steps.end_step()
        if window.ended == OBSERVED:
            window.stop()
            self._predict(window)
        elif window.ended > OBSERVED:
            self._close_window(window)

    def _predict(self, window: Window) -> None:
        """Replace the prediction by that of a window's steps; report growth if its peak is clearly higher."""
        new, old = self._prediction_of(window), self.prediction
        if new is None:
            self.notes.append(f"steps from {window.first} on could not be observed: {window.broken}")
            return
        self.prediction = new
        if old is None:
            for number, peak in enumerate(new.peaks()):
                self._set_row(window.first + number, predicted=peak)
        elif new.peak - old.peak > max(_NOISE, old.peak // 100):
            measured = self.rows[-1].peak
            growth = Growth(self.steps, measured or new.peak, old.peak, *grown(old, new))
            self.growths.append(growth)
            self._say(str(growth))
        self._first_drift = None

    def _prediction_of(self, window: Window) -> Prediction | None:
        """Simulate the steps that a window has recorded; None if that fails, with the reason in `Window.broken`."""
        trace = window.trace()
        if trace is None or not trace.steps:
            return None
        try:
            return Prediction.of(trace)
        except Exception as error:  # an error of the simulation must not end the training
            window.broken = f"{type(error).__name__}: {error}"
            return None

    def _close_window(self, window: Window) -> None:
        """Detect leaks in a window that is complete, and close it."""
        leaks = [detected for detected in find_leaks(window, self.subject) if not self._is_known(detected.leak)]
        if self._first_steps is not None:
            for number, (peak, allocated) in enumerate(self._first_steps.stop(window)):
                self._set_row(window.first + number, peak=peak, held=allocated, source="profiler")
            self._first_steps = None
        window.close()
        self._window = None
        self._leaks += leaks
        for detected in leaks:
            self._say(str(detected.leak))
        self._schedule.closed()

    def _is_known(self, leak: Leak) -> bool:
        """Return whether a leak at the same line, layer and op was reported before and has not ended."""
        origin = leak.where, leak.layer, leak.op
        return any(origin == (known.where, known.layer, known.op) and known.ended is None for known in self.leaks)

    def _set_row(self, step: int, **values: object) -> None:
        """Set values in the row of an earlier step."""
        for index, row in enumerate(self.rows):
            if row.step == step:
                self.rows[index] = replace(row, **values)  # pyright: ignore[reportArgumentType]


def summary(steps: int, rows: deque[Row], prediction: Prediction | None) -> str:
    """Return the number of steps, the greatest measured peak and the predicted peak, as text."""
    peaks = [row.peak for row in rows if row.peak is not None]
    parts = [counted(steps, "step")]
    if peaks:
        parts.append(f"peak {format_bytes(max(peaks))}")
    if prediction is not None:
        parts.append(f"predicted {format_bytes(prediction.peak)}")
    return ", ".join(parts)
