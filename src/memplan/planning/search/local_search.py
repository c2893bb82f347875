"""Local search on single values: repair what is over the budget, then take back what costs most.

A round evaluates all moves at once, ranks them and tries the best one, the best two, and so on: moves in different
places of a network hardly touch each other, so a round can make many.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import numpy.typing as npt

from memplan.planning.search.batch_evaluator import Evaluator
from memplan.planning.search.candidates import Columns, Evaluated, Profile

Column = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Move = tuple[tuple[int, ...], tuple[bool, ...]]
"""Rows of a column, and what they become."""

TINY = 1e-9
"""Seconds; less is no difference."""
SAME = 1e-12
"""Share of an excess; less is how sums of squares are rounded."""


@dataclass(frozen=True, slots=True)
class State:
    """A candidate and what it comes to."""

    column: Column
    peak: int
    seconds: float
    excess: float
    load: float
    needed: Column
    """Which forward values the backward pass needs."""

    @property
    def fits(self) -> bool:
        """Return whether it is within the budget."""
        return self.excess == 0

    def better(self, other: State) -> bool:
        """Return whether it is nearer to the budget, or costs less."""
        if not self.fits or not other.fits:
            return self.excess < other.excess * (1 - SAME)
        return self.seconds < other.seconds - TINY


class Local:
    """Local search under one budget."""

    def __init__(
        self,
        evaluator: Evaluator,
        budget: int | Profile,
        *,
        small: int = 0,
        squared: int = 0,
    ) -> None:
        """What has at most ``small`` bytes is left alone. ``budget`` and ``squared``: see `Evaluator.evaluate`."""
        self.squared = squared
        self.evaluator, self.budget, self.flat = evaluator, budget, evaluator.flat
        self.drops = len(self.flat.droppable)
        self.row = {int(row): at for at, row in enumerate(self.flat.drop_rows)}
        self.large = self.flat.bytes[self.flat.drop_rows] > small
        self.fixed = self._moves()

    def state(self, column: Column) -> State:
        """Evaluate a candidate."""
        return _at(self._evaluated(column[:, None]), column[:, None], 0)

    def _evaluated(self, columns: Columns) -> Evaluated:
        return self.evaluator.evaluate(columns, self.budget, squared=self.squared)

    # -- moves

    def _moves(self) -> list[Move]:
        """Moves that do not depend on where the search is: those that change nothing there are left out later."""
        flat, moves = self.flat, list[Move]()
        for at in np.flatnonzero(self.large).tolist():
            moves += [((at,), (True,)), ((at,), (False,))]
        for op in flat.rerun:
            made = [self.row[row] for row in op.makes if row in self.row and self.large[self.row[row]]]
            read = [self.row[row] for row in op.reads if row in self.row and self.large[self.row[row]]]
            if len(made) > 1:
                moves += [(tuple(made), (True,) * len(made)), (tuple(made), (False,) * len(made))]
            for at in made:
                if read:
                    rows = (at, *read)
                    moves += [(rows, (True, *[False] * len(read))), (rows, (False, *[True] * len(read)))]
        for at, form in enumerate(flat.forms, self.drops):
            drop = self.row.get(flat.row[form.value])
            moves += [((at,), (True,)), ((at,), (False,))]
            if drop is not None and form.is_copied:
                moves.append(((at, drop), (False, True)))
            elif drop is not None:
                moves += [((at, drop), (formed, dropped)) for formed in (True, False) for dropped in (True, False)]
        return moves

    def settled(self, state: State) -> State:
        """Mark what nobody needs as to be made again: then a later need does not keep it. Nothing changes now."""
        column = state.column.copy()
        column[: self.drops] |= ~state.needed[self.flat.drop_rows] & self.large
        return replace(state, column=column)

    def moves(self, state: State) -> list[Move]:
        """Return the moves that change something."""
        column, needed = state.column.tolist(), state.needed[self.flat.drop_rows].tolist()
        found = dict[tuple[tuple[int, bool], ...], Move]()
        for rows, bits in self.fixed:
            changes = tuple(
                (row, bit) for row, bit in zip(rows, bits, strict=True)
                if column[row] != bit
            )  # fmt: skip
            if not changes or (len(changes) == 1 and changes[0][0] < self.drops and not needed[changes[0][0]]):
                continue
            found.setdefault(changes, (tuple(r for r, _ in changes), tuple(b for _, b in changes)))
        return list(found.values())

    # -- repair

    def repair(self, start: State, rounds: int = 40, locked: Iterable[int] = ()) -> State:
        """Move a state towards the budget, by moves that save most bytes over it for each second they add."""
        state, hold = start, set(locked)
        for _ in range(rounds):
            if state.fits:
                break
            moves = [m for m in self.moves(state) if hold.isdisjoint(m[0])]
            if not moves:
                break
            found = self._evaluated(applied(state.column, moves))
            gain, cost = state.excess - found.excess, found.seconds - state.seconds
            order = [
                int(k)
                for k in np.argsort(-gain / np.maximum(cost, TINY), kind="stable")
                if gain[k] > SAME * state.excess
            ]
            best = self._prefix(state, [moves[k] for k in order]) if order else self._two(state, moves, found)
            if best is None or not best.better(state):
                break
            state = self.settled(best)
        return state

    def _two(self, state: State, moves: Sequence[Move], found: Evaluated, few: int = 32) -> State | None:
        """The best two moves together, of those that do least harm: where no single one helps."""
        near = [moves[int(k)] for k in np.lexsort((found.seconds, found.excess))[:few]]
        pairs = [
            (one[0] + other[0], one[1] + other[1])
            for one, other in combinations(near, 2)
            if set(one[0]).isdisjoint(other[0])
        ]
        if not pairs:
            return None
        columns = applied(state.column, pairs)
        tried = self._evaluated(columns)
        return _at(tried, columns, int(np.lexsort((tried.seconds, tried.excess))[0]))

    def _prefix(self, state: State, moves: Sequence[Move]) -> State:
        """The best of the first move, the first two, and so on; the first that fits, if one does."""
        lengths = _lengths(len(moves))
        found, columns = self._try(state.column, moves, lengths)
        fits = np.flatnonzero(found.excess == 0)
        if len(fits):
            high = lengths[int(fits[0])]
            low = lengths[int(fits[0]) - 1] if fits[0] else 0
            if high - low > 1:
                between = [*range(low + 1, high, max(1, (high - low) // 32)), high]
                found, columns = self._try(state.column, moves, between)
                fits = np.flatnonzero(found.excess == 0)
            return _at(found, columns, int(fits[0]))
        return _at(found, columns, int(np.argmin(found.excess)))

    def _try(self, column: Column, moves: Sequence[Move], lengths: Sequence[int]) -> tuple[Evaluated, Columns]:
        columns = np.repeat(column[:, None], len(lengths), axis=1)
        for at, length in enumerate(lengths):
            taken = set[int]()
            for rows, bits in moves[:length]:
                if taken.isdisjoint(rows):
                    taken.update(rows)
                    columns[list(rows), at] = bits
        return self._evaluated(columns), columns

    # -- improve

    def improve(self, start: State, rounds: int = 60, *, pairs: bool = True) -> State:
        """Reduce the seconds within the budget: by single moves, and where none helps, by pairs of one that saves and
        one that makes room for it."""
        state = start
        for _ in range(rounds):
            moves = self.moves(state)
            if not moves or not state.fits:
                break
            found = self._evaluated(applied(state.column, moves))
            better = self._several(state, moves, found)
            if better is None and pairs:
                better = self._pair(state, moves, found)
            if better is None:
                break
            state = self.settled(better)
        return state

    def shake(self, start: State, times: int, *, pairs: bool = True, enough: float = 0.0) -> State:
        """Keep a value against the budget, repair without giving it up, improve; where that ends lower, go on there.
        ``enough`` are seconds below which there is nothing to gain."""
        best, tried = start, set[tuple[int, ...]]()
        for _ in range(times):
            if best.seconds <= enough:
                break
            moves = self.moves(best)
            if not moves:
                break
            found = self._evaluated(applied(best.column, moves))
            worth = (best.seconds - found.seconds) / np.maximum(found.excess, 1.0)
            order = [int(k) for k in np.argsort(-worth, kind="stable") if worth[k] > 0 and moves[k][0] not in tried]
            if not order:
                break
            move = moves[order[0]]
            tried.add(move[0])
            state = self.state(applied(best.column, [move])[:, 0])
            state = self.repair(state, locked=move[0])
            if state.fits:
                state = self.improve(state, 20, pairs=pairs)
                best = state if state.better(best) else best
        return best

    def _several(self, state: State, moves: Sequence[Move], found: Evaluated) -> State | None:
        saved = state.seconds - found.seconds
        good = np.flatnonzero((found.excess == 0) & (saved > TINY))
        if not len(good):
            return None
        taken = np.maximum(found.load[good] - state.load, 1.0)
        best: State | None = None
        for worth in (saved[good], saved[good] / taken):
            order = [moves[int(good[k])] for k in np.argsort(-worth, kind="stable")]
            tried, columns = self._try(state.column, order, _lengths(len(order)))
            fits = np.flatnonzero(tried.excess == 0)
            if len(fits):
                one = _at(tried, columns, int(fits[np.argmin(tried.seconds[fits])]))
                best = one if best is None or one.better(best) else best
        return best if best is not None and best.better(state) else None

    def _pair(
        self, state: State, moves: Sequence[Move], found: Evaluated, few: int = 24, many: int = 40
    ) -> State | None:
        saved, room = state.seconds - found.seconds, state.load - found.load
        savers = [int(k) for k in np.argsort(-saved / np.maximum(found.excess, 1.0), kind="stable") if saved[k] > TINY]
        savers = sorted(set(savers[: few // 2]) | set(np.argsort(-saved, kind="stable")[: few // 2].tolist()))
        makers = [
            int(k) for k in np.argsort(np.maximum(-saved, TINY) / np.maximum(room, 1.0), kind="stable") if room[k] > 0
        ]
        pairs = list[Move]()
        for one in savers:
            for other in makers[:many]:
                if saved[one] + saved[other] > TINY and set(moves[one][0]).isdisjoint(moves[other][0]):
                    pairs.append((moves[one][0] + moves[other][0], moves[one][1] + moves[other][1]))
        if not pairs:
            return None
        columns = applied(state.column, pairs)
        tried = self._evaluated(columns)
        good = np.flatnonzero((tried.excess == 0) & (tried.seconds < state.seconds - TINY))
        if not len(good):
            return None
        ordered = [pairs[int(k)] for k in good[np.argsort(tried.seconds[good], kind="stable")]]
        again, columns = self._try(state.column, ordered, _lengths(len(ordered)))
        fits = np.flatnonzero(again.excess == 0)
        return _at(again, columns, int(fits[np.argmin(again.seconds[fits])]))


def applied(column: Column, moves: Sequence[Move]) -> Columns:
    """Apply each move to one candidate: a new candidate for each."""
    columns = np.repeat(column[:, None], len(moves), axis=1)
    for at, (rows, bits) in enumerate(moves):
        columns[list(rows), at] = bits
    return columns


def _lengths(count: int) -> list[int]:
    """1, 2, 3, ... then in larger strides, up to all."""
    lengths, at = list[int](), 1
    while at < count:
        lengths.append(at)
        at = max(at + 1, at * 5 // 4)
    return [*lengths, count]


def _at(found: Evaluated, columns: Columns, at: int) -> State:
    return State(
        columns[:, at].copy(),
        int(found.peak[at]),
        float(found.seconds[at]),
        float(found.excess[at]),
        float(found.load[at]),
        found.needed[:, at].copy(),
    )
