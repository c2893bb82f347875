"""Prediction of the last position on an axis that fits, by parabolas through the nearest recordings."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

from memplan.trace.trace import Trace

MOST = 1 << 40
"""Upper bound of all searches: no device has memory for so many steps along an axis."""


@dataclass(frozen=True)
class Sample:
    """The recording at a position on an axis."""

    position: int
    """Steps along the axis."""
    measure: float
    """The number that bytes grow with: pixels of a size, samples of a batch."""
    need: int
    """Bytes needed from the device."""
    fits: bool
    trace: Trace | None = field(default=None, repr=False, compare=False)
    """The recorded step, for `extrapolate_storages`."""


def extrapolate_storages(
    samples: Sequence[Sample],
    measure: Callable[[int], float],
    fits: Callable[[Trace], bool],
    low: int = 0,
    high: int | None = None,
) -> int | None:
    """Predict the last position that fits by extrapolating the bytes of each storage and simulating the resulting step.

    Returns None if fewer than two recordings have the same storages in the same order as the last one, or if the
    prediction contradicts ``low`` or ``high``, so that the step must change between the positions.

    Args:
        samples: the recordings, in order; the three nearest to the last are used.
        measure: returns the number that bytes grow with, at a position.
        fits: whether a step with extrapolated bytes fits.
        low: a position that fits, or 0.
        high: a position that does not fit.
    """
    last = samples[-1]
    comparable = [sample for sample in samples if sample.trace is not None and _same_storages(sample.trace, last.trace)]
    if last.trace is None or len({sample.measure for sample in comparable}) < 2:
        return None
    trace, nearest = last.trace, _nearest(comparable)
    rows = [sample.trace.storages for sample in nearest if sample.trace is not None]
    upper = _storage_sizes(nearest, [[s.bytes for s in row] for row in rows], measure)
    lower = _storage_sizes(nearest, [[s.bytes if s.low is None else s.low for s in row] for row in rows], measure)

    def predicted_fits(position: int) -> bool:
        """Return whether the last step fits with the bytes that its storages have at a position."""
        sizes = zip(trace.storages, upper(position), lower(position), strict=True)
        storages = [
            dataclasses.replace(s, bytes=most, low=None if s.low is None else min(least, most))
            for s, most, least in sizes
        ]
        return fits(dataclasses.replace(trace, storages=tuple(storages)))

    if high is not None and (predicted_fits(high) or (low and not predicted_fits(low))):
        return None
    return _bisect(predicted_fits, low, high)


def extrapolate_need(
    samples: Sequence[Sample], limit: int, measure: Callable[[int], float], low: int = 0, high: int | None = None
) -> int | None:
    """Predict the last position that fits by extrapolating the needed bytes alone; None if they do not grow.

    Arguments: as for `extrapolate_storages`.
    """
    last_by_need = {sample.need: sample for sample in samples}
    nearest = _nearest([sample for sample in samples if last_by_need[sample.need] is sample])
    if len(nearest) < 2:
        return None
    need = _parabola(nearest, [[sample.need] for sample in nearest])
    return _bisect(lambda position: float(need(measure(position))[0]) <= limit, low, high)


def _nearest(samples: Sequence[Sample]) -> list[Sample]:
    """Return the last sample and the (up to) two nearest to it, nearest first, all with different measures."""
    by_measure: dict[float, Sample] = {}
    for sample in sorted(samples, key=lambda sample: abs(sample.position - samples[-1].position)):
        by_measure.setdefault(sample.measure, sample)
    return list(by_measure.values())[:3]


def _storage_sizes(
    samples: Sequence[Sample], rows: Sequence[Sequence[int]], measure: Callable[[int], float]
) -> Callable[[int], list[int]]:
    """Return a function from a position to the bytes of each storage: by a parabola in the measure of the position, or,
    if a model pads positions to multiples of a stride, by a step function.

    ``rows``: for each sample, the bytes of each storage.
    """
    parabolas = _parabola(samples, rows)
    positions = [sample.position for sample in samples]
    # dimensions that grow with the position: pixels are the square of an image's size, voxels the cube of a volume's
    power = max(1, round(math.log2(measure(2) / measure(1))))
    columns = list(zip(*rows, strict=True))  # for each storage, its bytes in each sample
    paddings = {column: padding_of(positions, column, power) for column in set(columns)}

    def storage_bytes(position: int) -> list[int]:
        sizes = [max(0, int(size)) for size in numpy.rint(parabolas(measure(position)))]
        for index, column in enumerate(columns):
            padding = paddings[column]
            if padding is not None:
                stride, unit = padding
                sizes[index] = unit * (-(-position // stride)) ** power  # a number of strides, rounded up
        return sizes

    return storage_bytes


def padding_of(positions: Sequence[int], sizes: Sequence[int], power: int = 1) -> tuple[int, int] | None:
    """Return the stride to whose multiples a model pads positions, and a storage's bytes per stride; None if unpadded.

    Args:
        positions: positions of the recordings.
        sizes: bytes of the storage at each of them.
        power: how many dimensions grow with the position.

    Example:
        >>> padding_of([1024, 2048, 5000], [8000, 12000, 20000])
        (1000, 4000)
    """
    unit = math.gcd(*sizes) or 1
    counts = [round((size / unit) ** (1 / power)) for size in sizes]  # of strides along a dimension
    pairs = list(zip(positions, counts, strict=True))
    proportional = all(count * positions[0] == counts[0] * position for position, count in pairs)
    exact = all(count**power * unit == size for count, size in zip(counts, sizes, strict=True))
    if proportional or not exact or min(counts) < 1:
        return None
    # strides for which each position, rounded up, is its count of strides
    low = max(-(-position // count) for position, count in pairs)
    high = min(((position - 1) // (count - 1) for position, count in pairs if count > 1), default=0)
    return (roundest(low - 1, high + 1), unit) if 1 < low <= high else None


def _parabola(samples: Sequence[Sample], rows: Sequence[Sequence[int]]) -> Callable[[float], Any]:
    """Return a function from a measure to values on parabolas through three samples, or on lines through two.

    ``rows``: the values at each sample. A parabola that opens downwards is replaced by a line: bytes do not fall.
    """
    x, y = [sample.measure for sample in samples], numpy.array(rows, dtype=float)
    slope = (y[1] - y[0]) / (x[1] - x[0])
    bend = numpy.zeros_like(slope)
    if len(x) == 3:
        bend = numpy.maximum(((y[2] - y[0]) / (x[2] - x[0]) - slope) / (x[2] - x[1]), 0.0)
    # Newton's form of the interpolating polynomial
    return lambda measure: y[0] + slope * (measure - x[0]) + bend * (measure - x[0]) * (measure - x[1])


def _bisect(fits: Callable[[int], bool], low: int, high: int | None) -> int | None:
    """Bisect for the last position that fits, where ``low`` fits and ``high`` does not; None if all fit. Without
    ``high``, positions four times as high each are tried first."""
    candidate = 2 * low or 2
    while high is None:
        if not fits(candidate):
            high = candidate
        elif candidate >= MOST:
            return None
        else:
            low, candidate = candidate, 4 * candidate
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _same_storages(trace: Trace, other: Trace | None) -> bool:
    """Return whether two steps allocate and free the same storages in the same order. ``other``: None for no step."""
    if other is None or len(trace.storages) != len(other.storages):
        return False
    pairs = zip(trace.storages, other.storages, strict=True)
    return all(a.born == b.born and a.died == b.died and (a.low is None) == (b.low is None) for a, b in pairs)


def roundest(low: int, high: int) -> int:
    """Return the number strictly between two that is divisible by the highest power of 2 or of 10.

    Models pad sizes to such numbers, and tables of embeddings end at them.

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
    """Return the largest number strictly between ``low`` and ``high`` that the highest possible power of ``base``
    divides."""
    unit = 1
    while (high - 1) // (unit * base) * unit * base > low:
        unit *= base
    return (high - 1) // unit * unit
