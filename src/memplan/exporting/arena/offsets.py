"""Choose the offsets of buffers with known lifetimes in an arena that is as small as possible."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memplan.exporting.arena.lifetimes import Buffer
from memplan.exporting.arena.stacking import Stacking

ROUNDS = 400
"""Rounds without a smaller arena after which local search ends."""

TRIES = 20
"""Stacking attempts without a time limit."""
RISE_AFTER_FAILURE, DROP_AFTER_SUCCESS = 0.02, 0.1
"""The target of stacking lies at a share of the way from the smallest possible arena to the best so far. A failure
raises the share by the former part of what is left to 1; a success lowers it by the latter."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where each buffer begins."""

    offsets: tuple[int, ...]
    bytes: int
    """Size of the arena."""


def choose_offsets(
    buffers: Sequence[Buffer], least: int, seconds: float | None = None, rounds: int = ROUNDS
) -> Placement:
    """Choose offsets at which buffers that are live at once do not overlap.

    Buffers are placed greedily in several orders; local search improves the best of them, and then stacking.

    Args:
        buffers: buffers to place.
        least: the most bytes that are live at once; no arena can be smaller.
        seconds: processor time to search; None: a fixed number of rounds, with the same result on every machine.
        rounds: rounds without a smaller arena after which local search ends.

    Example:
        >>> choose_offsets([Buffer(8, 0, 1), Buffer(4, 1, 2), Buffer(8, 2, 3)], least=12).bytes
        12
    """
    # for each buffer, the indices of the others that are live at the same time
    conflicts = [[k for k, other in enumerate(buffers) if k != n and b.overlaps(other)] for n, b in enumerate(buffers)]
    best: tuple[Placement, list[int]] | None = None
    for key in _ORDERS:
        order = sorted(range(len(buffers)), key=lambda n, key=key: (key(buffers[n]), n))  # the index breaks ties
        placement = _greedy(buffers, conflicts, order)
        if best is None or placement.bytes < best[0].bytes:
            best = placement, order
    assert best is not None, "there are orders"
    search_seconds, stacking_seconds = (None, None) if seconds is None else (0.1 * seconds, 0.9 * seconds)
    improved = _local_search(buffers, conflicts, *best, least, search_seconds, rounds)
    return _search_by_stacking(buffers, improved, least, stacking_seconds)


_ORDERS: tuple[Callable[[Buffer], tuple[int, ...]], ...] = (
    lambda buffer: (-buffer.bytes, buffer.first_action),
    lambda buffer: (-buffer.bytes * (buffer.last_action - buffer.first_action + 1), buffer.first_action),
    lambda buffer: (buffer.first_action - buffer.last_action, -buffer.bytes),
    lambda buffer: (buffer.first_action, -buffer.last_action),
    lambda buffer: (-buffer.last_action, buffer.first_action),
)
"""Sort keys: size, size times lifetime, lifetime (the largest first), allocation, and free (the last first)."""


def _greedy(buffers: Sequence[Buffer], conflicts: Sequence[Sequence[int]], order: Sequence[int]) -> Placement:
    """Place the buffers in the order of the indices `order`, each at the lowest free offset.

    `conflicts` has for each buffer the indices of those that are live at the same time.
    """
    offsets = [-1] * len(buffers)  # -1: not placed yet
    arena_end = 0
    for number in order:
        size = buffers[number].bytes
        occupied = sorted(
            (offsets[other], offsets[other] + buffers[other].bytes)
            for other in conflicts[number]
            if offsets[other] >= 0
        )
        offset = 0
        for begin, end in occupied:
            if begin - offset >= size:  # it fits in the gap
                break
            offset = max(offset, end)
        offsets[number] = offset
        arena_end = max(arena_end, offset + size)
    return Placement(tuple(offsets), arena_end)


def _local_search(
    buffers: Sequence[Buffer], conflicts: Sequence[Sequence[int]], best: Placement, order: list[int], least: int,
    seconds: float | None, rounds: int,
) -> Placement:  # fmt: skip
    """Improve a placement by random changes to the order `order`, from which greedy placement led to `best`.

    A change places a buffer earlier, often one at the arena's end, or swaps two. It stays if the arena does not grow.
    The search ends at an arena of `least` bytes, after `seconds` of processor time, or after `rounds` changes in which
    the arena did not shrink.
    """
    rng, deadline = random.Random(0), None if seconds is None else time.process_time() + seconds
    current, best_order, rounds_without_gain = best, order, 0
    while current.bytes > least and len(order) > 1 and rounds_without_gain < rounds:
        if deadline is not None and time.process_time() > deadline:
            break
        candidate = list(best_order)
        at_end = [n for n in candidate if current.offsets[n] + buffers[n].bytes == current.bytes]
        number = rng.choice(at_end if rng.random() < 0.7 else candidate)
        position = candidate.index(number)
        if rng.random() < 0.7:
            candidate.insert(rng.randrange(position + 1), candidate.pop(position))
        else:
            other = rng.randrange(len(candidate))
            candidate[position], candidate[other] = candidate[other], candidate[position]
        placement = _greedy(buffers, conflicts, candidate)
        rounds_without_gain = 0 if placement.bytes < current.bytes else rounds_without_gain + 1
        if placement.bytes <= current.bytes:
            current, best_order = placement, candidate
    return current


def _search_by_stacking(buffers: Sequence[Buffer], best: Placement, least: int, seconds: float | None) -> Placement:
    """Search for smaller arenas by stacking, with random orders of the buffers.

    The target lies between `least` and the best arena, closer to the latter after each failure. The search ends after
    `seconds` of processor time, or after `TRIES` orders if that is None.
    """
    if best.bytes <= least:
        return best
    stacking, tries, last_rank = Stacking.from_buffers(buffers), 0, None
    share = 0.5  # of the way from `least` to the best arena
    deadline = None if seconds is None else time.process_time() + seconds
    while best.bytes > least and (tries < TRIES if deadline is None else time.process_time() <= deadline):
        tries += 1
        target = min(least + int((best.bytes - least) * share), best.bytes - 1)
        rank = stacking.random_rank(tries, last_rank)
        offsets = stacking.offsets_within(target, rank)
        if offsets is None:
            share += (1 - share) * RISE_AFTER_FAILURE
        else:
            best = Placement(offsets, max(begin + buffer.bytes for begin, buffer in zip(offsets, buffers, strict=True)))
            share, last_rank = max(share - DROP_AFTER_SUCCESS, 0.0), rank
    return best
