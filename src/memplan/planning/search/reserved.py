"""Find the choices under which a card's caching allocator reserves least.

The search counts live bytes. The allocator reserves segments, and a free block serves no request that is larger than
the block: in convolutional networks near the floor a third of what it reserves is in such blocks. How much depends on
the sizes and the order of all requests, so that no sum over positions tells it, and fewer live bytes can mean more
reserved bytes. So the schedules with the fewest live bytes are run in the allocator, then those that differ from the
best of them in a single move (see `memplan.planning.search.local_search`), until one reserves less.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from memplan.planning.schedule.actions import Choices
from memplan.planning.schedule.to_trace import reserved_bytes
from memplan.planning.search.local_search import Column, Move, State, apply_moves
from memplan.planning.search.search import Search
from memplan.simulation.allocator.rounding import LARGEST_SMALL

TRIES = 160
"""Most schedules that are run in the allocator."""
OPS = 60_000
"""Most ops of all these schedules together, which bounds the time: 2,000 ops take 0.1 s."""
TOLERABLE = 1.02
"""Reserved bytes within this factor of the live ones are not lowered."""


def least_reserved(search: Search, tries: int = TRIES) -> tuple[Choices, int]:
    """Return the choices of those tried under which the allocator reserves least, and the reserved bytes. They do not
    depend on measured seconds.

    Args:
        search: of a step on a card.
        tries: most schedules that are run in the allocator; with 1 the choices are those with the fewest live bytes.
    """
    descent = _Descent(search.deterministic, tries)
    return descent.search.evaluator.choices(descent.run().column), descent.reserved


class _Descent:
    """Lowers the reserved bytes move by move. A move changes a few decisions of a candidate."""

    def __init__(self, search: Search, tries: int) -> None:
        self.search = search
        self.tries_left = min(tries, max(1, OPS // max(1, len(search.graph.ops))))
        self.reserved = 0
        """Bytes that the best state reserves."""
        flat = search.flat
        self.value_bytes = flat.value_bytes[[*flat.recomputable_rows.tolist(), *flat.row_of_form]]
        """By decision of a candidate: the bytes of the value that it is about."""

    def run(self) -> State:
        """Return the best state."""
        local, tried = self.search.local(budget=0), set[Move]()
        best = self.search.lowest_peak_state
        self.reserved = self._reserved(best.column)
        for start in (self.search.nearest_to_bound, self.search.fastest_at_floor) if self.tries_left > 0 else ():
            reserved = self._reserved(start.column)
            if reserved < self.reserved:
                self.reserved, best = reserved, start
        while self.tries_left > 0 and self.reserved > TOLERABLE * best.peak:
            moves = [move for move in local.moves(best) if move not in tried and self._is_large(move)]
            if not moves:
                break
            columns = apply_moves(best.column, moves)
            evaluated = self.search.evaluator.evaluate(columns)
            by_peak = np.lexsort((evaluated.seconds, evaluated.peak)).tolist()  # then by seconds
            # reserved bytes are never fewer than the live ones
            order = (k for k in by_peak if evaluated.peak[k] < self.reserved)
            better = self._first_better(columns, order, moves, tried)
            if better is None:
                break
            best = local.drop_unneeded(local.state(better))
        return best

    def _first_better(
        self, columns: Column, order: Iterable[int], moves: list[Move], tried: set[Move]
    ) -> Column | None:
        """Return the first candidate that reserves less than the best state; None if none does, or no tries are left.

        Args:
            columns: the candidates.
            order: indices of candidates, in the order in which to try them.
            moves: the move that leads to each candidate.
            tried: moves that were tried; those tried here are added.
        """
        for k in order:
            if self.tries_left <= 0:
                break
            tried.add(moves[k])
            reserved = self._reserved(columns[:, k])
            if reserved < self.reserved:
                self.reserved = reserved
                return columns[:, k]
        return None

    def _reserved(self, column: Column) -> int:
        """Return the bytes that the allocator reserves for a candidate, which takes a try."""
        self.tries_left -= 1
        return reserved_bytes(self.search.evaluator.schedule_of(column), self.search.outside_memory)

    def _is_large(self, move: Move) -> bool:
        """Return whether a move is about a value that is too large for the allocator's pool of small blocks."""
        rows, _ = move
        return bool((self.value_bytes[list(rows)] > LARGEST_SMALL).any())
