"""Measure steps that really run: bytes by the allocator's own events, seconds in alternating pairs."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from memplan import _torch
from memplan._bytes import round_to_blocks
from memplan.trace.recording.session import collector_held

Step = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Measured:
    """Allocated bytes of a step, less those that were allocated before."""

    growth_peak: int
    """Bytes at its peak."""
    growth_end: int
    """Bytes at its end."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of two steps that ran alternately. Ratios are the second's time over the first's, pair by pair."""

    pairs: int
    before: float
    """Median seconds of the first."""
    after: float
    """Median seconds of the second."""
    ratio: float
    """Median of the ratios."""
    quartiles: tuple[float, float]
    """First and third quartile of the ratios."""


class Meter:
    """Count the bytes that each of several alternating steps allocates, by the CPU allocator's events.

    Freeing other memory is not counted: what was allocated before the meter began, or by another step, may be garbage
    of a step that ran earlier. The profiler knows its size if an earlier profile saw it allocated.

    Example:
        >>> with Meter() as meter:
        ...     with meter.counting("step"):
        ...         step()
        >>> meter.measured("step").growth_peak
    """

    def __init__(self) -> None:
        self._profile = _torch.memory_profile()
        self._step_names: list[str] = []
        """Name of the step that each range belongs to, by the range's number."""
        self._record: _torch.Profile | None = None
        """What was profiled, once the meter has stopped."""

    def __enter__(self) -> Meter:
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)
        if error[0] is None:
            self._record = _torch.Profile.of(self._profile)

    @contextmanager
    def counting(self, owner: str) -> Iterator[None]:
        """Count for ``owner`` what is allocated and freed in this block. An owner can have several blocks.

        The profiler records the block as a range of time, named by a number, next to the allocations; `measured` adds
        up those in the ranges of an owner.
        """
        self._step_names.append(owner)
        with _torch.marker(str(len(self._step_names) - 1)):
            yield

    def measured(self, owner: str) -> Measured:
        """Return the bytes of the step with this name: allocations in its ranges, and their frees, there or later."""
        assert self._record is not None, "the meter has stopped"
        ranges = sorted(self._record.ranges[str(n)] for n, name in enumerate(self._step_names) if name == owner)
        level = highest = index = 0  # index: of the range that contains the event, or is the next after it
        live_addresses = set[int]()
        for address, signed_bytes, when, *_ in self._record.events:
            while index < len(ranges) and when > ranges[index][1]:
                index += 1
            in_range = index < len(ranges) and when >= ranges[index][0]
            if not (in_range if signed_bytes > 0 else address in live_addresses):
                continue
            level += signed_bytes
            highest = max(highest, level)
            if signed_bytes > 0:
                live_addresses.add(address)
            else:
                live_addresses.discard(address)
        return Measured(highest, level)


def measure_step(step: Step) -> Measured:
    """Run a step once and count the bytes that it allocates on the CPU."""
    # Python's garbage collector would free older garbage within the step.
    with collector_held(), Meter() as meter, meter.counting("step"):
        step()
    return meter.measured("step")


def storage_bytes(tensors: Iterable[torch.Tensor], device: str = "cpu") -> int:
    """Add up the bytes of the tensors' storages, each counted once.

    ``device``: only tensors of this device type count; on ``cuda`` sizes are rounded up to the allocator's blocks.
    """
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == device]
    sizes = {_torch.storage_key(storage): storage.nbytes() for storage in storages}.values()
    return sum(map(round_to_blocks, sizes)) if device == "cuda" else sum(sizes)


def compare_times(
    first: Callable[[], float], second: Callable[[], float], pairs: int = 5, known: Sequence[tuple[float, float]] = ()
) -> Times:
    """Time two steps in pairs, alternating which of them runs first.

    Args:
        first, second: run a step and return its seconds (see `timed`), without those of its preparation.
        pairs: number of pairs; nothing is warmed up.
        known: seconds of pairs that have run, which are among ``pairs``.
    """
    seconds = list(known)
    with collector_held():  # older garbage is not collected between the runs
        for number in range(len(known), pairs):
            if number % 2:
                after = second()
                seconds.append((first(), after))
            else:
                before = first()
                seconds.append((before, second()))
    ratios = [after / before for before, after in seconds]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if pairs > 1 else ratios * 3
    medians = [statistics.median(column) for column in zip(*seconds, strict=True)]
    return Times(pairs, medians[0], medians[1], statistics.median(ratios), (low, high))


def timed(step: Step, device: str = "cpu") -> float:
    """Return the seconds of a step until ``device`` has completed it, with Python's garbage collector off."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    wait = torch.get_device_module(torch.device(device)).synchronize
    try:
        wait(device)
        start = time.perf_counter()
        step()
        wait(device)
        return time.perf_counter() - start
    finally:
        if enabled:
            gc.enable()
