"""Candidates of the search, many at once, and their evaluation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memplan.planning.search.flat_graph import Ints

Columns = npt.NDArray[np.bool_]
"""(decisions, candidates): which values are recomputed, then which saved forms are used."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Evaluation of some candidates: arrays with an entry for each."""

    peak: Ints
    """Peak bytes of the step."""
    seconds: npt.NDArray[np.float64]
    """Seconds added to the step."""
    excess: npt.NDArray[np.float64]
    """Bytes over the budget (or their squares), summed over all positions: it ranks near misses with the same peak."""
    summed_bytes: npt.NDArray[np.float64]
    """Live bytes, summed over all positions: it ranks candidates by how much memory they leave free."""
    is_needed: npt.NDArray[np.bool_]
    """(forward values, candidates): which values the backward pass needs in any form."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Bytes at every position of the step, for a single candidate."""

    forward: Ints
    """Highest level during each forward op and the actions before the next."""
    slots: Ints
    """Highest level during each slot of the backward pass: a backward op with what is recomputed just before it."""
    update: int
    """Bytes during the optimizer's update."""

    def at_least(self, level: int) -> Profile:
        """Return the profile raised to at least ``level`` bytes at every position."""
        return Profile(np.maximum(self.forward, level), np.maximum(self.slots, level), max(self.update, level))


@dataclass(frozen=True, slots=True)
class Levels:
    """Bytes at every position and added seconds of some candidates. The last dimension of each array is the
    candidates."""

    forward: Ints
    """(forward op, candidate): see `Profile`."""
    slots: Ints
    """(slot of the backward pass, candidate)."""
    update: Ints
    """Bytes during the optimizer's update."""
    seconds: npt.NDArray[np.float64]
    is_needed: npt.NDArray[np.bool_]
    """(forward value, candidate): whether the backward pass needs the value in any form."""

    @property
    def nbytes(self) -> int:
        """Bytes of these arrays in host memory."""
        arrays = self.forward, self.slots, self.update, self.seconds, self.is_needed
        return sum(array.nbytes for array in arrays)

    @property
    def peak(self) -> Ints:
        """Highest level of each candidate, in bytes."""
        most = np.maximum(self.slots.max(axis=0), self.update)
        return np.maximum(most, self.forward.max(axis=0, initial=0))

    @property
    def summed_bytes(self) -> npt.NDArray[np.float64]:
        """Bytes of each candidate, summed over all positions: it ranks candidates by how much memory they leave
        free."""
        return (self.forward.sum(axis=0) + self.slots.sum(axis=0)).astype(np.float64)

    def excess(self, budget: int | Profile, squarings: int) -> npt.NDArray[np.float64]:
        """Return the bytes of each candidate over a budget, summed over all positions.

        Args:
            budget: in bytes, the same for the whole step, or a profile with a budget for each position.
            squarings: how many times the bytes over the budget are squared before they are summed.
        """
        if isinstance(budget, Profile):
            update, forward, slots = budget.update, budget.forward[:, None], budget.slots[:, None]
        else:
            update = forward = slots = budget
        total = np.zeros(len(self.seconds))
        for difference in (self.update[None] - update, self.forward - forward, self.slots - slots):
            over_budget = np.maximum(difference, 0)
            if squarings:
                over_budget = over_budget.astype(np.float64)  # squares of bytes overflow integers
                for _ in range(squarings):
                    over_budget *= over_budget
            total += over_budget.sum(axis=0)
        return total
