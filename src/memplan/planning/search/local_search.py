"""Local search on single values: repair a candidate that is over the budget, then undo the choices that cost most.

A round evaluates all moves at once, ranks them and tries the best, the best two, and so on: moves in different places
of a network rarely affect each other, so a round can apply many.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

import numpy as np
import numpy.typing as npt

from memplan.planning.search.batch_evaluator import Evaluator
from memplan.planning.search.candidates import Columns, Evaluated, Profile

Column = npt.NDArray[np.bool_]
"""A candidate: which values are recomputed, then which saved forms are used. Its rows are decisions."""
Floats = npt.NDArray[np.float64]
Move = tuple[tuple[int, ...], tuple[bool, ...]]
"""Rows of a candidate, and their new values."""

TINY = 1e-9
"""Seconds. Smaller differences count as equal."""
SAME = 1e-12
"""Share of an excess. Smaller differences are rounding errors of sums of squares."""


@dataclass(frozen=True, slots=True)
class State:
    """A candidate and its evaluation (see `Evaluated`)."""

    column: Column
    peak: int
    seconds: float
    excess: float
    summed_bytes: float
    is_needed: Column
    """Which forward values the backward pass needs."""

    @property
    def fits(self) -> bool:
        """Whether the candidate is within the budget."""
        return self.excess == 0

    def is_better_than(self, other: State) -> bool:
        """Whether it has less excess than ``other`` or, if both fit the budget, adds fewer seconds."""
        if not self.fits or not other.fits:
            return self.excess < other.excess * (1 - SAME)
        return self.seconds < other.seconds - TINY


class LocalSearch:
    """Local search under one budget."""

    def __init__(
        self, evaluator: Evaluator, budget: int | Profile, *, small_bytes: int = 0, squarings: int = 0
    ) -> None:
        """Collect the moves. Values of at most ``small_bytes`` bytes are always saved.

        ``budget`` and ``squarings``: see `Evaluator.evaluate`.
        """
        self.squared = squarings
        self.evaluator, self.budget, self.flat = evaluator, budget, evaluator.flat
        self.recompute_decisions = len(self.flat.recomputable_values)
        """Number of the first rows of a candidate, which say what is recomputed; the others say which forms are used.
        """
        self.recompute_decision_of_row = {int(row): index for index, row in enumerate(self.flat.recomputable_rows)}
        """By number of a recomputable forward value: the row of a candidate that says whether it is recomputed."""
        self.may_recompute = self.flat.value_bytes[self.flat.recomputable_rows] > small_bytes
        """By row of a candidate: whether the value is large enough to be recomputed."""
        self.all_moves = self._all_moves()

    def state(self, column: Column) -> State:
        """Evaluate a candidate."""
        return _state_at(self._evaluate(column[:, None]), column[:, None], k=0)

    def _evaluate(self, columns: Columns) -> Evaluated:
        """Return peak, seconds and excess over the budget of some candidates."""
        return self.evaluator.evaluate(columns, self.budget, squarings=self.squared)

    # -- moves

    def _all_moves(self) -> list[Move]:
        """Return all moves, for any state: `moves` leaves out those without effect in a given state.

        Moves recompute or save a value, all results of an op, or a result instead of its operands; and use a form, or
        not, together with either for its value.
        """
        flat, moves = self.flat, list[Move]()
        for row in np.flatnonzero(self.may_recompute).tolist():
            moves += [((row,), (recompute,)) for recompute in (True, False)]
        for op in flat.recompute_ops:
            results, operands = self._decisions_on(op.made_rows), self._decisions_on(op.read_rows)
            if len(results) > 1:
                moves += [(tuple(results), (recompute,) * len(results)) for recompute in (True, False)]
            for result in results if operands else ():
                for recompute in (True, False):  # the result, and the opposite for its operands
                    moves.append(((result, *operands), (recompute, *[not recompute] * len(operands))))
        for row, form in enumerate(flat.forms, self.recompute_decisions):
            moves += [((row,), (used,)) for used in (True, False)]
            # None: the value cannot be recomputed
            value_row = self.recompute_decision_of_row.get(flat.row_of_value[form.value])
            if value_row is not None and form.is_copied:
                moves.append(((row, value_row), (False, True)))  # recompute it instead
            elif value_row is not None:
                moves += [((row, value_row), bits) for bits in product((True, False), repeat=2)]  # used, recomputed
        return moves

    def _decisions_on(self, value_rows: Sequence[int]) -> list[int]:
        """Return the rows of a candidate that say whether these forward values are recomputed, for those that may
        be."""
        decisions = (self.recompute_decision_of_row.get(row) for row in value_rows)
        return [decision for decision in decisions if decision is not None and self.may_recompute[decision]]

    def drop_unneeded(self, state: State) -> State:
        """Mark values that nothing reads as recomputed, so that they are not kept if a later move makes them needed.
        Peak and seconds stay the same."""
        column = state.column.copy()
        column[: self.recompute_decisions] |= ~state.is_needed[self.flat.recomputable_rows] & self.may_recompute
        return replace(state, column=column)

    def moves(self, state: State) -> list[Move]:
        """Return the moves that have an effect in this state, without duplicates."""
        column, needed = state.column.tolist(), state.is_needed[self.flat.recomputable_rows].tolist()
        unique = dict[tuple[tuple[int, bool], ...], Move]()
        for rows, bits in self.all_moves:
            changes = tuple((row, bit) for row, bit in zip(rows, bits, strict=True) if column[row] != bit)
            if not changes:
                continue
            first_row, _ = changes[0]
            if len(changes) == 1 and first_row < self.recompute_decisions and not needed[first_row]:
                continue  # whether to recompute a value that nothing reads
            unique.setdefault(changes, (tuple(row for row, _ in changes), tuple(bit for _, bit in changes)))
        return list(unique.values())

    # -- repair

    def repair(self, start: State, rounds: int = 40, locked: Iterable[int] = ()) -> State:
        """Reduce the excess over the budget by the moves that save most excess for each second they add.

        Rows in ``locked`` do not change. The result does not fit where no move helps or the rounds are used up.
        """
        state, locked = start, set(locked)
        for _ in range(rounds):
            if state.fits:
                break
            moves = [(rows, bits) for rows, bits in self.moves(state) if locked.isdisjoint(rows)]
            if not moves:
                break
            evaluated = self._evaluate(apply_moves(state.column, moves))
            excess_removed, seconds_added = state.excess - evaluated.excess, evaluated.seconds - state.seconds
            ranked = np.argsort(-excess_removed / np.maximum(seconds_added, TINY), kind="stable")
            helpful = [moves[int(k)] for k in ranked if excess_removed[k] > SAME * state.excess]
            best = self._apply_prefix(state, helpful) if helpful else self._repair_by_pair(state, moves, evaluated)
            if best is None or not best.is_better_than(state):
                break
            state = self.drop_unneeded(best)
        return state

    def _repair_by_pair(self, state: State, moves: Sequence[Move], evaluated: Evaluated, few: int = 32) -> State | None:
        """Apply the best pair of the ``few`` moves with the least excess; None if no two of them change different rows.

        Used if no single move helps. ``evaluated``: the moves' evaluation, each applied alone.
        """
        # lexsort sorts by its last key, excess, first
        least_excess = [moves[int(k)] for k in np.lexsort((evaluated.seconds, evaluated.excess))[:few]]
        pairs = [
            (rows + other_rows, bits + other_bits)
            for (rows, bits), (other_rows, other_bits) in combinations(least_excess, 2)
            if set(rows).isdisjoint(other_rows)
        ]
        if not pairs:
            return None
        columns = apply_moves(state.column, pairs)
        tried = self._evaluate(columns)
        return _state_at(tried, columns, int(np.lexsort((tried.seconds, tried.excess))[0]))

    def _apply_prefix(self, state: State, moves: Sequence[Move]) -> State:
        """Apply the shortest prefix of ``moves`` that fits the budget, else the prefix with the least excess.

        Growing lengths are tried first, then lengths between the shortest that fits and the one before it.
        """
        lengths = _lengths(len(moves))
        evaluated, columns = self._evaluate_prefixes(state.column, moves, lengths)
        fits = np.flatnonzero(evaluated.excess == 0)
        if not len(fits):
            return _state_at(evaluated, columns, int(np.argmin(evaluated.excess)))
        fitting = lengths[int(fits[0])]
        too_short = lengths[int(fits[0]) - 1] if fits[0] else 0
        if fitting - too_short > 1:
            step = max(1, (fitting - too_short) // 32)  # about 32 lengths between them
            between = [*range(too_short + 1, fitting, step), fitting]
            evaluated, columns = self._evaluate_prefixes(state.column, moves, between)
            fits = np.flatnonzero(evaluated.excess == 0)
        return _state_at(evaluated, columns, int(fits[0]))

    def _evaluate_prefixes(
        self, column: Column, moves: Sequence[Move], lengths: Sequence[int]
    ) -> tuple[Evaluated, Columns]:
        """Apply the first ``length`` moves to a candidate together, for each length; return the evaluations and the new
        candidates.

        Of moves that change the same row only the first is applied.
        """
        columns = np.repeat(column[:, None], len(lengths), axis=1)
        for k, length in enumerate(lengths):
            changed = set[int]()
            for rows, bits in moves[:length]:
                if changed.isdisjoint(rows):
                    changed.update(rows)
                    columns[list(rows), k] = bits
        return self._evaluate(columns), columns

    def repaired(self, column: Column, rounds: int) -> State:
        """Evaluate and repair a candidate, with values that nothing reads marked as recomputed."""
        return self.repair(self.drop_unneeded(self.state(column)), rounds)

    # -- improve

    def improve(self, start: State, rounds: int = 60, *, pairs: bool = True) -> State:
        """Reduce the added seconds within the budget: by single moves and, where none helps, by pairs of a move that
        saves seconds and a move that frees bytes for it."""
        state = start
        for _ in range(rounds):
            moves = self.moves(state)
            if not moves or not state.fits:
                break
            evaluated = self._evaluate(apply_moves(state.column, moves))
            better = self._improve_by_singles(state, moves, evaluated)
            if better is None and pairs:
                better = self._improve_by_pairs(state, moves, evaluated)
            if better is None:
                break
            state = self.drop_unneeded(better)
        return state

    def escape_local_optima(
        self, start: State, times: int, *, pairs: bool = True, sufficient_seconds: float = 0.0
    ) -> State:
        """Escape local optima, up to ``times`` times: force a move that saves seconds although it exceeds the budget,
        repair without undoing it, improve, and continue from the result if it adds fewer seconds.

        Args:
            start: a state that fits the budget, and that no single move improves.
            times: number of moves to force at most.
            pairs: as for `improve`.
            sufficient_seconds: added seconds at which to stop.
        """
        best, tried_rows = start, set[tuple[int, ...]]()
        for _ in range(times):
            if best.seconds <= sufficient_seconds:
                break
            moves = self.moves(best)
            if not moves:
                break
            evaluated = self._evaluate(apply_moves(best.column, moves))
            # at a local optimum, moves that save seconds exceed the budget
            saved_by_excess = (best.seconds - evaluated.seconds) / np.maximum(evaluated.excess, 1.0)
            ranked = np.argsort(-saved_by_excess, kind="stable")
            untried = [moves[int(k)] for k in ranked if saved_by_excess[k] > 0 and moves[k][0] not in tried_rows]
            if not untried:
                break
            forced = untried[0]
            forced_rows, _ = forced
            tried_rows.add(forced_rows)
            state = self.state(apply_moves(best.column, [forced])[:, 0])
            state = self.repair(state, locked=forced_rows)
            if state.fits:
                state = self.improve(state, rounds=20, pairs=pairs)
                best = state if state.is_better_than(best) else best
        return best

    def _improve_by_singles(self, state: State, moves: Sequence[Move], evaluated: Evaluated) -> State | None:
        """Apply many of the moves that fit by themselves, together: ranked by seconds saved, then by seconds saved per
        byte. None if no such combination fits and saves seconds.

        ``evaluated``: the moves' evaluation, each applied alone.
        """
        saved = state.seconds - evaluated.seconds
        good = np.flatnonzero((evaluated.excess == 0) & (saved > TINY))
        if not len(good):
            return None
        bytes_added = np.maximum(evaluated.summed_bytes[good] - state.summed_bytes, 1.0)
        best: State | None = None
        for worth in (saved[good], saved[good] / bytes_added):
            order = [moves[int(good[k])] for k in np.argsort(-worth, kind="stable")]
            tried, columns = self._evaluate_prefixes(state.column, order, _lengths(len(order)))
            fits = np.flatnonzero(tried.excess == 0)
            if len(fits):
                candidate = _state_at(tried, columns, int(fits[np.argmin(tried.seconds[fits])]))
                best = candidate if best is None or candidate.is_better_than(best) else best
        return best if best is not None and best.is_better_than(state) else None

    def _improve_by_pairs(
        self, state: State, moves: Sequence[Move], evaluated: Evaluated, few: int = 24, many: int = 40
    ) -> State | None:
        """Apply pairs of a move that saves seconds and a move that frees bytes; None if no pair fits and saves seconds.

        Args:
            state: the present candidate.
            moves: moves that have an effect.
            evaluated: their evaluation, each applied alone.
            few: most moves that save seconds.
            many: most moves that free bytes for each of them.
        """
        saved, bytes_freed = state.seconds - evaluated.seconds, state.summed_bytes - evaluated.summed_bytes
        # those that save most seconds per byte over the budget, and those that save most seconds
        ranked = np.argsort(-saved / np.maximum(evaluated.excess, 1.0), kind="stable")
        most_per_byte = [int(k) for k in ranked if saved[k] > TINY][: few // 2]
        savers = sorted({*most_per_byte, *np.argsort(-saved, kind="stable")[: few // 2].tolist()})
        # those that cost fewest seconds per freed byte
        ranked = np.argsort(np.maximum(-saved, TINY) / np.maximum(bytes_freed, 1.0), kind="stable")
        freers = [int(k) for k in ranked if bytes_freed[k] > 0]
        pairs = list[Move]()
        for saver, freer in product(savers, freers[:many]):
            (rows, bits), (other_rows, other_bits) = moves[saver], moves[freer]
            if saved[saver] + saved[freer] > TINY and set(rows).isdisjoint(other_rows):
                pairs.append((rows + other_rows, bits + other_bits))
        if not pairs:
            return None
        tried = self._evaluate(apply_moves(state.column, pairs))
        good = np.flatnonzero((tried.excess == 0) & (tried.seconds < state.seconds - TINY))
        if not len(good):
            return None
        # as many good pairs together as fit, the fastest first
        ordered = [pairs[int(k)] for k in good[np.argsort(tried.seconds[good], kind="stable")]]
        combined, columns = self._evaluate_prefixes(state.column, ordered, _lengths(len(ordered)))
        fits = np.flatnonzero(combined.excess == 0)
        return _state_at(combined, columns, int(fits[np.argmin(combined.seconds[fits])]))


def apply_moves(column: Column, moves: Sequence[Move]) -> Columns:
    """Return one new candidate for each move: ``column`` with that move applied."""
    columns = np.repeat(column[:, None], len(moves), axis=1)
    for index, (rows, bits) in enumerate(moves):
        columns[list(rows), index] = bits
    return columns


def _lengths(count: int) -> list[int]:
    """Return the prefix lengths to try: 1, 2, 3, ..., then each a quarter longer than the one before, up to
    ``count``."""
    lengths, length = list[int](), 1
    while length < count:
        lengths.append(length)
        length = max(length + 1, length * 5 // 4)
    return [*lengths, count]


def _state_at(evaluated: Evaluated, columns: Columns, k: int) -> State:
    """Return candidate ``k`` with its evaluation."""
    return State(
        columns[:, k].copy(), peak=int(evaluated.peak[k]), seconds=float(evaluated.seconds[k]),
        excess=float(evaluated.excess[k]), summed_bytes=float(evaluated.summed_bytes[k]),
        is_needed=evaluated.is_needed[:, k].copy(),
    )  # fmt: skip
