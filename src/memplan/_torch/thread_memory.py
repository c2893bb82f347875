"""Memory of the threads that a step starts, which the measuring thread's profiler does not record.

torch's profiler records memory only in the thread that starts it. The legacy profiler, which records sizes without
addresses, is started in each further thread. Everything here was seen in torch 2.11 and 2.13.
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
    """Threads started within `threads_watched`, and their allocations."""

    started: list[str] = field(default_factory=list[str])
    """Names of the started threads."""
    ended: list[list[tuple[int, int]]] = field(default_factory=list[list[tuple[int, int]]])
    """For each thread that ended, its allocations and frees: (time in ns, bytes; negative for a free)."""


@contextlib.contextmanager
def threads_watched() -> Iterator[Threads]:
    """Record allocations in threads that start in this context. A thread's allocations are added when the thread
    ends."""
    threads = Threads()
    with around_started_threads(lambda: _record_thread(threads)) as threads.started:
        yield threads


@contextlib.contextmanager
def _record_thread(threads: Threads) -> Iterator[None]:
    """Record the allocations of the running thread by torch's legacy profiler."""
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

    A free is assigned to the latest allocation of the same size; among several, the choice does not change the sum.
    """
    others = [
        MemoryEvent(address=0, bytes=size, time=time, mark="", call=-1)
        for sizes in threads.ended
        for time, size in sizes
    ]
    live: dict[int, dict[int, None]] = {}
    """Size -> addresses, in the order in which they were allocated."""
    events: list[MemoryEvent] = []
    for number, event in enumerate(sorted([*profile.events, *others], key=lambda event: event.time)):
        addresses = live.setdefault(abs(event.bytes), {})
        is_of_thread = event.address == 0
        if event.bytes > 0:
            event = event._replace(address=-1 - number if is_of_thread else event.address)
            addresses[event.address] = None
        else:
            if event.address not in addresses:  # freed in another thread than allocated
                candidates = (address for address in reversed(addresses) if address < 0 or is_of_thread)
                event = event._replace(address=next(candidates, event.address))
            addresses.pop(event.address, None)
        events.append(event)
    return replace(profile, events=events)
