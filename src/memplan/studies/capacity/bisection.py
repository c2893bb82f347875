"""The last place on an axis that fits, in few recordings: guessed, then closed in on from both sides."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from memplan.studies.capacity.extrapolation import MOST, Sample, by_needs, by_steps, roundest, roundness
from memplan.trace.trace import Trace

Probe = Callable[[int], Sample | None]
"""Records a place; None where that fails."""

BEGINNINGS = 8
"""How many other places are tried where the first fails."""

_FAR = 1024
"""How many times as far to look where nothing grows up to a place."""


@dataclass(frozen=True)
class Found:
    """Recordings of a search, and the places that the answer lies between."""

    samples: tuple[Sample, ...]
    """In the order in which they were recorded."""
    failed: tuple[int, ...] = ()
    """Places whose recording failed, likewise."""
    step: int = 1
    """Places work at its multiples, as far as is known."""

    @property
    def last(self) -> int:
        """Return the last place that was recorded to fit; 0 where none was."""
        return max((one.place for one in self.samples if one.fits), default=0)

    @property
    def floor(self) -> int:
        """Lower bound of the search: the last place that fits; where none does, the last that failed below all
        recordings, or 0."""
        below = min((one.place for one in self.samples), default=0)
        return self.last or max((place for place in self._ends() if place < below), default=0)

    @property
    def following(self) -> int | None:
        """Return the first place above that which was recorded not to fit, or failed though it is a multiple of the
        step; None where there is none."""
        over = [one.place for one in self.samples if not one.fits]
        return min((place for place in (*over, *self._ends()) if place > self.floor), default=None)

    def _ends(self) -> list[int]:
        return [place for place in self.failed if place % self.step == 0]


def last_fitting(
    probe: Probe,
    measure: Callable[[int], float],
    limit: int,
    start: int,
    most: int = MOST,
    fits: Callable[[Trace], bool] | None = None,
) -> Found:
    """Record places until the last one that fits and the next one are among them.

    Where a smaller place needs more than a larger one, the answer is the last place that was recorded to fit; there can
    be others that do, above it too.

    A place that fails is kept. The first to fail asks in which steps places work (`step_of`), and only multiples of
    that step are looked at from then on. One that fails though it is such a multiple counts as one that does not fit;
    where nothing below it was recorded, the search goes on above it.

    Args:
        probe: records a place, from 1 on.
        measure: of a place.
        limit: bytes.
        start: the place to begin with; where it fails, the powers of two around it.
        most: the last place to look at; it is the answer where it fits.
        fits: whether a step does, where guesses are to be made from whole steps (see `by_steps`).
    """
    search = _Search(probe, measure, limit, most, fits)
    first = next((place for place in _beginnings(min(start, most), most) if search.works(place)), None)
    place = first
    while place is not None and first is not None:
        if not search.works(place) and search.step is None:
            search.step = step_of(search.works, first, most)
        place = search.next()
    return search.found


def step_of(works: Callable[[int], bool], place: int, most: int = MOST) -> int:
    """Return the step in which places work, where the multiples of some number do, and ``place`` is one of them.

    That number divides the place. Of each prime of the place it is asked how often it can be divided out of a step so
    that the place less that step, or else with it, still works.
    """

    def moves(by: int) -> bool:
        return works(place - by) or (place + by <= most and works(place + by))

    step = place
    for prime, power in _primes(place):
        low, high, tried = 0, power, power  # the most of it first: where sizes are not what fails, that is right
        while low < high:
            low, high = (tried, high) if moves(place // prime**tried) else (low, tried - 1)
            tried = (low + high + 1) // 2
        step //= prime**low
    return step


def _beginnings(start: int, most: int) -> Iterator[int]:
    """Yield the start, then the powers of two next to it, in turns above and below."""
    yield start
    above, below = 1 << start.bit_length(), (1 << (start - 1).bit_length()) // 2
    for _ in range(BEGINNINGS // 2):
        if above <= most:
            yield above
        if below:
            yield below
        above, below = 2 * above, below // 2


def _primes(number: int) -> Iterator[tuple[int, int]]:
    """Yield the prime factors of a number, each with its power."""
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
    """The recordings so far, and the place to record next: a guess by extrapolation, else the middle."""

    probe: Probe
    measure: Callable[[int], float]
    limit: int
    most: int
    fits: Callable[[Trace], bool] | None
    step: int | None = None
    """None: not asked for, since nothing has failed."""
    seen: dict[int, Sample | None] = field(default_factory=dict)
    widths: list[int] = field(default_factory=list)
    """Distances of the bounds, each time that there were two."""

    def works(self, place: int) -> bool:
        """Return whether a place can be recorded; each is recorded once."""
        if place not in self.seen:
            self.seen[place] = self.probe(place)
        return self.seen[place] is not None

    @property
    def found(self) -> Found:
        """Return the recordings so far."""
        samples = tuple(one for one in self.seen.values() if one is not None)
        return Found(samples, tuple(place for place, one in self.seen.items() if one is None), self.step or 1)

    def next(self) -> int | None:
        """Return the place to record next; None where nothing is left to find."""
        found, step = self.found, self.step or 1
        low, high = found.floor // step, found.following  # counted in steps, as is last
        last = self.most // step if high is None else -(-high // step) - 1
        if low >= last:
            return None
        guess = self._guess(found)
        guess = None if guess is None else guess // step
        if len(found.samples) == 1 and high not in found.failed:
            return step * min(2 * low, last) if high is None else step * max(low + 1, (last + 1) // 2)
        if high is not None:
            return step * self._between(low, last + 1, guess, high in found.failed)
        if guess is not None:  # four times as far each time after the fifth that still fits
            return step * min(low + max(guess - low, 1) * 4 ** max(0, len(found.samples) - 5), last)
        # nothing grows up to here: one far place, and the search ends
        return step * min(_FAR * low, last) if low * step < _FAR**2 * found.samples[0].place else None

    def _guess(self, found: Found) -> int | None:
        bounds = found.last, found.following
        guess = None if self.fits is None else by_steps(found.samples, self.measure, self.fits, *bounds)
        return by_needs(found.samples, self.limit, self.measure, *bounds) if guess is None else guess

    def _between(self, low: int, high: int, guess: int | None, fails: bool) -> int:
        """Return a place between two bounds: the guess, unless the last two places left more than a third of them, or
        the upper bound is a place that fails, of which bytes say nothing."""
        self.widths.append(high - low)
        stalled = len(self.widths) > 2 and 3 * self.widths[-1] > self.widths[-3]
        if guess is not None and not stalled and not (fails and guess >= high - 1):
            return min(max(guess, low + 1), high - 1)
        if high > 4 * low + 4:
            return 1 << round(math.log2((low + 1) * high) / 2)
        middle = roundest(low, high)
        return low + 1 if roundness(low) >= roundness(middle) else middle
