"""Runs a step twice on the card of this process: unmodified, and under a dispatch mode that names its allocations."""

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
from memplan.trace.measure_run import StepMarks, compiled_as_torch_is, measurement, named_run
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
    """The records of a step's two runs on a card."""

    step: OnCard
    counters: tuple[Counters, ...]
    """Peaks of torch's own memory counters: during the build, and in each step."""
    end: Counters
    """Allocated and reserved bytes after the last step."""
    snapshot: dict[str, Any]
    """torch's memory snapshot at the end of the unmodified run; empty unless requested."""
    notes: tuple[str, ...]


@dataclass
class _UnmodifiedRun:
    """The records of the unmodified run, made by torch's history and profiler alone."""

    history: list[_torch.HistoryEvent] = field(default_factory=list[_torch.HistoryEvent])
    profile: _torch.Profile = field(default_factory=lambda: _torch.Profile([], [], {}))
    counters: list[Counters] = field(default_factory=list[Counters])
    end: Counters = field(default_factory=lambda: Counters(allocated=0, reserved=0))
    snapshot: dict[str, Any] = field(default_factory=dict[str, Any])


class _NothingOnCard(BaseException):
    """The build put nothing on the card. Not an Exception, so that user code does not catch it."""


def observed(
    build: Runs, steps: int, *, snapshot_file: str | None = None, snapshot: bool = False, around: Around = nullcontext
) -> CardRun:
    """Run a step on the card of this process, and return the events of torch's allocator.

    The step runs twice: unmodified, for the events; and under a dispatch mode, for the op and cause of each event.

    Args:
        build: as for `memplan.measure`. If it puts nothing on CUDA, all its tensors are created on the card.
        steps: how often the step runs.
        snapshot_file: file to which to write torch's snapshot of its memory history, if any.
        snapshot: whether to return that snapshot, too.
        around: returns the context in which the unmodified step runs.

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
                unmodified = _run_unmodified(build, steps, snapshot_file, snapshot, around, require_cuda=True)
            except _NothingOnCard:
                build = everything_on_card(build)
                notes.append(_EVERYTHING)
                unmodified = _run_unmodified(build, steps, snapshot_file, snapshot, around, require_cuda=False)
        _settle()
        torch.cuda.set_rng_state(random_state)
        before = len(_torch.history())  # torch's history still has the events of the unmodified run
        attributed = named_run(build, steps, device="cuda")
        requested = events_of(_torch.history()[before:], attributed.record).profile
        _torch.end_history()
    events = events_of(unmodified.history, unmodified.profile)
    joined = join(attributed.parts, attributed.entries, requested, events.profile, _calls_library)
    if joined.lost:
        size = format_bytes(joined.lost)
        notes.append(f"{size} of allocations could not be joined to an op: they have no layer and no cause")
    return CardRun(
        on_card(joined.parts, events),
        tuple(unmodified.counters),
        unmodified.end,
        unmodified.snapshot,
        (*notes, *attributed.notes),
    )


def _calls_library(call: str) -> bool:
    """Return whether ``call``, a name in the profiler's record, calls cuBLAS or cuDNN, which allocate workspaces."""
    return any(part in call for part in _LIBRARIES)


def _settle() -> None:
    """Free garbage and the workspaces of libraries, so that a run allocates its own."""
    gc.collect()
    torch.cuda.synchronize()
    _torch.clear_cublas_workspaces()
    torch.cuda.empty_cache()


def _run_unmodified(
    build: Runs, steps: int, snapshot_file: str | None, snapshot: bool, around: Around, *, require_cuda: bool
) -> _UnmodifiedRun:
    """Run the step unmodified, as `observed` says of its arguments. Earlier allocations on the card do not count.
    Raises _NothingOnCard: with ``require_cuda``, the build put nothing on the card."""
    run, profile = _UnmodifiedRun(), _torch.memory_profile()
    place = Place()
    observer = Observer(place, real=True)
    marks = StepMarks(observer)
    _torch.record_history(stacks=snapshot_file is not None)
    before = len(_torch.history())
    initial = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    def count_peak() -> None:
        """Append the peaks of torch's counters, without earlier allocations, and reset them."""
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        run.counters.append(Counters(peak[0] - initial[0], peak[1] - initial[1]))
        built_nothing = len(run.counters) == 1 and not run.counters[0].reserved
        if require_cuda and built_nothing:
            raise _NothingOnCard
        torch.cuda.reset_peak_memory_stats()

    def finish() -> None:
        """Save torch's counters, snapshot and history at the end of the run."""
        if snapshot_file is not None:
            _torch.dump_history(snapshot_file)
        run.end = Counters(torch.cuda.memory_allocated() - initial[0], torch.cuda.memory_reserved() - initial[1])
        run.snapshot = _torch.memory_snapshot() if snapshot else {}
        run.history = _torch.history()[before:]

    marks.after_part, marks.after_last_step = count_peak, finish
    torch.cuda.reset_peak_memory_stats()
    with around(), compiled_as_torch_is(build), recording_runs(measurement(place, "cuda")), profile:
        run_steps(build, steps, observer, marks)
    run.profile = _torch.Profile.of(profile, "cuda")
    return run
