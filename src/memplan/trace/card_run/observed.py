"""Run a step twice on the card of this process: as it is, and under a dispatch mode that names what it allocates."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from memplan import _torch
from memplan._bytes import format_bytes
from memplan.trace.card_run.history import OnCard, events_of, on_card
from memplan.trace.card_run.residence import everything_on_card
from memplan.trace.measure_run import StepMarks, measurement, named_run
from memplan.trace.recording.boundaries import Runs
from memplan.trace.recording.join_events import join
from memplan.trace.recording.observer import Observer
from memplan.trace.recording.place import Place
from memplan.trace.recording.session import random_kept, recording_runs, run_steps, undisturbed
from memplan.trace.records import Counters

_EVERYTHING = "build names CUDA nowhere, so everything was made on the card"
_LIBRARIES = ("cudnn", "convolution", "mm", "addmv", "dot", "linear", "matmul")
Around = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class CardRun:
    """A step as it ran on a card."""

    found: OnCard
    counters: tuple[Counters, ...]
    """torch's own peaks: of building, and of each step."""
    end: Counters
    """What was held after the last step."""
    snapshot: dict[str, Any]
    """torch's memory snapshot of the run as it is, at its end; empty where it was not asked for."""
    notes: tuple[str, ...]


@dataclass
class _Plain:
    """What a run gave that nothing but torch's history and profiler watched."""

    history: list[_torch.HistoryEvent] = field(default_factory=list[_torch.HistoryEvent])
    profile: _torch.Profile = field(default_factory=lambda: _torch.Profile([], [], {}))
    counters: list[Counters] = field(default_factory=list[Counters])
    end: Counters = field(default_factory=lambda: Counters(0, 0))
    snapshot: dict[str, Any] = field(default_factory=dict[str, Any])


class _Nothing(BaseException):
    """Building put nothing on the card. Not an Exception: it goes through the user's code."""


def observed(
    build: Runs, steps: int, *, snapshot_file: str | None = None, snapshot: bool = False, around: Around = nullcontext
) -> CardRun:
    """Run a step on the card of this process and return what torch's allocator did.

    Args:
        build: as for `memplan.measure`. If it puts nothing on CUDA, everything is made on the card.
        steps: how often the step runs.
        snapshot_file: that torch's own snapshot of the history is written to, with stacks.
        snapshot: whether to return that snapshot, too.
        around: makes the context in which the step runs as it is.

    Raises:
        StepError: ``build`` or the step raised.
    """
    notes = list[str]()
    torch.cuda.init()
    with undisturbed(cuda=True, real=True):
        _settle()
        random_state = torch.cuda.get_rng_state()
        with random_kept():
            try:
                plain = _plain(build, steps, snapshot_file, snapshot, around, elsewhere=True)
            except _Nothing:
                build = everything_on_card(build)
                notes.append(_EVERYTHING)
                plain = _plain(build, steps, snapshot_file, snapshot, around, elsewhere=False)
        _settle()
        torch.cuda.set_rng_state(random_state)
        before = len(_torch.history())
        named = named_run(build, steps, device="cuda")
        requested = events_of(_torch.history()[before:], named.record).profile
        _torch.end_history()
    events = events_of(plain.history, plain.profile)
    joined = join(named.parts, named.entries, requested, events.profile, _is_librarys)
    if joined.lost:
        size = format_bytes(joined.lost)
        notes.append(f"{size} of allocations could not be joined to an op: they have no layer and no cause")
    return CardRun(on_card(joined, events), tuple(plain.counters), plain.end, plain.snapshot, (*notes, *named.notes))


def _is_librarys(call: str) -> bool:
    """Return whether a call allocates by itself for cuBLAS or cuDNN: a tensor of its own would be another call."""
    return any(part in call for part in _LIBRARIES)


def _settle() -> None:
    """Free what nobody holds, libraries' workspaces too: a run is to take its own."""
    gc.collect()
    torch.cuda.synchronize()
    _torch.clear_cublas_workspaces()
    torch.cuda.empty_cache()


def _plain(
    build: Runs, steps: int, snapshot_file: str | None, snapshot: bool, around: Around, *, elsewhere: bool
) -> _Plain:
    """Run the step as it is. What was on the card before does not count.

    Raises:
        _Nothing: building put nothing on the card, and ``elsewhere`` says that it may have been meant for the CPU.
    """
    found, profile = _Plain(), _torch.memory_profile()
    place = Place()
    observer = Observer(place, real=True)
    marks = StepMarks(observer)
    _torch.record_history(stacks=snapshot_file is not None)
    before = len(_torch.history())
    held = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    def counted() -> None:
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        found.counters.append(Counters(peak[0] - held[0], peak[1] - held[1]))
        if len(found.counters) == 1 and elsewhere and not found.counters[0].reserved:
            raise _Nothing
        torch.cuda.reset_peak_memory_stats()

    def ended() -> None:
        if snapshot_file is not None:
            _torch.dump_history(snapshot_file)
        found.end = Counters(torch.cuda.memory_allocated() - held[0], torch.cuda.memory_reserved() - held[1])
        found.snapshot = _torch.memory_snapshot() if snapshot else {}
        found.history = _torch.history()[before:]

    marks.after, marks.last = counted, ended
    torch.cuda.reset_peak_memory_stats()
    with around(), recording_runs(measurement(place, "cuda")), profile:
        run_steps(build, steps, observer, marks)
    found.profile = _torch.Profile.of(profile, "cuda")
    return found
