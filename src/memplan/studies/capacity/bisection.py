"""Search for the last position on an axis that fits, in few recordings, by extrapolation or else by bisection."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from memplan.studies.capacity.extrapolation import (
    MOST,
    Sample,
    extrapolate_need,
    extrapolate_storages,
    roundest,
    roundness,
)
from memplan.trace.trace import Trace

Probe = Callable[[int], Sample | None]
"""Records the step at a position; None if that fails."""

BEGINNINGS = 8
"""How many other positions to record if the first fails."""

_FAR = 1024
"""Factor by which to go up if the need does not grow."""


@dataclass(frozen=True)
class SearchResult:
    """Recordings of a search, and the bounds that they give."""

    samples: tuple[Sample, ...]
    """Successful recordings, in order of the search."""
    failed: tuple[int, ...] = ()
    """Positions whose recording failed, in order of the search."""
    step: int = 1
    """Only multiples of it can be recorded, as far as is known."""

    @property
    def last(self) -> int:
        """The last position that fits, 0 if none does."""
        return max((sample.position for sample in self.samples if sample.fits), default=0)

    @property
    def floor(self) -> int:
        """Lower bound of the search: the last position that fits, else the last failure below all recordings, or 0."""
        lowest = min((sample.position for sample in self.samples), default=0)
        return self.last or max((position for position in self._failed_multiples() if position < lowest), default=0)

    @property
    def following(self) -> int | None:
        """Upper bound of the search: the first position above ``floor`` that does not fit or fails; None if there is
        none.

        Failures at positions that are no multiple of ``step`` do not count.
        """
        too_large = [sample.position for sample in self.samples if not sample.fits] + self._failed_multiples()
        return min((position for position in too_large if position > self.floor), default=None)

    def _failed_multiples(self) -> list[int]:
        """Return the positions that failed although they are multiples of ``step``."""
        return [position for position in self.failed if position % self.step == 0]


def last_fitting(
    probe: Probe,
    measure: Callable[[int], float],
    limit: int,
    start: int,
    most: int = MOST,
    fits: Callable[[Trace], bool] | None = None,
) -> SearchResult:
    """Record positions until both the last position that fits and the next position are recorded.

    Positions are whole numbers from 1 on: values of an axis, or values divided by a number. If the need is not
    monotonic, the answer is the last recorded position that fits; others may fit, even above it.

    The first position whose recording fails starts a search for the step whose multiples can be recorded (`step_of`);
    from then on only these are recorded. A multiple that fails counts as too large, or, below all successful
    recordings, as too small.

    Args:
        probe: records the step at a position; returns None if that fails.
        measure: returns the number that bytes grow with, at a position.
        limit: bytes that fit.
        start: the first position to record; if it fails, the powers of two around it follow.
        most: the last position to consider, and the answer if it fits.
        fits: whether an extrapolated step fits; with it, guesses come from steps whose storages are extrapolated (see
            `extrapolate_storages`), else from extrapolated bytes.
    """
    search = _Search(probe, measure, limit, most, fits)
    for first in _first_positions(min(start, most), most):
        if search.works(first):
            break
    else:
        return search.result
    position: int | None = first
    while position is not None:
        if not search.works(position) and search.step is None:
            search.step = step_of(search.works, first, most)
        position = search.next()
    return search.result


def step_of(works: Callable[[int], bool], position: int, most: int = MOST) -> int:
    """Return the step whose multiples work, assuming that there is such a step and that ``position`` works: that the
    step can be recorded at it, as ``works(position)`` says.

    The step divides ``position``. For each prime factor of ``position``, a bisection over its power finds the smallest
    divisor by which ``position`` can be moved down, or else up, and still work.
    """

    def moves(distance: int) -> bool:
        """Return whether the position that far below or above works, too."""
        return works(position - distance) or (position + distance <= most and works(position + distance))

    step = position
    for prime, power in _prime_powers(position):
        # the whole power first: it works where failures have nothing to do with divisibility
        low, high, middle = 0, power, power
        while low < high:
            low, high = (middle, high) if moves(position // prime**middle) else (low, middle - 1)
            middle = (low + high + 1) // 2
        step //= prime**low
    return step


def _first_positions(start: int, most: int) -> Iterator[int]:
    """Yield the start, then the next powers of two, alternately above and below."""
    yield start
    above, below = 1 << start.bit_length(), (1 << (start - 1).bit_length()) // 2
    for _ in range(BEGINNINGS // 2):
        if above <= most:
            yield above
        if below:
            yield below
        above, below = 2 * above, below // 2


def _prime_powers(number: int) -> Iterator[tuple[int, int]]:
    """Yield (prime, power) for each prime factor of a number."""
    prime = 2
    while number > 1:
        if prime * prime > number:
            prime = number
        power = 0
        while number % prime == 0:
            number, power = number // prime, power + 1
        if power:
            yield prime, power
        prime += 1


@dataclass
class _Search:
    """The recordings so far, and the choice of the position to record next."""

    probe: Probe
    measure: Callable[[int], float]
    """Returns the number that bytes grow with, at a position."""
    limit: int
    """Bytes that fit."""
    most: int
    """Last position."""
    fits: Callable[[Trace], bool] | None
    step: int | None = None
    """None until a recording fails."""
    recordings: dict[int, Sample | None] = field(default_factory=dict)
    """By position; None if the recording failed."""
    widths: list[int] = field(default_factory=list)
    """Distances between the bounds so far, in steps."""

    def works(self, position: int) -> bool:
        """Return whether a position can be recorded. Each is recorded once."""
        if position not in self.recordings:
            self.recordings[position] = self.probe(position)
        return self.recordings[position] is not None

    @property
    def result(self) -> SearchResult:
        """The result so far."""
        samples = tuple(sample for sample in self.recordings.values() if sample is not None)
        failed = tuple(position for position, sample in self.recordings.items() if sample is None)
        return SearchResult(samples, failed, self.step or 1)

    def next(self) -> int | None:
        """Return the position to record next; None when the search is over."""
        result, step = self.result, self.step or 1
        low, high = result.floor // step, result.following  # low and last count steps, high is a position
        last = self.most // step if high is None else -(-high // step) - 1
        if low >= last:
            return None
        bounds = result.last, result.following
        guess = None if self.fits is None else extrapolate_storages(result.samples, self.measure, self.fits, *bounds)
        if guess is None:
            guess = extrapolate_need(result.samples, self.limit, self.measure, *bounds)
        guess = None if guess is None else guess // step
        if len(result.samples) == 1 and high not in result.failed:
            return step * min(2 * low, last) if high is None else step * max(low + 1, (last + 1) // 2)
        if high is not None:
            return step * self._between(low, last + 1, guess, high in result.failed)
        if guess is not None:  # after five recordings that fit, overshoot the guess four times as far each time
            return step * min(low + max(guess - low, 1) * 4 ** max(0, len(result.samples) - 5), last)
        # the need does not grow: jump up, and give up beyond _FAR**2 times the first position
        return step * min(_FAR * low, last) if low * step < _FAR**2 * result.samples[0].position else None

    def _between(self, low: int, high: int, guess: int | None, fails: bool) -> int:
        """Return a position between two bounds: the guess if it can be trusted, else one that divides the interval.

        The guess is not trusted if the last two recordings left more than a third of the interval. Nor is a guess next
        to an upper bound that could not be recorded (``fails``): bytes do not tell where recordings fail.

        A wide interval is divided at a power of two near its geometric mean, a narrow one at its roundest position. If
        the lower bound is at least as round, it is likely the answer: the position after it is recorded to prove that.

        Positions are in units of the step.
        """
        self.widths.append(high - low)
        stalled = len(self.widths) > 2 and 3 * self.widths[-1] > self.widths[-3]
        if guess is not None and not stalled and not (fails and guess >= high - 1):
            return min(max(guess, low + 1), high - 1)
        if high > 4 * low + 4:
            return 1 << round(math.log2((low + 1) * high) / 2)
        middle = roundest(low, high)
        return low + 1 if roundness(low) >= roundness(middle) else middle
