"""What torch's CPU allocator says, read without memplan: the independent source that predictions are held against."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch._C._profiler import _EventType  # the profiler's raw events have no public reader


@contextmanager
def _garbage_left() -> Iterator[None]:
    """What is garbage before is not freed in here. To collect it first would take a second, with all that is loaded."""
    enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()


def allocations(run: Callable[[], Any]) -> list[int]:
    """The allocator's events while ``run()`` runs, in order: bytes, negative where they are released."""
    # not torch.profiler.profile: where it keeps events, it makes an object of each, which takes most of the time
    with _garbage_left(), torch.autograd.profiler.profile(use_kineto=True, profile_memory=True) as profile:
        run()
    events: list[tuple[int, int]] = []
    stack = list(profile.kineto_results.experimental_event_tree())  # pyright: ignore[reportOptionalMemberAccess]  # it ran
    while stack:
        event = stack.pop()
        if event.tag == _EventType.Allocation:
            events.append((event.start_time_ns, cast(Any, event.extra_fields).alloc_size))
        stack.extend(event.children)
    return [size for _, size in sorted(events)]


def peak_of(sizes: list[int]) -> int:
    """The highest running sum."""
    level = highest = 0
    for size in sizes:
        level += size
        highest = max(highest, level)
    return highest


def collecting(build: Callable[[], Callable[[], Any]]) -> Callable[[], Callable[[], None]]:
    """The same step, after which garbage goes, as in a recording: cycles that the first step leaves are no step's."""

    def collected() -> Callable[[], None]:
        step = build()

        def run() -> None:
            step()
            gc.collect()

        return run

    return collected


def measured_peak(build: Callable[[], Callable[[], Any]], steps: int = 2) -> int:
    """Bytes at the peak of build and steps, as the allocator saw them."""

    def run() -> None:
        step = build()
        for _ in range(steps):
            step()

    return peak_of(allocations(run))
