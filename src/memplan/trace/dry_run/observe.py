"""In the process that sees the card: run the step twice and make a Trace of it."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from memplan import _torch
from memplan._bytes import format_bytes
from memplan.devices import Device
from memplan.dry.card import DRIVER_LOG, newest_binary
from memplan.errors import DeviceError
from memplan.trace.dry_run.history import Events, events_of, on_card
from memplan.trace.dry_run.reads import Reads
from memplan.trace.dry_run.residence import everything_on_card
from memplan.trace.measure_run import Named, StepMarks, named_run
from memplan.trace.recording.boundaries import Runs
from memplan.trace.recording.join_events import join
from memplan.trace.recording.observer import Observer
from memplan.trace.recording.place import Place
from memplan.trace.recording.session import random_kept, run_steps, undisturbed
from memplan.trace.records import Assumption, Counters
from memplan.trace.trace import Trace

DRY = (
    "a dry run: torch's own code chose and allocated everything, but no kernel computed anything; losses and other "
    "results are zeros or what lay there before"
)
_EVERYTHING = "build names CUDA nowhere, so everything was made on the card"
_LIBRARIES = ("cudnn", "convolution", "mm", "addmv", "dot", "linear", "matmul")


@dataclass
class _Plain:
    """What a run gave that nothing but torch's history and profiler watched."""

    events: Events
    profile: _torch.Profile
    counters: list[Counters] = field(default_factory=list[Counters])


class _Nothing(BaseException):
    """Building put nothing on the card. Not an Exception: it goes through the user's code."""


def observe(build: Runs, card: Device, steps: int, snapshot: str | None) -> Trace:
    """Run a step on the card of this process and return what torch's allocator did.

    Args:
        build: as for `memplan.measure`.
        card: what the process sees.
        steps: how often the step runs.
        snapshot: a file that torch's own snapshot of the history is written to, with stacks.

    Raises:
        StepError: ``build`` or the step raised.
        DeviceError: the card is not there, or torch has no code for it.
    """
    check_card(card)
    notes = [DRY]
    reads = Reads()
    with undisturbed(cuda=True), _torch.HostValues():
        with random_kept():
            try:
                plain = _plain(build, steps, snapshot, reads, elsewhere=True)
            except _Nothing:
                build = everything_on_card(build)
                notes.append(_EVERYTHING)
                plain = _plain(build, steps, snapshot, reads, elsewhere=False)
        gc.collect()
        _torch.clear_cublas_workspaces()
        torch.cuda.empty_cache()
        before = len(_torch.history())
        named = named_run(build, steps, device="cuda")
    requested = events_of(_torch.history()[before:], named.record).profile
    return _joined(named, requested, plain, card, notes, reads)


def _joined(named: Named, seen: _torch.Profile, plain: _Plain, card: Device, notes: list[str], reads: Reads) -> Trace:
    joined = join(named.parts, named.observer.ledger.entries, seen, plain.events.profile, _is_librarys)
    found = on_card(joined, plain.events)
    if joined.lost:
        size = format_bytes(joined.lost)
        notes.append(f"{size} of allocations could not be joined to an op: they have no layer and no cause")
    parts = found.joined
    return Trace(
        "dry", card.name, torch.__version__, parts.ops, parts.storages, parts.layers, parts.steps, parts.end,
        (*reads.assumptions(), *not_known()), (*notes, *named.notes), found.calls, forms=parts.forms,
        returned=parts.returned, counters=tuple(plain.counters),
    )  # fmt: skip


def _is_librarys(call: str) -> bool:
    """Return whether a call allocates by itself for cuBLAS or cuDNN: a tensor of its own would be another call."""
    return any(part in call for part in _LIBRARIES)


def check_card(card: Device) -> None:
    """See that the card is there, and tell it which code it runs.

    Raises:
        DeviceError: the card is not there, or torch has no code for it.
    """
    if not torch.cuda.is_available():
        raise DeviceError(
            f"torch {torch.__version__} does not see the emulated card",
            expected="a CUDA build of torch that loads it",
            do="Report it, with the versions of torch and of the C library",
        )
    built = tuple((int(name[3:-1]), int(name[-1])) for name in _architectures(torch.cuda.get_arch_list()))
    binary = newest_binary(card.architecture, built)
    if not binary:
        raise DeviceError(
            f"torch {torch.__version__} has no code for {card.name} (compute capability "
            f"{'.'.join(map(str, card.architecture))})",
            expected=f"a card that it was built for: {', '.join(torch.cuda.get_arch_list())}",
            do="Take an older torch, or another card",
        )
    ctypes.CDLL(None).memplan_dry_binary(binary)


def _architectures(names: Sequence[str]) -> list[str]:
    return [name for name in names if name.startswith("sm_") and name[3:].isdigit()]


def _plain(build: Runs, steps: int, snapshot: str | None, reads: Reads, *, elsewhere: bool) -> _Plain:
    """Run the step as it is.

    Raises:
        _Nothing: building put nothing on the card, and ``elsewhere`` says that it may have been meant for the CPU.
    """
    profile, counters, history = _torch.memory_profile(), list[Counters](), list[_torch.HistoryEvent]()
    observer = Observer(Place(), real=True)
    marks = StepMarks(observer)

    def counted() -> None:
        torch.cuda.synchronize()
        counters.append(Counters(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
        if len(counters) == 1 and elsewhere and not counters[0].reserved:
            raise _Nothing
        torch.cuda.reset_peak_memory_stats()

    def ended() -> None:
        if snapshot is not None:
            _torch.dump_history(snapshot)
        history.extend(_torch.history())

    marks.after, marks.last = counted, ended
    torch.cuda.init()
    _torch.record_history(stacks=snapshot is not None)
    with reads.noted(), profile:
        run_steps(build, steps, observer, marks)
    record = _torch.Profile.of(profile, "cuda")
    return _Plain(events_of(history, record), record, counters)


def not_known() -> tuple[Assumption, ...]:
    """Return what the emulated driver was asked for and did not know, by the file that it notes that in."""
    path = os.environ.get(DRIVER_LOG)
    if path is None or not os.path.exists(path):
        return ()
    with open(path, encoding="utf-8") as file:
        said = [line.strip() for line in file if line.startswith(("assumed: ", "refused: "))]
    return tuple(Assumption("dry", text.removeprefix("assumed: "), None) for text in dict.fromkeys(said))
