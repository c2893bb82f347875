"""Memory of the threads that a step starts, which the profiler of the thread that measures does not see.

torch's profiler records memory in the thread that starts it and, where it watches all threads, in none. Its forerunner,
which records sizes without addresses, works in each thread by itself. Everything here was seen in torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._C._autograd import _enable_profiler_legacy  # pyright: ignore[reportAttributeAccessIssue]
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

from memplan._torch.eager import MemoryEvent, Profile
from memplan._torch.patches import around_started_threads


@dataclass
class Threads:
    """What was allocated in threads that started while they were watched."""

    started: list[str] = field(default_factory=list[str])
    """Names of those that have started."""
    ended: list[list[tuple[int, int]]] = field(default_factory=list[list[tuple[int, int]]])
    """For each thread that ended, its allocations: time in ns, and bytes (negative for a release)."""


@contextlib.contextmanager
def threads_watched() -> Iterator[Threads]:
    """Record allocations in threads that start in this context; those of a thread are added when it ends."""
    threads = Threads()
    with around_started_threads(lambda: _record_thread(threads)) as threads.started:
        yield threads


@contextlib.contextmanager
def _record_thread(threads: Threads) -> Iterator[None]:
    """Record the allocations of the running thread by torch's older profiler."""
    _enable_profiler_legacy(ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig()))
    try:
        yield
    finally:
        events: Any = torch.autograd._disable_profiler_legacy()  # pyright: ignore[reportPrivateImportUsage]
        threads.ended.append(
            [
                (round(event.start_us() * 1000), event.cpu_memory_usage())
                for event in itertools.chain.from_iterable(events)
                if event.kind() == "memory_alloc" and event.cpu_memory_usage() != 0
            ]
        )


def with_threads(profile: Profile, threads: Threads) -> Profile:
    """Add the events of other threads to a profile. Their records have no addresses, so they get negative ones.

    A release is assigned to the latest allocation of the same size. Which of several that is does not change the sum.
    """
    others = [MemoryEvent(0, size, time, "", -1) for sizes in threads.ended for time, size in sizes]
    live: dict[int, dict[int, None]] = {}
    """Size -> addresses, in the order in which they were allocated."""
    events: list[MemoryEvent] = []
    for number, event in enumerate(sorted([*profile.events, *others], key=lambda event: event.time)):
        addresses = live.setdefault(abs(event.bytes), {})
        if event.bytes > 0:
            event = event._replace(address=event.address or -1 - number)
            addresses[event.address] = None
        elif event.address not in addresses:
            candidates = (address for address in reversed(addresses) if address < 0 or event.address == 0)
            event = event._replace(address=next(candidates, event.address))
        if event.bytes < 0:
            addresses.pop(event.address, None)
        events.append(event)
    return replace(profile, events=events)
