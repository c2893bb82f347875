"""What tensors take between the lines of functions that really run, from the allocator's own events.

A session is on while a decorated function runs: torch's profiler sees each allocation and release, marks in its record
say which line ran. What was there before counts as far as Python reaches it: tensors are looked up when a session
begins, and a weak reference on each storage says when it goes.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from bisect import bisect_right
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from memplan import _torch
from memplan._bytes import format_bytes
from memplan.explanation.by_line import profiles_of
from memplan.explanation.line_profile import LineProfile
from memplan.trace.recording.followed.line_marks import LineClock, on_events
from memplan.trace.recording.followed.line_watch import LineWatch, watching
from memplan.trace.records import HOST, FunctionLines

_FREED = "freed"
CUDA = "cuda"


@dataclass(frozen=True, repr=False)
class Measured:
    """What a session saw, on the clock of the allocator's events.

    ``levels`` are (tick, bytes allocated), ``lives`` the ticks of births and deaths; ``before`` bytes were there.
    """

    device: str
    before: int
    levels: tuple[tuple[int, int], ...]
    lives: tuple[tuple[int, int | None], ...]
    functions: tuple[FunctionLines, ...]

    @property
    def peak(self) -> int:
        """Bytes allocated at most."""
        return max((level for _, level in self.levels), default=self.before)

    @property
    def after(self) -> int:
        """Bytes allocated at the end."""
        return self.levels[-1][1]

    def __str__(self) -> str:
        peak, before, after = map(format_bytes, (self.peak, self.before, self.after))
        return f"measured on {self.device}: {peak} peak; {before} were there before, {after} are after it"

    def __repr__(self) -> str:
        return str(self)

    def profiles(self) -> tuple[LineProfile, ...]:
        """Return the functions that ran, line by line."""
        return profiles_of(self.functions, self.levels, self.lives, device=self.device, origin="measured")


class Session:
    """Measures this thread from `begin` to `end`.

    Args:
        seconds: after which it ends by itself at the next line: a profiler's record grows with each op.
    """

    def __init__(self, seconds: float = float("inf")) -> None:
        self._seconds = seconds
        self._began = 0.0
        self._stack = ExitStack()
        self._profile: Any = None
        self._watch: LineWatch | None = None
        self._before = _Before()
        self.thread = 0
        self.is_on = False
        self.took = 0.0
        """Seconds that measuring took, the search for what was there and the reading of what was seen included."""

    def begin(self) -> None:
        """Look up what there is, and measure from now on."""
        self._began = time.monotonic()
        gc.collect()  # a cycle from before would end at some line by chance
        self._before = _Before.now()
        clock = _Clock(self._line)
        self._profile = self._stack.enter_context(_torch.memory_profile())
        self._watch = self._stack.enter_context(watching(clock))
        self.thread, self.is_on = threading.get_ident(), True

    def _line(self) -> None:
        if self.is_on and time.monotonic() > self._began + self._seconds:
            self.stop()

    def stop(self) -> None:
        """Measure no more."""
        self.is_on = False
        self._stack.close()
        self._before.close()

    def end(self) -> Measured:
        """Return what was seen since it began."""
        if self.is_on:
            self.stop()
        assert self._watch is not None, "it has begun"
        measured = _read(self._profile, self._before, self._watch)
        self.took = time.monotonic() - self._began
        return measured


class _Clock(LineClock):
    def __init__(self, ticked: Callable[[], None]) -> None:
        super().__init__()
        self._ticked = ticked

    def __call__(self) -> int:
        """Return the next tick, then say so."""
        tick = super().__call__()
        self._ticked()
        return tick


class _Before:
    """Storages on the host that Python reached when a session began, and bytes on the card."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.on_card = 0
        self._references: list[Any] = []

    @classmethod
    def now(cls) -> _Before:
        """Look them up."""
        found, seen = cls(), set[int]()
        for one in gc.get_objects():
            if issubclass(type(one), torch.Tensor):
                found._add(one, seen)
                if one.is_leaf and one.requires_grad and one.grad is not None:
                    found._add(one.grad, seen)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            found.on_card = torch.cuda.memory_allocated()
        return found

    def _add(self, tensor: torch.Tensor, seen: set[int]) -> None:
        apart = isinstance(tensor, _torch.FakeTensor) or tensor.device.type != HOST or not _torch.has_shape(tensor)
        if apart or tensor.layout != torch.strided or "" not in _torch.inner_tensors(tensor):
            return
        storage = tensor.untyped_storage()
        if _torch.storage_key(storage) in seen or not storage.resizable():  # numpy's memory is no allocation of torch's
            return
        seen.add(_torch.storage_key(storage))
        number = len(self.sizes)
        self.sizes.append(storage.nbytes())
        self._references.append(weakref.ref(storage, lambda reference: _mark(number)))

    def close(self) -> None:
        """Watch no longer when they go."""
        self._references.clear()


def _mark(number: int) -> None:
    with _torch.marker(f"{_FREED}{number}"):
        pass


def _read(profile: Any, before: _Before, watch: LineWatch) -> Measured:
    """Return what a profiler saw that has stopped: of the card if anything was there, else of the host."""
    host = _torch.Profile.of(profile)
    card = _torch.Profile.of(profile, CUDA) if torch.cuda.is_available() else None
    if card is not None and (card.events or before.on_card):
        chosen, level, device = card, before.on_card, torch.cuda.get_device_name()
        changes = [(event.time, event.bytes, event.address) for event in card.events]
    else:
        chosen, level, device = host, sum(before.sizes), HOST
        changes = [(event.time, event.bytes, event.address) for event in host.events]
        freed = ((number, host.ranges.get(f"{_FREED}{number}")) for number in range(len(before.sizes)))
        changes += [(span[0], -before.sizes[number], 0) for number, span in freed if span is not None]
    levels, births = [(0, level)], dict[int, int | None]()
    live, times = dict[int, int](), list[int]()
    for when, size, address in sorted(changes):
        if size < 0 and chosen is host and address and address not in live:
            continue  # it was there before: its weak reference says so
        times.append(when)
        level += size
        levels.append((len(times), level))
        if size > 0:
            live[address] = len(times)
            births[len(times)] = None
        elif address in live:
            births[live.pop(address)] = len(times)
    lines = on_events(watch.rows(), host, lambda when: bisect_right(times, when))
    return Measured(device, levels[0][1], tuple(levels), tuple(births.items()), lines)


def with_note(profiles: tuple[LineProfile, ...], note: str) -> tuple[LineProfile, ...]:
    """Return profiles of which something has to be said."""
    return tuple(replace(one, notes=(*one.notes, note)) for one in profiles)
