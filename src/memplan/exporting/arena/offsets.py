"""Addresses for buffers whose lifetimes are known: several orders of placing them, local search on the best, stacks."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memplan.exporting.arena.lifetimes import Buffer
from memplan.exporting.arena.stacking import Stacking

ROUNDS = 400
"""Rounds of local search without a smaller arena, after which it ends."""

TRIES = 20
"""Stacks that are tried where no time is given."""
PATIENCE, BOLDNESS = 0.02, 0.1
"""By so much the target comes nearer to the best arena after a failure, in shares of the rest; and farther after one
that was found, in shares of what is between that and the smallest possible."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where each buffer begins."""

    offsets: tuple[int, ...]
    bytes: int
    """End of the last one: the size of the arena."""


def placed(buffers: Sequence[Buffer], least: int, seconds: float | None = None, rounds: int = ROUNDS) -> Placement:
    """Find addresses at which buffers that are there at once do not overlap.

    Args:
        buffers: to be placed.
        least: bytes that are there at once; an arena of that size is the smallest possible.
        seconds: time of the processor to search; None: a fixed number of rounds, the same on every machine.
        rounds: rounds without a smaller arena.

    Example:
        >>> placed([Buffer(8, 0, 1), Buffer(4, 1, 2), Buffer(8, 2, 3)], least=12).bytes
        12
    """
    meeting = [[k for k, other in enumerate(buffers) if k != n and one.meets(other)] for n, one in enumerate(buffers)]
    best: tuple[Placement, list[int]] | None = None
    for key in _ORDERS:
        order = sorted(range(len(buffers)), key=lambda n, key=key: (key(buffers[n]), n))
        made = _in_order(buffers, meeting, order)
        if best is None or made.bytes < best[0].bytes:
            best = made, order
    assert best is not None, "there are orders"
    found = _improved(buffers, meeting, best[0], best[1], least, None if seconds is None else seconds / 10, rounds)
    return _stacked(buffers, found, least, None if seconds is None else seconds * 0.9)


_ORDERS: tuple[Callable[[Buffer], tuple[int, ...]], ...] = (
    lambda one: (-one.bytes, one.first),
    lambda one: (-one.bytes * (one.last - one.first + 1), one.first),
    lambda one: (one.first - one.last, -one.bytes),
    lambda one: (one.first, -one.last),
    lambda one: (-one.last, one.first),
)
"""What the buffers are sorted by: the largest first, the largest for the longest, the longest, as they come."""


def _in_order(buffers: Sequence[Buffer], meeting: Sequence[Sequence[int]], order: Sequence[int]) -> Placement:
    """Place one buffer after the other, each as low as it can lie."""
    offsets = [-1] * len(buffers)
    end = 0
    for number in order:
        size = buffers[number].bytes
        taken = sorted(
            (offsets[other], offsets[other] + buffers[other].bytes) for other in meeting[number] if offsets[other] >= 0
        )
        at = 0
        for begin, stop in taken:
            if begin - at >= size:
                break
            at = max(at, stop)
        offsets[number] = at
        end = max(end, at + size)
    return Placement(tuple(offsets), end)


def _improved(
    buffers: Sequence[Buffer], meeting: Sequence[Sequence[int]], best: Placement, order: list[int], least: int,
    seconds: float | None, rounds: int,
) -> Placement:  # fmt: skip
    """Place what lies highest earlier, or swap two; keep what is not worse."""
    drawn, idle, until = random.Random(0), 0, None if seconds is None else time.process_time() + seconds
    current, best_order = best, order
    while current.bytes > least and len(order) > 1 and idle < rounds:
        if until is not None and time.process_time() > until:
            break
        tried = list(best_order)
        top = [n for n in tried if current.offsets[n] + buffers[n].bytes == current.bytes]
        number = drawn.choice(top if drawn.random() < 0.7 else tried)
        at = tried.index(number)
        if drawn.random() < 0.7:
            tried.insert(drawn.randrange(at + 1), tried.pop(at))
        else:
            other = drawn.randrange(len(tried))
            tried[at], tried[other] = tried[other], tried[at]
        made = _in_order(buffers, meeting, tried)
        idle = 0 if made.bytes < current.bytes else idle + 1
        if made.bytes <= current.bytes:
            current, best_order = made, tried
    return current


def _stacked(buffers: Sequence[Buffer], best: Placement, least: int, seconds: float | None) -> Placement:
    """Look for stacks within smaller arenas: the more often that fails, the nearer to the best one."""
    until, tries, share, near = None if seconds is None else time.process_time() + seconds, 0, 0.5, None
    stacking = Stacking.of(buffers) if best.bytes > least else None
    while stacking is not None and best.bytes > least:
        if (until is None and tries >= TRIES) or (until is not None and time.process_time() > until):
            break
        tries += 1
        target = min(least + int((best.bytes - least) * share), best.bytes - 1)
        rank = stacking.order(tries, near)
        offsets = stacking.within(target, rank)
        if offsets is None:
            share += (1 - share) * PATIENCE
        else:
            best = Placement(offsets, max(at + one.bytes for at, one in zip(offsets, buffers, strict=True)))
            share, near = max(share - BOLDNESS, 0.0), rank
    return best
