"""Bounds of the reserved bytes of a step whose workspace sizes are known as intervals."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator

from memplan.simulation.allocator.settings import AllocatorSettings
from memplan.simulation.on_card import drive
from memplan.trace.records import Storage
from memplan.trace.trace import Trace

_RANDOM_CASES = 6
_MANY_STORAGES = 50_000
"""Above this only one random case is simulated: each is a simulation of the whole step."""

Share = Callable[[int, int], float]
"""(index of a workspace in order of allocation, number of workspaces) -> position in its interval, from 0 to 1."""


def reserved_bounds(trace: Trace, settings: AllocatorSettings) -> tuple[int, int]:
    """Return the least and the most peak of reserved bytes among the simulated cases.

    Larger requests can fit the segments better, so the ends of the intervals alone do not bound the reserved bytes.
    Simulated are also workspaces that grow over the step, which cached segments never fit, and some of random sizes.
    Within a case, calls of an op on operands of the same sizes get the same workspace, as a library chooses the same
    algorithm for them.
    """
    workspaces = [storage for storage in trace.counted if storage.low is not None]
    workspaces.sort(key=lambda storage: storage.born)
    keys = list(dict.fromkeys(_key(trace, storage) for storage in workspaces))
    simulated = [
        drive(trace, settings, low=True),
        drive(trace, settings, low=False),
        drive(trace, settings, low=False, separate=True),
    ]
    if len(keys) > 1:
        for share in _shares(1 if len(trace.storages) > _MANY_STORAGES else _RANDOM_CASES):
            shares = {key: share(index, len(keys)) for index, key in enumerate(keys)}
            simulated.append(drive(_with_fixed_workspaces(trace, shares), settings, low=False))
    peaks = [max((reserved for _, _, reserved in run.levels), default=0) for run in simulated]
    return min(peaks), max(peaks)


def _shares(random_cases: int) -> Iterator[Share]:
    """Yield the cases between the ends of the intervals, each as a function from (index of a workspace, number of
    workspaces) to its share of the interval: workspaces that grow over the step, then random sizes."""
    yield lambda index, total: 0.5 + 0.5 * index / (total - 1)
    for seed in range(random_cases):
        generator = random.Random(seed)  # the same cases for the same step
        yield lambda index, total, generator=generator: generator.random()


def _key(trace: Trace, storage: Storage) -> tuple[str, int]:
    """Return (op name, most bytes) of a workspace: equal for calls of an op on operands of the same sizes."""
    return "" if storage.op is None else trace.ops[storage.op].name, storage.bytes


def _with_fixed_workspaces(trace: Trace, shares: dict[tuple[str, int], float]) -> Trace:
    """Return the trace with one size for each workspace that is known as an interval of bytes.

    ``shares``: by `_key`, where the size lies in its interval, from 0 (the least bytes) to 1 (the most).
    """
    storages = []
    for storage in trace.storages:
        if storage.low is not None:
            size = storage.low + round(shares[_key(trace, storage)] * (storage.bytes - storage.low))
            storage = dataclasses.replace(storage, bytes=size, low=None)
        storages.append(storage)
    return dataclasses.replace(trace, storages=tuple(storages))
