"""The last place on an axis that is expected to fit, by parabolas through the nearest recordings."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

from memplan.trace.trace import Trace

MOST = 1 << 40
"""A number of steps along an axis that no device holds."""


@dataclass(frozen=True)
class Sample:
    """The recording of a place on an axis."""

    place: int
    """Steps along the axis."""
    measure: float
    """What bytes grow with: a size's pixels, a batch's samples."""
    need: int
    """Bytes from the device."""
    fits: bool
    trace: Trace | None = field(default=None, repr=False, compare=False)
    """The recorded step, where it was kept."""


def by_steps(
    samples: Sequence[Sample],
    measure: Callable[[int], float],
    fits: Callable[[Trace], bool],
    low: int = 0,
    high: int | None = None,
) -> int | None:
    """Return the last place whose whole step is expected to fit; None where nothing can be expected.

    Where recordings have the same storages in the same order, the bytes of each storage are extrapolated, and ``fits``
    simulates the step that results. Another step runs between the places where that contradicts ``low`` or ``high``.

    Args:
        samples: the recordings, in order; those next to the last one count most.
        measure: of a place, which grows with it.
        fits: whether a step does.
        low: a place that fits, or 0.
        high: one that does not.
    """
    last = samples[-1]
    alike = [one for one in samples if one.trace is not None and _same_storages(one.trace, last.trace)]
    if last.trace is None or len({one.measure for one in alike}) < 2:
        return None
    trace, nearest = last.trace, _nearest(alike)
    rows = [one.trace.storages for one in nearest if one.trace is not None]
    most = _storage_law(nearest, [[s.bytes for s in row] for row in rows], measure)
    least = _storage_law(nearest, [[s.bytes if s.low is None else s.low for s in row] for row in rows], measure)

    def expected(place: int) -> bool:
        sizes = zip(trace.storages, most(place), least(place), strict=True)
        storages = [dataclasses.replace(s, bytes=b, low=None if s.low is None else min(low, b)) for s, b, low in sizes]
        return fits(dataclasses.replace(trace, storages=tuple(storages)))

    if high is not None and (expected(high) or (low and not expected(low))):
        return None
    return _last(expected, low, high)


def by_needs(
    samples: Sequence[Sample], limit: int, measure: Callable[[int], float], low: int = 0, high: int | None = None
) -> int | None:
    """Return the last place whose need is expected to stay within a limit of bytes; None where needs do not grow."""
    apart = {one.need: one for one in samples}  # the last of those with the same need
    nearest = _nearest([one for one in samples if apart[one.need] is one])
    if len(nearest) < 2:
        return None
    need = _parabola(nearest, [[one.need] for one in nearest])
    return _last(lambda place: float(need(measure(place))[0]) <= limit, low, high)


def _nearest(samples: Sequence[Sample]) -> list[Sample]:
    """Return the last sample and up to two others of other measures, nearest first."""
    found: dict[float, Sample] = {}
    for one in sorted(samples, key=lambda one: abs(one.place - samples[-1].place)):
        found.setdefault(one.measure, one)
    return list(found.values())[:3]


def _storage_law(
    samples: Sequence[Sample], rows: Sequence[Sequence[int]], measure: Callable[[int], float]
) -> Callable[[int], list[int]]:
    """Return the bytes of every storage at a place: by its parabola, or in whole strides where a model pads to them."""
    law = _parabola(samples, rows)
    places, power = [one.place for one in samples], max(1, round(math.log2(measure(2) / measure(1))))
    columns = list(zip(*rows, strict=True))
    padded = {column: padding_of(places, column, power) for column in set(columns)}
    strided = [(number, found) for number, column in enumerate(columns) if (found := padded[column]) is not None]

    def at(place: int) -> list[int]:
        sizes = [max(0, int(size)) for size in numpy.rint(law(measure(place)))]
        for number, (stride, piece) in strided:
            sizes[number] = piece * (-(-place // stride)) ** power
        return sizes

    return at


def padding_of(places: Sequence[int], sizes: Sequence[int], power: int = 1) -> tuple[int, int] | None:
    """Return the stride that places are padded to, and the bytes of one; None where sizes have no such stride.

    Args:
        places: of the recordings.
        sizes: bytes of one storage at each of them.
        power: how many dimensions grow with the place.

    Example:
        >>> padding_of([1024, 2048, 5000], [8000, 12000, 20000])
        (1000, 4000)
    """
    piece = math.gcd(*sizes) or 1
    counts = [round((size / piece) ** (1 / power)) for size in sizes]
    proportional = all(count * places[0] == counts[0] * place for place, count in zip(places, counts, strict=True))
    if proportional or min(counts) < 1 or any(c**power * piece != size for c, size in zip(counts, sizes, strict=True)):
        return None
    low = max(-(-place // count) for place, count in zip(places, counts, strict=True))
    high = min(((p - 1) // (c - 1) for p, c in zip(places, counts, strict=True) if c > 1), default=0)
    return (roundest(low - 1, high + 1), piece) if 1 < low <= high else None


def _parabola(samples: Sequence[Sample], rows: Sequence[Sequence[int]]) -> Callable[[float], Any]:
    """Return the parabolas through two or three samples by divided differences; a line where one would open downwards:
    bytes do not fall."""
    x, y = [one.measure for one in samples], numpy.array(rows, dtype=float)
    slope = (y[1] - y[0]) / (x[1] - x[0])
    bend = numpy.zeros_like(slope)
    if len(x) == 3:
        bend = numpy.maximum(((y[2] - y[0]) / (x[2] - x[0]) - slope) / (x[2] - x[1]), 0.0)
    return lambda at: y[0] + slope * (at - x[0]) + bend * (at - x[0]) * (at - x[1])


def _last(fits: Callable[[int], bool], low: int, high: int | None) -> int | None:
    """Return the last place that fits, where ``low`` does and ``high`` does not; None where every place does."""
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


def _same_storages(one: Trace, other: Trace | None) -> bool:
    """Return whether two steps make and free the same storages in the same order."""
    if other is None or len(one.storages) != len(other.storages):
        return False
    pairs = zip(one.storages, other.storages, strict=True)
    return all(a.born == b.born and a.died == b.died and (a.low is None) == (b.low is None) for a, b in pairs)


def roundest(low: int, high: int) -> int:
    """Return the number between two that the highest power of 2 or of 10 divides: what sizes are padded to, and tables
    end at.

    Example:
        >>> roundest(900, 1010), roundest(510, 520), roundest(4096, 6144)
        (1000, 512, 5120)
    """
    return max((_multiple(low, high, base) for base in (10, 2)), key=roundness)


def roundness(number: int) -> int:
    """Return the highest power of 2 or of 10 that divides a number."""
    tens = 1
    while number % (10 * tens) == 0 and number:
        tens *= 10
    return max(tens, number & -number)


def _multiple(low: int, high: int, base: int) -> int:
    """Return the largest number between two that the highest power of the base divides."""
    unit = 1
    while (high - 1) // (unit * base) * unit * base > low:
        unit *= base
    return (high - 1) // unit * unit
