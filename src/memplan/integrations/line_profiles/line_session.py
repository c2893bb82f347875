"""Measures the memory of running functions line by line, from the allocator's events.

On the host, torch's profiler records allocations and frees, and markers in its record tell which line ran. Storages
from before the session are known as far as Python reaches their tensors; a weak reference tells when each is freed. On
a card, for which the profiler records no frees, the allocator's history is used, and its counters give the position in
the history at which each line began.
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
_CUDA_STARTED = "CUDA was used first within it: what lies on the card was not measured"


@dataclass(frozen=True, repr=False)
class Measured(Printed):
    """What a session measured; its ticks count the allocator's events.

    ``before`` bytes were allocated when it began, ``levels`` are (tick, bytes allocated), and ``lives`` (allocated,
    freed) the ticks of each storage.
    """

    device: str
    before: int
    levels: tuple[tuple[int, int], ...]
    lives: tuple[tuple[int, int | None], ...]
    functions: tuple[FunctionLines, ...]
    notes: tuple[str, ...] = ()

    @property
    def peak(self) -> int:
        """Greatest number of bytes allocated at a time."""
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
        profiles = profiles_of(self.functions, self.levels, self.lives, device=self.device, origin="measured")
        return profiles if not self.notes else with_note(profiles, *self.notes)


class Session:
    """Measures this thread from `begin` to `end`. After ``seconds`` of the thread's CPU time it stops by itself at the
    next line, because the profiler's record grows with each op."""

    def __init__(self, seconds: float = float("inf")) -> None:
        """``seconds``: CPU time of the thread after which the session stops at the next line."""
        self._seconds = seconds
        self._began = 0.0
        """Seconds of the thread's CPU time at `begin`."""
        self._stack = ExitStack()
        """What is exited when the session stops."""
        self._profile: Any = None
        """torch's profiler, which records the allocations on the host."""
        self._watch: LineWatch | None = None
        """Records which lines run."""
        self._resident = _ResidentStorages()
        """Storages on the host that were allocated before the session."""
        self._card: _Card | None = None
        """None without a card that the process uses."""
        self.thread = 0
        """Id of the measured thread; 0 before `begin`."""
        self.is_on = False
        """Whether it measures."""
        self.took = 0.0
        """CPU seconds from `begin` to `end`, with the search for resident storages and the reading of the record."""

    def begin(self) -> None:
        """Find the resident storages, and measure from now on."""
        self._began = time.thread_time()
        gc.collect()  # an older cycle would be freed at an arbitrary line
        self._resident = _ResidentStorages.now()
        self._card = _Card() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
        clock = _NotifyingClock(self._on_line)
        self._profile = self._stack.enter_context(_torch.memory_profile())
        self._watch = self._stack.enter_context(watching(clock))
        self.thread, self.is_on = threading.get_ident(), True

    def _on_line(self) -> None:
        """Called when a line begins: note how long the card's history is, and stop after the time limit."""
        if self._card is not None:
            self._card.mark()
        if self.is_on and time.thread_time() > self._began + self._seconds:
            self.stop()

    def stop(self) -> None:
        """Stop measuring."""
        self.is_on = False
        self._stack.close()
        self._resident.close()
        if self._card is not None:
            self._card.close()

    def end(self) -> Measured:
        """Stop measuring, and return what was measured since `begin`."""
        if self.is_on:
            self.stop()
        assert self._watch is not None, "it has begun"
        measured = self._read(self._watch)
        self.took = time.thread_time() - self._began
        return measured

    def _read(self, watch: LineWatch) -> Measured:
        """Return the measurement of the card if anything is allocated there, else of the host. ``watch`` knows which
        lines ran."""
        if self._card is not None and (self._card.before or self._card.events):
            return self._card.read(watch)
        measured = _host_measurement(_torch.Profile.of(self._profile), self._resident, watch)
        cuda_started = self._card is None and torch.cuda.is_available() and torch.cuda.is_initialized()
        return replace(measured, notes=(_CUDA_STARTED,)) if cuda_started else measured


class _NotifyingClock(LineClock):
    """A clock of lines that calls back at every tick."""

    def __init__(self, ticked: Callable[[], None]) -> None:
        """``ticked`` is called at every tick."""
        super().__init__()
        self._on_tick = ticked

    def __call__(self) -> int:
        """Return the next tick, after the callback."""
        tick = super().__call__()
        self._on_tick()
        return tick


def _is_leaf(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a leaf of autograd's graph."""
    try:
        return tensor.is_leaf
    except RuntimeError:  # a view whose base was changed in place, such as of FSDP1's flat parameters
        return False


class _ResidentStorages:
    """Storages on the host that were reachable from Python when a session began, and when they are freed."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        """Bytes of each, by its number."""
        self._references: list[Any] = []
        """Weak references, whose callbacks mark the frees in the profiler's record."""

    @classmethod
    def now(cls) -> _ResidentStorages:
        """Return the storages of all tensors and gradients that Python's garbage collector knows."""
        resident, seen = cls(), set[int]()
        for instance in gc.get_objects():
            if issubclass(type(instance), torch.Tensor):
                resident._add(instance, seen)
                if _is_leaf(instance) and instance.requires_grad and instance.grad is not None:
                    resident._add(instance.grad, seen)
        return resident

    def _add(self, tensor: torch.Tensor, seen: set[int]) -> None:
        """Add the storage of a real tensor on the host. ``seen`` are the keys of the storages that were added."""
        if isinstance(tensor, _torch.FakeTensor) or tensor.device.type != HOST or not _torch.has_shape(tensor):
            return
        if tensor.layout != torch.strided or "" not in _torch.inner_tensors(tensor):  # a subclass around other tensors
            return
        storage = tensor.untyped_storage()
        if _torch.storage_key(storage) in seen or not storage.resizable():  # memory of numpy is not torch's
            return
        seen.add(_torch.storage_key(storage))
        number = len(self.sizes)
        self.sizes.append(storage.nbytes())
        self._references.append(weakref.ref(storage, lambda reference: _mark_freed(number)))

    def close(self) -> None:
        """Record no more frees."""
        self._references.clear()


def _mark_freed(number: int) -> None:
    """Put a marker into the profiler's record: resident storage ``number`` is freed."""
    with _torch.marker(f"{_FREED}{number}"):
        pass


class _Card:
    """The allocator history of the current card, and the position in it at which each line began."""

    def __init__(self) -> None:
        self.before = torch.cuda.memory_allocated()
        """Bytes allocated on the card when the session began."""
        self.events: list[_torch.HistoryEvent] = []
        """Allocations and frees during the session, once it is closed."""
        self._marks: list[int] = []
        """By tick of the line clock, which ticks when a line begins: how many of these events came before."""
        self._first_event = _event_count()
        """How many allocations and frees came before the session."""
        _torch.record_history(stacks=False)
        self._history_length = len(_torch.history())
        """Entries of torch's history that are from before the session."""

    def mark(self) -> None:
        """Record how many events came before this tick of the line clock."""
        self._marks.append(_event_count() - self._first_event)

    def close(self) -> None:
        """Store the events, and record no more history."""
        recorded = _torch.history()[self._history_length :]
        self.events = [event for event in recorded if event.action in ("alloc", "free_requested")]
        _torch.end_history()

    def read(self, watch: LineWatch) -> Measured:
        """Return the measurement, with a tick for each event. ``watch`` knows which lines ran."""
        changes: list[tuple[int, int]] = []
        for event in self.events:
            size = round_to_blocks(event.bytes)
            changes.append((size if event.action == "alloc" else -size, event.address))
        levels, lives = _levels(self.before, changes)
        lines = on_events(watch.rows(), self._marks.__getitem__)
        return Measured(torch.cuda.get_device_name(), self.before, levels, lives, lines)


def _event_count() -> int:
    """Return the number of allocations and frees of the card's allocator so far, from its counters."""
    stats = torch.cuda.memory_stats()
    return stats["allocation.all.allocated"] + stats["allocation.all.freed"]


def _host_measurement(profile: _torch.Profile, resident: _ResidentStorages, watch: LineWatch) -> Measured:
    """Return the measurement of the host from the profiler's record. ``resident`` are storages from before it."""
    events: list[tuple[int, int, int]] = []  # time, bytes (below 0 for a free), address
    for number, size in enumerate(resident.sizes):
        marker = profile.ranges.get(f"{_FREED}{number}")
        if marker is not None:
            freed_at, _ = marker
            events.append((freed_at, -size, 0))
    live: set[int] = set()
    for event in profile.events:
        if event.bytes > 0:
            live.add(event.address)
        elif event.address not in live:
            continue  # a resident storage: counted by its marker
        events.append((event.time, event.bytes, event.address))
    events.sort()
    times = [time for time, *_ in events]
    levels, lives = _levels(sum(resident.sizes), [(size, address) for _, size, address in events])
    lines = on_events(watch.rows(), lambda mark: bisect_right(times, time_of(profile, mark)))
    return Measured(HOST, levels[0][1], levels, lives, lines)


def _levels(
    level: int, changes: Sequence[tuple[int, int]]
) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int | None], ...]]:
    """Return the levels (tick, bytes) and lives (allocated, freed; in ticks) that follow from a sequence of changes.
    Changes are (bytes, address), with bytes below 0 for a free; ``level`` is the bytes before them."""
    levels, lives, live = [(0, level)], dict[int, int | None](), dict[int, int]()
    for tick, (size, address) in enumerate(changes, start=1):
        level += size
        levels.append((tick, level))
        if size > 0:
            live[address], lives[tick] = tick, None
        elif address in live:
            lives[live.pop(address)] = tick
    return tuple(levels), tuple(lives.items())


def with_note(profiles: tuple[LineProfile, ...], *notes: str) -> tuple[LineProfile, ...]:
    """Return the profiles with further notes."""
    return tuple(replace(profile, notes=(*profile.notes, *notes)) for profile in profiles)
