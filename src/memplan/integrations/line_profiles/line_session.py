"""What tensors take between the lines of functions that really run, from the allocator's own events.

A session is on while a decorated function runs. On the host torch's profiler sees each allocation and release, and
marks in its record say which line ran; what was there before counts as far as Python reaches it: tensors are looked up
when a session begins, and a weak reference on each storage says when it goes. On a card, of which the profiler records
no release, it is the allocator's history, and its counters say how far that is at each line.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from memplan import _torch
from memplan._bytes import format_bytes, round_to_blocks
from memplan._display import Printed
from memplan.explanation.by_line import profiles_of
from memplan.explanation.line_profile import LineProfile
from memplan.trace.recording.followed.line_marks import LineClock, on_events, time_of
from memplan.trace.recording.followed.line_watch import LineWatch, watching
from memplan.trace.records import HOST, FunctionLines

_FREED = "freed"
_LATE = "CUDA was used first within it: what lies on the card was not measured"


@dataclass(frozen=True, repr=False)
class Measured(Printed):
    """What a session saw, on the clock of the allocator's events.

    ``levels`` are (tick, bytes allocated), ``lives`` the ticks of births and deaths; ``before`` bytes were there.
    """

    device: str
    before: int
    levels: tuple[tuple[int, int], ...]
    lives: tuple[tuple[int, int | None], ...]
    functions: tuple[FunctionLines, ...]
    notes: tuple[str, ...] = ()

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
        found = profiles_of(self.functions, self.levels, self.lives, device=self.device, origin="measured")
        return found if not self.notes else with_note(found, *self.notes)


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
        self._card: _Card | None = None
        self.thread = 0
        self.is_on = False
        self.took = 0.0
        """Seconds that measuring took, the search for what was there and the reading of what was seen included."""

    def begin(self) -> None:
        """Look up what there is, and measure from now on."""
        self._began = time.monotonic()
        gc.collect()  # a cycle from before would end at some line by chance
        self._before = _Before.now()
        self._card = _Card() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
        clock = _Clock(self._line)
        self._profile = self._stack.enter_context(_torch.memory_profile())
        self._watch = self._stack.enter_context(watching(clock))
        self.thread, self.is_on = threading.get_ident(), True

    def _line(self) -> None:
        if self._card is not None:
            self._card.mark()
        if self.is_on and time.monotonic() > self._began + self._seconds:
            self.stop()

    def stop(self) -> None:
        """Measure no more."""
        self.is_on = False
        self._stack.close()
        self._before.close()
        if self._card is not None:
            self._card.close()

    def end(self) -> Measured:
        """Return what was seen since it began."""
        if self.is_on:
            self.stop()
        assert self._watch is not None, "it has begun"
        measured = self._read(self._watch)
        self.took = time.monotonic() - self._began
        return measured

    def _read(self, watch: LineWatch) -> Measured:
        """Return what was seen of the card if anything is there, else of the host."""
        if self._card is not None and (self._card.before or self._card.events):
            return self._card.read(watch)
        measured = _of_host(_torch.Profile.of(self._profile), self._before, watch)
        late = self._card is None and torch.cuda.is_available() and torch.cuda.is_initialized()
        return replace(measured, notes=(_LATE,)) if late else measured


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
    """Storages on the host that Python reached when a session began."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
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


class _Card:
    """The history of the current card's allocator, and where in it each line began."""

    def __init__(self) -> None:
        self.before = torch.cuda.memory_allocated()
        self.events: list[_torch.HistoryEvent] = []
        self._marks: list[int] = []
        self._begun = _events_so_far()
        _torch.record_history(stacks=False)
        self._known = len(_torch.history())

    def mark(self) -> None:
        """Note that the clock of lines ticks."""
        self._marks.append(_events_so_far() - self._begun)

    def close(self) -> None:
        """Take what was recorded, and record no more."""
        recorded = _torch.history()[self._known :]
        self.events = [one for one in recorded if one.action in ("alloc", "free_requested")]
        _torch.end_history()

    def read(self, watch: LineWatch) -> Measured:
        """Return what was seen; its events are the ticks."""
        changes = [(one.bytes if one.action == "alloc" else -one.bytes, one.address) for one in self.events]
        changes = [(round_to_blocks(size) if size > 0 else -round_to_blocks(-size), at) for size, at in changes]
        levels, lives = _levels(self.before, changes)
        lines = on_events(watch.rows(), self._marks.__getitem__)
        return Measured(torch.cuda.get_device_name(), self.before, levels, lives, lines)


def _events_so_far() -> int:
    """Return how often the card's allocator has given and taken back, as its counters say."""
    stats = torch.cuda.memory_stats()
    return stats["allocation.all.allocated"] + stats["allocation.all.freed"]


def _of_host(profile: _torch.Profile, before: _Before, watch: LineWatch) -> Measured:
    """Return what the profiler saw on the host."""
    freed = ((number, profile.ranges.get(f"{_FREED}{number}")) for number in range(len(before.sizes)))
    events = [(span[0], -before.sizes[number], 0) for number, span in freed if span is not None]
    live: set[int] = set()
    for event in profile.events:
        if event.bytes > 0:
            live.add(event.address)
        elif event.address not in live:
            continue  # it was there before: its weak reference says so
        events.append((event.time, event.bytes, event.address))
    events.sort()
    times = [time for time, *_ in events]
    levels, lives = _levels(sum(before.sizes), [(size, address) for _, size, address in events])
    lines = on_events(watch.rows(), lambda mark: bisect_right(times, time_of(profile, mark)))
    return Measured(HOST, levels[0][1], levels, lives, lines)


def _levels(
    level: int, changes: Sequence[tuple[int, int]]
) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int | None], ...]]:
    """Return levels and lives by tick, from the first level and each change with its address."""
    levels, births, live = [(0, level)], dict[int, int | None](), dict[int, int]()
    for tick, (size, address) in enumerate(changes, start=1):
        level += size
        levels.append((tick, level))
        if size > 0:
            live[address], births[tick] = tick, None
        elif address in live:
            births[live.pop(address)] = tick
    return tuple(levels), tuple(births.items())


def with_note(profiles: tuple[LineProfile, ...], *notes: str) -> tuple[LineProfile, ...]:
    """Return profiles of which something has to be said."""
    return tuple(replace(one, notes=(*one.notes, *notes)) for one in profiles)
