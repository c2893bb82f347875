"""Which place on an axis would just fit, from the recordings at hand: a guess, which is then recorded."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

from memplan.studies.capacity.growth_laws import polynomial, storage_law, stride_of
from memplan.trace.records import Storage
from memplan.trace.trace import Trace

MOST = 1 << 40
"""A number of steps along an axis that no device holds."""


@dataclass(frozen=True)
class Sample:
    """What was recorded at a place on an axis."""

    place: int
    """How many steps along the axis."""
    measure: float
    need: int
    """Bytes from the device."""
    fits: bool
    trace: Trace | None = field(default=None, repr=False, compare=False)
    """The step, where it is known."""


def by_steps(
    samples: Sequence[Sample],
    measure: Callable[[int], float],
    fits: Callable[[Trace], bool],
    low: int = 0,
    high: int | None = None,
    straight: bool = False,
) -> int | None:
    """The last place that is expected to fit, by whole steps; None where every place is, or nothing can be expected.

    Where recordings have the same storages in the same order, the bytes of each follow a law of their own
    (`storage_law`). So the step at any other place is known without a recording, and is asked whether it fits. Where
    that is not what was recorded at ``low`` or ``high``, it is another step there, and nothing can be expected.

    Args:
        samples: what was recorded, in order; what is next to the last one counts most.
        measure: of a place, which grows with it.
        fits: whether a step does.
        low: a place that fits, or 0.
        high: one that does not.
        straight: take lines through the last two recordings, not parabolas through three.

    Returns:
        A place from ``low`` up to the one before ``high``; 0 where not even the first place is expected to fit.
    """
    alike = _alike(_nearest(samples, straight), samples[-1].place)
    if not alike:
        return None
    places, traces = [one.place for one in alike], [one.trace for one in alike if one.trace is not None]
    most, least = (
        storage_law(places, [[size(s) for s in trace.storages] for trace in traces], measure, 2 if straight else 3)
        for size in (_most, _least)
    )

    def expected(at: int) -> bool:
        return fits(_with_sizes(traces[0], most(at), least(at)))

    if high is not None and (expected(high) or (low and not expected(low))):
        return None
    return _last(expected, low, high)


def by_needs(
    samples: Sequence[Sample],
    limit: int,
    measure: Callable[[int], float],
    low: int = 0,
    high: int | None = None,
    straight: bool = False,
) -> int | None:
    """As `by_steps`, by one law through the needs, which stay within a limit of bytes."""
    apart = {one.need: one for one in samples}  # the last of those with the same need
    near = [one for one in _nearest(samples, straight) if apart[one.need] is one]
    if len({one.measure for one in near}) < 2:
        return None
    law = polynomial([one.place for one in near], [[one.need] for one in near], measure, 2 if straight else 3)
    return _last(lambda at: float(law(at)[0]) <= limit, low, high)


def between(samples: Sequence[Sample], limit: int, measure: Callable[[int], float], low: int, high: int) -> int:
    """Where between two recorded places, of which the first alone fits, the needs reach a limit.

    By a parabola through the two and a third one that is not next to either. Where there is none, by a line; or by the
    square where the two are far apart: where that is wrong, it gives a third one.
    """
    ends = [next(one for one in samples if one.place == place) for place in (low, high)]
    first, last = (one.measure for one in ends)
    apart = [one for one in samples if min(abs(one.measure - first), abs(one.measure - last)) >= (last - first) / 8]
    apart = sorted(apart, key=lambda one: abs(one.need - limit))[:1]
    if not apart and high > 4 * low:
        steepness = (ends[1].need - ends[0].need) / (last**2 - first**2)
        return _last(lambda at: ends[0].need + steepness * (measure(at) ** 2 - first**2) <= limit, low, high) or low
    known = [*ends, *apart]
    law = polynomial([one.place for one in known], [[one.need] for one in known], measure, len(known))
    return _last(lambda at: float(law(at)[0]) <= limit, low, high) or low


def chunk_of(samples: Sequence[Sample]) -> int | None:
    """How many places a model takes at a time, where it runs in a loop over them: each turn makes as many storages.

    None where the numbers of storages tell nothing of the kind.
    """
    counts = {one.place: len(one.trace.storages) for one in samples if one.trace is not None}
    first, last = min(counts), max(counts)
    more = {place: count - counts[first] for place, count in counts.items()}
    turn = math.gcd(*more.values())
    if len({*more.values()}) < 3 or more[last] <= 0:  # of two numbers any chunk is true
        return None
    begun = round(first * more[last] / (turn * (last - first)))  # turns up to the first place, one more or less
    for turns in range(max(1, begun - 1), begun + 3):
        found = stride_of(list(more), [count // turn + turns for count in more.values()])
        if found is not None and found[1] == found[0] - 1:
            return found[0]
    return None


def _nearest(samples: Sequence[Sample], straight: bool) -> list[Sample]:
    """The samples, those first that are next to the last one, or that were recorded last."""
    near = sorted(samples, key=lambda one: abs(one.place - samples[-1].place))
    return [*samples[:-3:-1], *(one for one in near if one not in samples[-2:])] if straight else near


def _last(fits: Callable[[int], bool], low: int, high: int | None) -> int | None:
    """The last place that fits, where ``low`` does and ``high`` does not."""
    reach = 2 * low or 2
    while high is None:
        if not fits(reach):
            high = reach
        elif reach >= MOST:
            return None
        else:
            low, reach = reach, 4 * reach
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _alike(samples: Sequence[Sample], place: int) -> list[Sample]:
    """Those with the same storages, in their order; where there are several such groups, the one with two samples next
    to the place. None where no two are alike."""
    groups: list[list[Sample]] = []
    for one in samples:
        group = next((known for known in groups if _same_storages(known[0].trace, one.trace)), None)
        if group is None:
            groups.append([one])
        elif one.measure not in {other.measure for other in group}:
            group.append(one)
    pairs = [group for group in groups if len(group) > 1]
    return min(pairs, key=lambda group: sorted(abs(one.place - place) for one in group)[1], default=[])


def _same_storages(one: Trace | None, other: Trace | None) -> bool:
    """Whether two steps make and free the same storages in the same order."""
    if one is None or other is None or len(one.storages) != len(other.storages):
        return False
    pairs = zip(one.storages, other.storages, strict=True)
    return all(a.born == b.born and a.died == b.died and (a.low is None) == (b.low is None) for a, b in pairs)


def _most(storage: Storage) -> int:
    return storage.bytes


def _least(storage: Storage) -> int:
    return storage.bytes if storage.low is None else storage.low


def _with_sizes(trace: Trace, most: Any, least: Any) -> Trace:
    """A step with storages of other sizes."""
    storages = tuple(
        dataclasses.replace(storage, bytes=size, low=None if storage.low is None else min(low, size))
        for storage, size, low in zip(trace.storages, _whole(most), _whole(least), strict=True)
    )
    return dataclasses.replace(trace, storages=storages)


def _whole(sizes: Any) -> list[int]:
    return [max(0, int(size)) for size in numpy.rint(sizes)]
