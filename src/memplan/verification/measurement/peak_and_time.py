"""Peak and time of what really runs: bytes by the allocator's own events, seconds in alternating pairs."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from memplan import _torch
from memplan.planning.graph.placement import blocks
from memplan.trace.recording.session import collector_held

Step = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes that a step holds above what was there when it began."""

    growth_peak: int
    """The most at any time."""
    growth_end: int
    """When it has ended."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of two steps that ran by turns. The ratios are the second's time over the first's, pair by pair."""

    pairs: int
    before: float
    """Median seconds of the first."""
    after: float
    """Median seconds of the second."""
    ratio: float
    """Median of the ratios."""
    quartiles: tuple[float, float]
    """A quarter of the ratios are below the one, a quarter above the other."""


class Meter:
    """The CPU allocator's events while several things run by turns, each counted for itself.

    That memory from before the meter began is freed cannot be seen: the profiler does not know its size.

    Example:
        >>> with Meter() as meter:
        ...     with meter.counting("step"):
        ...         step()
        >>> meter.measured("step").growth_peak
    """

    def __init__(self) -> None:
        self._profile = _torch.memory_profile()
        self._owner: list[str] = []
        """By number of a range: who was counted in it."""
        self._record: _torch.Profile | None = None

    def __enter__(self) -> Meter:
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)
        if error[0] is None:
            self._record = _torch.Profile(self._profile)

    @contextmanager
    def counting(self, owner: str) -> Iterator[None]:
        """What is allocated and freed in here counts for ``owner``."""
        self._owner.append(owner)
        with _torch.marker(str(len(self._owner) - 1)):
            yield

    def measured(self, owner: str) -> Measured:
        """What was counted for ``owner``: all events in its ranges and, outside of them, the freeing of what it
        had allocated."""
        assert self._record is not None, "the meter has stopped"
        ranges = sorted(self._record.ranges[str(n)] for n, name in enumerate(self._owner) if name == owner)
        level = highest = at = 0
        own: dict[int, int] = {}
        for address, size, when, _ in self._record.events:
            while at < len(ranges) and when > ranges[at][1]:
                at += 1
            inside = at < len(ranges) and when >= ranges[at][0]
            if not inside and (size > 0 or address not in own):
                continue
            level += size
            highest = max(highest, level)
            if size > 0:
                own[address] = size
            else:
                own.pop(address, None)
        return Measured(highest, level)


def measure_step(step: Step) -> Measured:
    """Run a step once and count what the CPU allocator gave it."""
    with collector_held(), Meter() as meter, meter.counting("step"):  # garbage of before would be freed meanwhile
        step()
    return meter.measured("step")


def storage_bytes(tensors: Iterable[torch.Tensor], place: str = "cpu") -> int:
    """Bytes of the storages that these tensors look into, each counted once.

    ``place``: on the type of device that counts; on ``cuda`` as the allocator's blocks.
    """
    found = {_torch.storage_key(one.untyped_storage()): one for one in tensors if one.device.type == place}
    sizes = (one.untyped_storage().nbytes() for one in found.values())
    return sum(map(blocks, sizes)) if place == "cuda" else sum(sizes)


def compare_times(first: Callable[[], float], second: Callable[[], float], pairs: int = 5) -> Times:
    """Run two steps in pairs, the one and the other first by turns.

    Args:
        first, second: run a step and return its seconds (see `timed`), so that what comes before it does not count.
        pairs: how many, after neither was warmed up here.
    """
    taken: list[tuple[float, float]] = []
    with collector_held():  # between the runs only what they have left is collected
        for number in range(pairs):
            if number % 2:
                after = second()
                taken.append((first(), after))
            else:
                before = first()
                taken.append((before, second()))
    ratios = [after / before for before, after in taken]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if pairs > 1 else ratios * 3
    medians = [statistics.median(seconds) for seconds in zip(*taken, strict=True)]
    return Times(pairs, medians[0], medians[1], statistics.median(ratios), (low, high))


def timed(step: Step, place: str = "cpu") -> float:
    """Seconds of one run of a step, with Python's collector held back, until the device ``place`` has done it."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    wait = torch.get_device_module(torch.device(place)).synchronize
    try:
        wait(place)
        start = time.perf_counter()
        step()
        wait(place)
        return time.perf_counter() - start
    finally:
        if enabled:
            gc.enable()
