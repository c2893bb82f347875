"""Which place on an axis would just fit, from the recordings at hand: a guess, which is then recorded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

from memplan.trace.model import Trace

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


def guess(
    samples: Sequence[Sample], limit: int, measure: Callable[[int], float], fits: Callable[[Trace], bool] | None = None
) -> int | None:
    """The last place that is expected to fit; None where every place is.

    Where recordings have the same storages in the same order, the bytes of each follow a law of their own: the line, or
    the parabola, through what it has in the two or three recordings next to the limit. So the step at any other place
    is known without a recording, and is asked whether it fits. Else one law goes through the needs.

    Args:
        samples: at two places or more.
        limit: bytes that a need has to stay within.
        measure: of a place, which grows with it.
        fits: whether a step does; where it is left out, the needs alone are looked at.

    Returns:
        0 where not even the first place is expected to fit.
    """
    near = sorted(samples, key=lambda one: (abs(one.need - limit), one.place))[:3]
    near.sort(key=lambda one: one.measure)
    measures = [one.measure for one in near]
    traces = [one.trace for one in near if one.trace is not None]
    if fits is not None and len(traces) == len(near) and all(_alike(traces[0], other) for other in traces):
        most, least = (
            _law(measures, [[size(s) for s in trace.storages] for trace in traces]) for size in (_most, _least)
        )
        return _last(lambda at: fits(_between(traces[0], most(measure(at)), least(measure(at)))), near[-1].place)
    law = _law([one.measure for one in near], [[one.need] for one in near])
    return _last(lambda at: float(law(measure(at))[0]) <= limit, near[-1].place)


def _last(fits: Callable[[int], bool], begin: int) -> int | None:
    """The last place that fits, as if all before it did."""
    low, high = 0, max(2 * begin, 2)
    while fits(high):
        if high >= MOST:
            return None
        low, high = high, 4 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _alike(one: Trace, other: Trace) -> bool:
    """Whether two steps make and free the same storages in the same order."""
    pairs = zip(one.storages, other.storages, strict=False)
    return len(one.storages) == len(other.storages) and all(
        a.born == b.born and a.died == b.died and (a.low is None) == (b.low is None) for a, b in pairs
    )


def _most(storage: Any) -> int:
    return storage.bytes


def _least(storage: Any) -> int:
    return storage.bytes if storage.low is None else storage.low


def _between(trace: Trace, most: Any, least: Any) -> Trace:
    """A step with storages of other sizes."""
    storages = tuple(
        dataclasses.replace(storage, bytes=size, low=None if storage.low is None else min(low, size))
        for storage, size, low in zip(trace.storages, _whole(most), _whole(least), strict=True)
    )
    return dataclasses.replace(trace, storages=storages)


def _whole(sizes: Any) -> list[int]:
    return [max(0, int(size)) for size in numpy.rint(sizes)]


def _law(measures: Sequence[float], rows: Sequence[Sequence[int]]) -> Callable[[float], Any]:
    """The polynomials through two or three points each (Newton's divided differences); two lines that meet in the
    middle point where a parabola would open downwards: bytes do not fall."""
    values = numpy.array(rows, dtype=float)
    x = [one / measures[-1] for one in measures]
    first = (values[1] - values[0]) / (x[1] - x[0])
    if len(x) == 2:
        return lambda at: values[0] + first * (at / measures[-1] - x[0])
    later = (values[2] - values[1]) / (x[2] - x[1])
    bend = numpy.maximum((later - first) / (x[2] - x[0]), 0.0)

    def law(at: float) -> Any:
        place = at / measures[-1]
        if place >= x[1]:
            return values[1] + later * (place - x[1]) + bend * (place - x[1]) * (place - x[2])
        return values[0] + first * (place - x[0]) + bend * (place - x[0]) * (place - x[1])

    return law
