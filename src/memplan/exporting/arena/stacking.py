"""Search for addresses within a given arena: buffers are stacked from the bottom up, and taken off again at dead ends.

As MiniMalloc does (Moffitt, ASPLOS 2023): a buffer lies as low as what is below it allows; the next one is among those
that could begin before any other has to end; and a stack is given up where the lowest place that is left at some
action, and all that is still to come there, exceed the arena. Most orders come to nothing soon, and a few lead straight
to an end, so that each gets few steps, and many are drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from memplan.exporting.arena.lifetimes import Buffer

GONE = 1 << 60
"""Lowest place of a buffer that is placed."""
NOISES = (0.02, 0.1, 0.3, 0.6)
"""Shares of all positions by which an order is disturbed."""
EACH = 2
"""Steps for each buffer."""


@dataclass(frozen=True)
class Stacking:
    """Buffers by the sections of time in which the same ones are there."""

    sizes: np.ndarray
    there: np.ndarray
    """For each buffer and section, whether it is there."""
    meets: np.ndarray
    """For each pair of buffers, whether both are there in a section."""
    members: np.ndarray
    """Buffers of each section, one section after the other."""
    starts: np.ndarray
    """First one of each section in this list."""
    keys: tuple[np.ndarray, ...]
    """What buffers are sorted by, the last first."""

    @classmethod
    def of(cls, buffers: Sequence[Buffer]) -> Stacking:
        """Cut the time into sections, and keep those that are not part of the one before or behind."""
        first, end = np.array([one.first for one in buffers]), np.array([one.last + 1 for one in buffers])
        cuts = np.unique(np.concatenate([first, end]))[:-1]
        live = (first[None, :] <= cuts[:, None]) & (cuts[:, None] < end[None, :])
        live = live[live.any(1)]
        ends = np.append((live[:-1] & ~live[1:]).any(1), True)
        begins = np.append(True, (live[1:] & ~live[:-1]).any(1))
        live = live[ends & begins]
        sizes = np.array([one.bytes for one in buffers], np.int64)
        section, members = np.nonzero(live)
        starts = np.searchsorted(section, np.arange(len(live)))
        lengths, level = live.sum(0), (live * (live @ sizes)[:, None]).max(0)
        meets = live.T.astype(np.int32) @ live.astype(np.int32) > 0
        return cls(sizes, live.T.copy(), meets, members, starts, (lengths, sizes * lengths, level))

    def order(self, seed: int, near: np.ndarray | None) -> np.ndarray:
        """Return a rank for each buffer: long, large or at a high level first, or as another rank, and disturbed."""
        drawn, count = np.random.default_rng(seed), len(self.sizes)
        rank = np.empty(count)
        by = [near] if near is not None and seed % 2 else [-self.keys[k] for k in drawn.permutation(3)]
        rank[np.lexsort(by)] = np.arange(count)
        return rank + drawn.random(count) * count * drawn.choice(NOISES)

    def within(self, target: int, rank: np.ndarray) -> tuple[int, ...] | None:
        """Return addresses that end within a target; None where the order does not lead to any."""
        offsets, steps = np.zeros_like(self.sizes), EACH * len(self.sizes)
        lowest, rest = np.zeros_like(self.sizes), self.sizes @ self.there
        trail = [(self._candidates(lowest, rank), lowest, rest)]
        while trail and steps and rest.max() <= target:
            candidates, lowest, rest = trail[-1]
            if not candidates:
                trail.pop()
                continue
            steps -= 1
            number = candidates.pop()
            offsets[number] = lowest[number]
            top = lowest[number] + self.sizes[number]
            lowest = np.where(self.meets[number], np.maximum(lowest, top), lowest)
            lowest[number] = GONE
            if len(trail) == len(offsets):
                return tuple(map(int, offsets))
            rest = rest - self.there[number] * self.sizes[number]
            floor = np.minimum.reduceat(lowest[self.members], self.starts)
            if not ((floor < GONE) & (floor + rest > target)).any():
                trail.append((self._candidates(lowest, rank), lowest, rest))
        return None

    def _candidates(self, lowest: np.ndarray, rank: np.ndarray) -> list[int]:
        """Return buffers that can be next, the best one last."""
        found = np.flatnonzero(lowest < (lowest + self.sizes).min())
        return cast("list[int]", found[np.lexsort((rank[found], lowest[found]))][::-1].tolist())
