"""How bytes grow along an axis: laws through what was recorded at a few places."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy
from numpy.typing import NDArray

Rows = Sequence[Sequence[int]]
"""Bytes of each storage, at each place."""
Measure = Callable[[int], float]
"""Of a place: what bytes grow with."""
Law = Callable[[int], NDArray[numpy.float64]]
"""Bytes of each storage at a place."""


def storage_law(places: Sequence[int], rows: Rows, measure: Measure, points: int = 3) -> Law:
    """The bytes of every storage at a place, from what it has at others, those first that matter most.

    Behind a stride or a padding a storage holds a whole number of pieces. Where its bytes at all places have a common
    divisor that makes them such numbers, it goes on in these steps; else by a polynomial.

    Example:
        >>> storage_law([1024, 2048, 5000], [[8000, 64], [12000, 128], [20000, 400]], float)(8001)  # padded to 1000
        array([36000., 697.])
    """
    law = polynomial(places, rows, measure, points)
    values = numpy.array(rows, dtype=numpy.int64)
    power = max(1, round(math.log2(measure(2) / measure(1))))  # how many dimensions grow
    pieces = numpy.maximum(numpy.gcd.reduce(values), 1)
    counts = numpy.rint((values / pieces) ** (1 / power)).astype(numpy.int64)
    whole = (counts**power * pieces == values).all(axis=0) & (values != values[0]).any(axis=0)
    columns, column = numpy.unique(counts, axis=1, return_inverse=True)
    strided: list[tuple[NDArray[numpy.bool_], int, int]] = []
    for number in numpy.unique(column[whole]):
        found = stride_of(places, columns[:, number].tolist())
        if found is not None:
            strided.append((whole & (column == number), *found))

    def at(place: int) -> NDArray[numpy.float64]:
        sizes = law(place)
        for mask, stride, ahead in strided:
            sizes = numpy.where(mask, ((place + ahead) // stride) ** power * pieces, sizes)
        return sizes

    return at


def stride_of(places: Sequence[int], counts: Sequence[int]) -> tuple[int, int] | None:
    """The stride, and what it is ahead, such that ``(place + ahead) // stride`` is the count at every place.

    A padding is ``stride - 1`` ahead. Where several would do, it is the roundest. None where a line through 0 goes
    through all of them, or no stride does.

    Example:
        >>> stride_of([1024, 2048, 5000], [2, 3, 5]), stride_of([9, 10, 12, 50], [4, 5, 6, 25])
        ((1000, 999), (2, 0))
    """
    pairs = list(zip(places, counts, strict=True))
    (first, few), (last, many) = min(pairs), max(pairs)
    if all(place * many == count * last for place, count in pairs):
        return None
    if all(count > 0 for count in counts) and many > 1:
        low = max(-(-place // count) for place, count in pairs)
        high = min((place - 1) // (count - 1) for place, count in pairs if count > 1)
        if 1 < low <= high:
            stride = roundest(low - 1, high + 1)
            return stride, stride - 1
    stride = round((last - first) / (many - few)) if many > few else 0
    aheads = [stride * count - place for place, count in pairs]
    least, most = max(aheads), min(aheads) + stride - 1
    if stride < 2 or len(pairs) < 3 or least > most:
        return None
    return stride, next((ahead for ahead in (stride - 1, 0) if least <= ahead <= most), (least + most) // 2)


def polynomial(places: Sequence[int], rows: Rows, measure: Measure, points: int = 3) -> Law:
    """The polynomials of the measure through the first ``points``, two or three, of different measures (Newton's
    divided differences); two lines that meet in the middle one where a parabola would open downwards: bytes do not
    fall."""
    known: dict[float, Sequence[int]] = {}
    for place, row in zip(places, rows, strict=True):
        if len(known) < points:
            known.setdefault(measure(place), row)
    largest = max(known)
    values = numpy.array([row for _, row in sorted(known.items())], dtype=float)
    x = [one / largest for one in sorted(known)]
    slope = (values[1] - values[0]) / (x[1] - x[0])
    if len(x) == 2:
        return lambda place: values[0] + slope * (measure(place) / largest - x[0])
    later = (values[2] - values[1]) / (x[2] - x[1])
    bend = numpy.maximum((later - slope) / (x[2] - x[0]), 0.0)

    def law(place: int) -> NDArray[numpy.float64]:
        at = measure(place) / largest
        if at >= x[1]:
            return values[1] + later * (at - x[1]) + bend * (at - x[1]) * (at - x[2])
        return values[0] + slope * (at - x[0]) + bend * (at - x[0]) * (at - x[1])

    return law


def roundest(low: int, high: int) -> int:
    """Of the numbers between two, the one that people would choose: the highest power of 2 or of 10 divides it.

    Example:
        >>> roundest(900, 1010), roundest(510, 520), roundest(4096, 6144)
        (1000, 512, 5120)
    """
    return max((_multiple(low, high, base) for base in (10, 2)), key=roundness)


def roundness(number: int) -> int:
    """The highest power of 2 or of 10 that divides a number."""
    tens = 1
    while number % (10 * tens) == 0:
        tens *= 10
    return max(tens, number & -number)


def _multiple(low: int, high: int, base: int) -> int:
    """Of the numbers between two, the largest that the highest power of the base divides."""
    unit = 1
    while (high - 1) // (unit * base) * unit * base > low:
        unit *= base
    return (high - 1) // unit * unit
