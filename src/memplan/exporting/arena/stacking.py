"""Search for offsets within an arena of fixed size by stacking buffers from the bottom up, with backtracking.

This is the search of MiniMalloc (Moffitt, ASPLOS 2023): each buffer lies as low as those below it allow; the next
buffer is among those that could begin below the end of every other; and a branch is cut where, at some action, the
lowest free offset plus the bytes still to be placed exceed the arena. Most orders fail early and a few succeed without
backtracking, so many random orders get a few steps each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from memplan.exporting.arena.lifetimes import Buffer

PLACED = 1 << 60
"""Lowest offset of a buffer that is already placed."""
NOISES = (0.02, 0.1, 0.3, 0.6)
"""Sizes of the random shifts of a buffer's position in an order, in shares of the number of buffers."""
STEPS_PER_BUFFER = 2
"""Placements that an order may try, times the number of buffers."""


@dataclass(frozen=True)
class Stacking:
    """Buffers as arrays, over sections of time during which the live buffers do not change."""

    sizes: np.ndarray
    live: np.ndarray
    """For each buffer and section: whether it is live."""
    overlaps: np.ndarray
    """For each pair of buffers: whether both are live in a section."""
    members: np.ndarray
    """Indices of the live buffers, section by section."""
    starts: np.ndarray
    """Where each section begins in `members`."""
    sort_keys: tuple[np.ndarray, ...]
    """Three numbers of each buffer, by which it can be ranked: lifetime in sections, size times lifetime, and the most
    bytes live in any of its sections. Orders begin with the largest."""

    @classmethod
    def from_buffers(cls, buffers: Sequence[Buffer]) -> Stacking:
        """Divide the time into sections. Those whose live buffers are a subset of a neighbour's are left out.

        So each section that stays has a buffer whose life begins in it, and one whose life ends in it.
        """
        first, end = np.array([b.first_action for b in buffers]), np.array([b.last_action + 1 for b in buffers])
        section_begins = np.unique(np.concatenate([first, end]))[:-1]  # without the end of the last section
        live = (first[None, :] <= section_begins[:, None]) & (section_begins[:, None] < end[None, :])
        live = live[live.any(1)]
        has_last_use = np.append((live[:-1] & ~live[1:]).any(1), True)  # a buffer is not live in the next section
        has_first_use = np.append(True, (live[1:] & ~live[:-1]).any(1))  # a buffer is not live in the previous section
        live = live[has_last_use & has_first_use]
        sizes = np.array([b.bytes for b in buffers], np.int64)
        section, members = np.nonzero(live)
        starts = np.searchsorted(section, np.arange(len(live)))
        lifetimes, section_bytes = live.sum(0), live @ sizes
        most_live = (live * section_bytes[:, None]).max(0)
        meets = live.T.astype(np.int32) @ live.astype(np.int32) > 0
        keys = (lifetimes, sizes * lifetimes, most_live)
        return cls(sizes, live.T.copy(), meets, members, starts, keys)

    def random_rank(self, seed: int, last_rank: np.ndarray | None) -> np.ndarray:
        """Return a rank for each buffer, by which `offsets_within` breaks ties: those with a low rank are placed first.

        Buffers are ranked by the keys in random order or, every other seed, by the rank that last led to a smaller
        arena. Random shifts are added, so that every seed is another search.
        """
        rng, count = np.random.default_rng(seed), len(self.sizes)
        rank = np.empty(count)
        order = [last_rank] if last_rank is not None and seed % 2 else [-self.sort_keys[k] for k in rng.permutation(3)]
        rank[np.lexsort(order)] = np.arange(count)
        return rank + rng.random(count) * count * rng.choice(NOISES)

    def offsets_within(self, target: int, rank: np.ndarray) -> tuple[int, ...] | None:
        """Return offsets within an arena of `target` bytes; None if this order does not lead to any."""
        offsets, steps_left = np.zeros_like(self.sizes), STEPS_PER_BUFFER * len(self.sizes)
        lowest = np.zeros_like(self.sizes)  # offset at which each buffer could lie, above those placed
        pending_bytes = self.sizes @ self.live  # by section: of the buffers that are not placed
        # an entry for each buffer placed, and one for the next: candidates still to try, lowest, pending bytes
        trail = [(self._candidates(lowest, rank), lowest, pending_bytes)]
        while trail and steps_left and pending_bytes.max() <= target:
            candidates, lowest, pending_bytes = trail[-1]
            if not candidates:
                trail.pop()
                continue
            steps_left -= 1
            number = candidates.pop()
            offsets[number] = lowest[number]
            end = lowest[number] + self.sizes[number]
            lowest = np.where(self.overlaps[number], np.maximum(lowest, end), lowest)
            lowest[number] = PLACED
            if len(trail) == len(offsets):  # this was the last buffer
                return tuple(map(int, offsets))
            pending_bytes = pending_bytes - self.live[number] * self.sizes[number]
            lowest_in_section = np.minimum.reduceat(lowest[self.members], self.starts)
            # in every section with buffers left, these must fit above the lowest free offset
            has_buffers_left = lowest_in_section < PLACED
            if not (has_buffers_left & (lowest_in_section + pending_bytes > target)).any():
                trail.append((self._candidates(lowest, rank), lowest, pending_bytes))
        return None

    def _candidates(self, lowest: np.ndarray, rank: np.ndarray) -> list[int]:
        """Return the indices of the buffers that can be placed next, the best last.

        Those are the buffers whose lowest offset is below every buffer's lowest end. A low offset is best, then a low
        rank.
        """
        candidates = np.flatnonzero(lowest < (lowest + self.sizes).min())
        best_first = candidates[np.lexsort((rank[candidates], lowest[candidates]))]
        return cast("list[int]", best_first[::-1].tolist())
