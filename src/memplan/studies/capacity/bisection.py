"""The last place on an axis that fits, in few recordings: guessed, then closed in on from both sides."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from memplan.studies.capacity.extrapolation import MOST, Sample, between, by_needs, by_steps, chunk_of
from memplan.studies.capacity.growth_laws import roundest, roundness
from memplan.trace.trace import Trace

Probe = Callable[[int], Sample | None]
"""Records a place; None where that fails."""

BEGINNINGS = 8
"""How many other places are tried where the first fails."""

_FAR = 1024
"""How many times as far to look where nothing grows up to a place."""


@dataclass(frozen=True)
class Found:
    """What a search recorded, and between which places the answer lies."""

    samples: tuple[Sample, ...]
    """In the order in which they were recorded."""
    failed: tuple[int, ...] = ()
    """Places whose recording failed, likewise."""
    step: int = 1
    """Places work at its multiples, as far as is known."""

    @property
    def last(self) -> int:
        """The last place that was recorded to fit; 0 where none was."""
        return max((one.place for one in self.samples if one.fits), default=0)

    @property
    def floor(self) -> int:
        """What is left to look at lies above it: the last place that fits; where none does, the last that failed below
        all that were recorded, or 0."""
        below = min((one.place for one in self.samples), default=0)
        return self.last or max((place for place in self._ends() if place < below), default=0)

    @property
    def following(self) -> int | None:
        """The first place above that which was recorded not to fit, or failed though it is a multiple of the step; None
        where there is none."""
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
        fits: whether a step does, where guesses are to be made from whole steps (see `guess`).
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
    """The step in which places work, where the multiples of some number do, and ``place`` is one of them.

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
    """The start, then the powers of two next to it, in turns above and below."""
    yield start
    above, below = 1 << start.bit_length(), (1 << (start - 1).bit_length()) // 2
    for _ in range(BEGINNINGS // 2):
        if above <= most:
            yield above
        if below:
            yield below
        above, below = 2 * above, below // 2


def _primes(number: int) -> Iterator[tuple[int, int]]:
    """Its prime factors, each with its power."""
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
    """What is known so far, and where to look next."""

    probe: Probe
    measure: Callable[[int], float]
    limit: int
    most: int
    fits: Callable[[Trace], bool] | None
    step: int | None = None
    """None: not asked for, since nothing has failed."""
    seen: dict[int, Sample | None] = field(default_factory=dict)
    widths: list[int] = field(default_factory=list)
    """How much was left between two bounds, each time."""
    gaps: list[int] = field(default_factory=list)
    """The same where steps at the two bounds are others, since the middle was last tried."""
    edges: int = 0
    """How often in a row a guess was at a bound: a right one ends the search, so each further one is taken for less."""

    def works(self, place: int) -> bool:
        """Whether a place can be recorded; each is recorded once."""
        if place not in self.seen:
            self.seen[place] = self.probe(place)
        return self.seen[place] is not None

    @property
    def found(self) -> Found:
        """What was recorded."""
        samples = tuple(one for one in self.seen.values() if one is not None)
        return Found(samples, tuple(place for place, one in self.seen.items() if one is None), self.step or 1)

    def next(self) -> int | None:
        """The place to record next; None where nothing is left to find."""
        found, step = self.found, self.step or 1
        samples, low = found.samples, found.floor // step  # counted in steps, as are high and last
        first = samples[0].place
        high = None if found.following is None else -(-found.following // step)
        last = self.most // step if high is None else high - 1
        if low >= last:
            return None
        same = next((n for n, one in enumerate(reversed(samples)) if one.fits != samples[-1].fits), len(samples))
        straight = high is not None and same > 1 and len(samples) > 3
        bounds = found.last, found.following, straight
        guessed = None
        if self.fits is not None:
            guessed = by_steps(samples, self.measure, self.fits, *bounds)
            if guessed is None and high is not None and found.last and found.following not in found.failed:
                return step * self._apart(low, high, found)
        if guessed is None:
            guessed = by_needs(samples, self.limit, self.measure, *bounds)
        guessed = None if guessed is None else guessed // step
        if high is not None:
            return step * self._between(low, high, guessed, same, found)
        if len(samples) == 1:
            return step * min(2 * low, last)
        if guessed is not None:
            return step * min(low + max(guessed - low, 1) * 4 ** max(0, same - 5), last)
        # nothing grows here: some looks far ahead, and then it is said so
        return step * min(_FAR * low, last) if low * step < _FAR**2 * first else None

    def _apart(self, low: int, high: int, found: Found) -> int:
        """A place between one that fits and one that does not, which are other steps: a loop takes more turns, a row is
        padded once more, another kernel runs. The needs say about where, and it is mostly at a round number."""
        assert found.following is not None, "it is the second of the two"
        self.widths.clear()
        self.gaps.append(high - low)
        step, turn = self.step or 1, chunk_of(found.samples)
        at = between(found.samples, self.limit, self.measure, found.last, found.following) // step
        self.edges = self.edges + 1 if at in (low, high - 1) else 0
        if self.edges > 1 or (len(self.gaps) > 3 and 2 * self.gaps[-1] >= self.gaps[-4]):
            self.gaps.clear()
            if roundness(low) >= roundness(_round(low, high)):
                return low + 1
            return _round(low, high) if high > 4 * low + 4 else roundest(*_middle_half(low, high))
        if turn is None or turn == step or turn % step:
            reach = max(1, min(at - low, high - at) // 8)
            return roundest(max(low, at - reach), min(high, at + reach + 1))
        turn //= step
        if low // turn == (high - 1) // turn:
            return _round(low, high) if low % turn else low + 1  # where the last turn ends, the next one is too much
        return max(at // turn, low // turn + 1) * turn

    def _between(self, low: int, high: int, guessed: int | None, same: int, found: Found) -> int:
        """A place between one that fits and one that does not; ``same``: how many of the latest did one of these."""
        latest, middle = found.samples[-1], _round(low, high)
        if found.following in found.failed and (guessed is None or guessed >= high - 1):
            # bytes do not tell where places begin to fail: mostly it is at a round number
            ended = latest.place == low * (self.step or 1) and roundness(low) >= roundness(middle)
            return low + 1 if ended else middle
        if len(found.samples) == 1:
            return max(low + 1, high // 2)
        self.widths.append(high - low)
        slow = len(self.widths) > 2 and 2 * self.widths[-1] >= self.widths[-3]
        if guessed is None or (slow and same < 2):
            self.edges = 0
            return middle
        inside = low < guessed < high - 1
        if inside and same < 4:
            self.edges = 0
            return guessed
        # one that is not where it was guessed several times is sought beyond, each time four times as far
        times, self.edges = (4 ** (same - 3), 0) if inside else (4**self.edges, self.edges + 1)
        half = middle if high > 4 * low + 4 else max((low + high) // 2, low + 1)
        if guessed <= low or (inside and latest.fits):
            return min(low + times * max(guessed - low, 1), half)
        return max(high - times * max(high - guessed, 1), half)


def _round(low: int, high: int) -> int:
    """A round number between two, at the middle of their magnitudes where these differ: what sizes are padded to, and
    tables end at."""
    return 1 << round(math.log2((low + 1) * high) / 2) if high > 4 * low + 4 else roundest(low, high)


def _middle_half(low: int, high: int) -> tuple[int, int]:
    quarter = (high - low) // 4
    return low + quarter, high - quarter
