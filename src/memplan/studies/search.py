"""The last place on an axis that fits, in few recordings: guessed, then closed in on from both sides."""

from __future__ import annotations

from collections.abc import Callable

from memplan.studies.guess import MOST, Sample, guess
from memplan.trace.model import Trace

Probe = Callable[[int], Sample]

GUESSES = 6
"""Recordings after which every second one halves what is left, whatever is guessed: then a guess is no good."""


_FAR = 1024
"""How many times as far to look where nothing grows up to a place."""


def last_fitting(
    probe: Probe,
    measure: Callable[[int], float],
    limit: int,
    start: int,
    most: int = MOST,
    fits: Callable[[Trace], bool] | None = None,
) -> list[Sample]:
    """Every recording that was made, in order; the last place that fits and the next one are among them.

    Where a smaller place needs more than a larger one, the answer is a place that fits before one that does not; there
    can be others.

    Args:
        probe: records a place, from 1 on.
        measure: of a place.
        limit: bytes.
        start: the place to begin with.
        most: the last place to look at; it is the answer where it fits.
        fits: whether a step does, where guesses are to be made from whole steps (see `guess`).
    """
    samples: list[Sample] = []
    place: int | None = min(start, most)
    edges = 0
    while place is not None:
        samples.append(probe(place))
        place, edges = _next(samples, measure, limit, most, fits, edges)
    return samples


def bracket(samples: list[Sample]) -> tuple[int, int | None]:
    """The last place that fits before the first that does not, 0 where there is none; and the latter, if any."""
    high = min((one.place for one in samples if not one.fits), default=None)
    low = max((one.place for one in samples if one.fits and (high is None or one.place < high)), default=0)
    return low, high


def _next(
    samples: list[Sample],
    measure: Callable[[int], float],
    limit: int,
    most: int,
    fits: Callable[[Trace], bool] | None,
    edges: int,
) -> tuple[int | None, int]:
    """Where to record next, None where nothing is left to find; and how often in a row a guess was an edge of what is
    left: a right one ends the search there, so each further one is taken for less."""
    low, high = bracket(samples)
    if high == low + 1 or (high is None and low >= most):
        return None, 0
    if len(samples) == 1:
        return (max(1, high // 2) if high is not None else min(2 * low, most)), 0
    guessed = guess(samples, limit, measure, fits)
    if high is None:
        if guessed is None:  # nothing grows here: some looks far ahead, and then it is said so
            return (min(_FAR * low, most) if low < _FAR**2 * samples[0].place else None), 0
        return min(max(guessed, low + 1), most), 0
    if len(samples) >= GUESSES and len(samples) % 2 == 0:
        return (low + high) // 2, 0
    further, middle = 4**edges, max((low + high) // 2, low + 1)
    if guessed is not None and guessed <= low:
        return min(low + further, middle), edges + 1
    if guessed is None or guessed >= high - 1:
        return max(high - further, middle), edges + 1
    return guessed, 0
