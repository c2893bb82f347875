"""How much a step can hold from its card where workspaces are known as intervals."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator

from memplan.simulation.allocator.settings import AllocatorSettings
from memplan.simulation.on_card import drive
from memplan.trace.records import Storage
from memplan.trace.trace import Trace

_DRAWS = 6
_LARGE = 50_000
"""Storages from which on a single case is drawn: each is a simulation of the whole step."""

Share = Callable[[int, int], float]
"""(number of a workspace among those of the step in order of birth, how many there are) -> where in its interval."""


def reserved_bounds(trace: Trace, settings: AllocatorSettings) -> tuple[int, int]:
    """Return the least and the most bytes that are held from the card in the cases that were tried.

    More bytes asked for can fit the segments better, so the two ends of every interval bound nothing: also tried are
    workspaces that grow over the step, which no cached segment serves twice, and some that are drawn. The same op on
    operands of the same sizes takes the same workspace in all of a case, as a library chooses the same algorithm.
    """
    order = {key: number for number, key in enumerate(dict.fromkeys(_key(trace, s) for s in _open(trace)))}
    cases = ((True, False), (False, False), (False, True))
    draws = [drive(trace, settings, low=low, apart=apart)[1] for low, apart in cases]
    if len(order) > 1:
        for share in _shares(1 if len(trace.storages) > _LARGE else _DRAWS):
            placed = {key: share(number, len(order)) for key, number in order.items()}
            draws.append(drive(_within(trace, placed), settings, low=False)[1])
    peaks = [max((reserved for _, _, reserved in levels), default=0) for levels in draws]
    return min(peaks), max(peaks)


def _shares(count: int) -> Iterator[Share]:
    yield lambda number, total: 0.5 + 0.5 * number / (total - 1)
    for seed in range(count):
        draw = random.Random(seed)  # the same cases for the same step
        yield lambda number, total, draw=draw: draw.random()


def _open(trace: Trace) -> list[Storage]:
    return sorted((s for s in trace.counted if s.low is not None), key=lambda s: s.born)


def _key(trace: Trace, storage: Storage) -> tuple[str, int]:
    return "" if storage.op is None else trace.ops[storage.op].name, storage.bytes


def _within(trace: Trace, placed: dict[tuple[str, int], float]) -> Trace:
    storages = []
    for storage in trace.storages:
        if storage.low is not None:
            size = storage.low + round(placed[_key(trace, storage)] * (storage.bytes - storage.low))
            storage = dataclasses.replace(storage, bytes=size, low=None)
        storages.append(storage)
    return dataclasses.replace(trace, storages=tuple(storages))
