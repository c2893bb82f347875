"""A budget -> the choices with the fewest added seconds whose schedule fits it; and the smallest budget there is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import numpy as np

from memplan.planning.graph.joint_graph import JointGraph
from memplan.planning.graph.resident import Surroundings
from memplan.planning.levers.lever import STAYS, GradientUse
from memplan.planning.levers.registry import LEVERS
from memplan.planning.schedule.actions import Choices
from memplan.planning.search.batch_evaluator import Evaluator
from memplan.planning.search.candidates import Profile
from memplan.planning.search.local_search import Column, Local, State
from memplan.planning.search.lower_bound import Fractions, Relaxation

STEEP = 3
"""So many times bytes over a budget that is out of reach are squared, to get the highest position down."""
EVEN = 1
"""Likewise, to get down all that is high."""
CLOSE = 1.005
"""A result within so much of its lower bound is not improved further."""


@dataclass(frozen=True, slots=True)
class Heuristics:
    """Switches of the search. Each makes it faster or better; none is needed for a right answer."""

    relaxation: bool = True
    """Start from the linear relaxation (bound.Relaxation), rounded."""
    encodings: bool = True
    """Keep values in smaller forms. Off: they are kept or made again."""
    offload: bool = True
    """Let values wait in host memory, in plans for a card."""
    small_values: bool = True
    """Leave alone values of less than 1/4096 of the largest: keep them."""
    improve: bool = True
    """Local search on single values for fewer seconds, once the budget is met."""
    pairs: bool = True
    """And on pairs: a value kept again, and another that makes room for it."""
    shakes: int = 6
    """How often the search keeps a value against the budget, repairs, and improves from there."""
    rounds: int = 60
    """Rounds of local search, at most, in one go."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found."""

    choices: Choices
    peak: int
    """Bytes, over the whole step."""
    seconds: float
    """That recomputing values, and keeping them in other forms, adds."""
    lower_bound_seconds: float
    """No schedule within the budget adds less."""
    notes: tuple[str, ...] = ()

    @property
    def gap(self) -> float:
        """Seconds between what was found and what is proven to be needed."""
        return max(0.0, self.seconds - self.lower_bound_seconds)


@dataclass(frozen=True, slots=True)
class Infeasible:
    """No schedule within the budget was found."""

    smallest: int
    """The smallest peak that was reached."""
    choices: Choices
    """Those that reach it."""
    lower_bound: int
    """Bytes that no schedule can do without: under that, a budget is proven to be too small."""
    notes: tuple[str, ...] = ()


def search(
    graph: JointGraph,
    budget: int,
    *,
    surroundings: Surroundings | None = None,
    gradients: GradientUse = STAYS,
    heuristics: Heuristics | None = None,
) -> Found | Infeasible:
    """Find the choices that add the fewest seconds within a budget of bytes, as far as the search can tell.

    The result is the same for the same arguments on every machine.
    """
    return Search(graph, surroundings, gradients=gradients, heuristics=heuristics).within(budget)


def floor(
    graph: JointGraph,
    *,
    surroundings: Surroundings | None = None,
    gradients: GradientUse = STAYS,
    heuristics: Heuristics | None = None,
) -> Found:
    """Find the smallest peak that the search can reach, and the fewest seconds there."""
    return Search(graph, surroundings, gradients=gradients, heuristics=heuristics).floor()


def frontier(
    graph: JointGraph,
    points: int = 9,
    *,
    surroundings: Surroundings | None = None,
    gradients: GradientUse = STAYS,
    heuristics: Heuristics | None = None,
) -> list[Found]:
    """Plan from all kept to the floor, at budgets in even steps; none adds more seconds than one of a smaller peak."""
    return Search(graph, surroundings, gradients=gradients, heuristics=heuristics).frontier(points)


def _switched(graph: JointGraph, use: Heuristics) -> JointGraph:
    """Return the graph without the forms of levers that are switched off."""
    off = {lever.name for lever in LEVERS if lever.switch and not getattr(use, lever.switch)}
    return replace(graph, forms=tuple(form for form in graph.forms if form.lever not in off)) if off else graph


def _by_peak(state: State) -> tuple[int, float]:
    return state.peak, state.seconds


@dataclass
class Search:
    """Searches on one graph, for any number of budgets: what they share is worked out once.

    ``steady`` is the same graph with seconds that are no measurements: by these the floor is found, so that a budget
    that was told to be enough is found to be so in another process, too, where kernels take other times.
    """

    graph: JointGraph
    surroundings: Surroundings | None = None
    gradients: GradientUse = field(default=STAYS, kw_only=True)
    heuristics: Heuristics | None = field(default=None, kw_only=True)
    steady: JointGraph | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self.use = self.heuristics or Heuristics()
        self.graph = _switched(self.graph, self.use)
        self.around = self.surroundings or Surroundings()
        self.evaluator = Evaluator(self.graph, self.surroundings, gradients=self.gradients)
        self.flat = self.evaluator.flat
        self.drops = len(self.flat.droppable)
        small = int(self.flat.bytes.max(initial=0)) // 4096
        self.small = small if self.use.small_values else 0
        self.relaxation = Relaxation(self.flat, small=small)
        self.lower_bound = self.relaxation.least.peak
        self.kept = self._local(0).state(np.zeros(self.evaluator.rows, dtype=bool))
        self.known: list[State] = []
        """Good states of earlier searches: starts for the next."""
        self._solved: dict[int, Fractions | None] = {}
        self._near: dict[tuple[int, int], Found] = {}

    def within(self, budget: int) -> Found | Infeasible:
        """Search as `search` does."""
        if self.kept.peak <= budget:
            return self._found(self.kept, budget)
        if budget < self.lower_bound:
            return self._infeasible()
        state = self._best(budget, known=self.known)
        if state is None and self._lowest.peak <= budget:
            state = self._polished(budget, [self._lowest.column])
        return self._infeasible() if state is None else self._found(state, budget)

    def floor(self) -> Found:
        """Search as `floor` does."""
        return self._found(self._cheapest, self._cheapest.peak)

    def nearest(self, budget: int, squared: int = EVEN) -> Found:
        """Find what comes nearest to a budget that nothing keeps, over all positions; and of what is nowhere over it by
        more than that, the fewest seconds.

        Where the peak of a step cannot be lower, this lowers what else there is: all that is high (``EVEN``), or the
        highest first (``STEEP``).
        """
        if (budget, squared) not in self._near:
            self._near[budget, squared] = self._as_near(budget, squared)
        return self._near[budget, squared]

    def _as_near(self, budget: int, squared: int) -> Found:
        nearest = self._repaired(budget, [self._lowest.column, self._everything, self.kept.column], squared)
        (profile,) = self.evaluator.profiles(nearest.column[:, None])
        local = self._local(profile.at_least(budget))
        state = local.state(nearest.column)
        if self.use.improve:
            state = local.improve(state, self.use.rounds, pairs=self.use.pairs)
            state = local.shake(state, self.use.shakes, pairs=self.use.pairs)
        return Found(self.evaluator.choices(state.column), state.peak, state.seconds, 0.0, self._notes())

    @cached_property
    def same_everywhere(self) -> Search:
        """Return the same by ``steady``, whatever was searched for here before."""
        if self.steady is None:
            return self
        return Search(self.steady, self.surroundings, gradients=self.gradients, heuristics=self.heuristics)

    def frontier(self, points: int) -> list[Found]:
        """Search as `frontier` does."""
        low, high = self._lowest.peak, self.kept.peak
        budgets = sorted({low + (high - low) * k // max(points - 1, 1) for k in range(points)} | {low, high})
        found, best = list[Found](), None
        for budget in budgets:
            one = self.within(budget)
            if isinstance(one, Found) and (best is None or one.seconds < best.seconds or one.peak < best.peak):
                best = one
                found.append(one)
        return found[::-1]

    # -- one budget

    def _local(self, budget: int | Profile, squared: int = 0) -> Local:
        return Local(self.evaluator, budget, small=self.small, squared=squared)

    def _best(self, budget: int, *more: Column, known: Sequence[State] = ()) -> State | None:
        starts = [*more, self.kept.column]
        if self.use.relaxation:
            starts += self._relaxed(budget)
        near = sorted(known, key=lambda state: abs(state.peak - budget))[:2]
        return self._polished(budget, [*starts, *(state.column for state in near)])

    def _relaxed(self, budget: int) -> list[Column]:
        """The rounded relaxation."""
        fractions = self._fractions(budget)
        if fractions is None:
            return []
        column = np.zeros(self.evaluator.rows, dtype=bool)
        rows = self.flat.drop_rows
        column[: self.drops] = (fractions.keep[rows] < 0.5) & (self.flat.bytes[rows] > self.small)
        column[self.drops :] = fractions.forms > 0.5
        return [column]

    def _polished(self, budget: int, starts: Iterable[Column]) -> State | None:
        """The best of what repair and improvement make of the starts; None if none fits."""
        local, fits, seen = self._local(budget), list[State](), set[bytes]()
        for start in starts:
            state = local.settled(local.state(start))
            if state.column.tobytes() in seen:
                continue
            seen.add(state.column.tobytes())
            state = local.repair(state, self.use.rounds)
            if state.fits:
                fits.append(local.improve(state, self.use.rounds, pairs=False) if self.use.improve else state)
        if not fits:
            return None
        best = min(fits, key=lambda state: state.seconds)
        fractions = self._fractions(budget)
        enough = 0.0 if fractions is None else fractions.seconds * CLOSE
        if self.use.improve and best.seconds > enough:
            best = local.improve(best, self.use.rounds, pairs=self.use.pairs)
            best = local.shake(best, self.use.shakes, pairs=self.use.pairs, enough=enough)
        self.known.append(best)
        return best

    # -- the floor

    # Not from states of earlier searches: what a budget is refused with is to be found again when it is given.

    @property
    def floor_peak(self) -> int:
        """Return the smallest peak that the search can reach."""
        return self._lowest.peak

    @cached_property
    def _cheapest(self) -> State:
        """Of so small a peak, the one with the fewest seconds."""
        return self._best(self._lowest.peak, self._lowest.column) or self._lowest

    @cached_property
    def _lowest(self) -> State:
        """Of the smallest peak, whatever it adds."""
        return self._local(0).state(self.same_everywhere._lowest_column)

    def _repaired(self, budget: int, starts: Sequence[Column], squared: int) -> State:
        """Repair each start, and return the one with the fewest bytes over the budget."""
        local = self._local(budget, squared)
        repaired = (local.repair(local.settled(local.state(start)), self.use.rounds) for start in starts)
        return min(repaired, key=lambda state: (state.excess, state.seconds))

    @property
    def _everything(self) -> Column:
        """All made again that can be."""
        column = np.zeros(self.evaluator.rows, dtype=bool)
        column[: self.drops] = self.flat.bytes[self.flat.drop_rows] > self.small
        return column

    @cached_property
    def _lowest_column(self) -> Column:
        """What comes nearest to a little less than the lower bound; then by halving the distance to it, from the lowest
        state so far; where that does not get further, from others."""
        starts = [self.kept.column, self._everything]
        low, zero = self.lower_bound, self._local(0)
        under = low - (self.kept.peak - low) // 50  # so that what is at the bound already counts, too
        near = (self._repaired(under, [start], STEEP).column for start in starts)
        best = min((zero.state(column) for column in (*starts, *near)), key=_by_peak)
        while best.peak - low > best.peak // 400:  # the last steps take as long as the first, and bring next to nothing
            budget = low + (best.peak - low) // 2
            tried = self._lower(budget, [best.column], starts)
            best = min(best, tried, key=_by_peak)
            if best.peak > budget:
                low = budget + 1
        return best.column

    def _lower(self, budget: int, starts: list[Column], others: list[Column]) -> State:
        """The first start that can be repaired to the budget, or the one that came nearest. What the others come to is
        where they start from next time."""
        local, best = self._local(budget), None
        for at, start in enumerate((*starts, *others), -len(starts)):
            state = local.repair(local.settled(local.state(start)), self.use.rounds)
            if at >= 0:
                others[at] = state.column
            if best is None or state.peak < best.peak:
                best = state
            if state.fits:
                break
        assert best is not None
        return best

    # -- results

    def _fractions(self, budget: int) -> Fractions | None:
        if budget not in self._solved:
            self._solved[budget] = self.relaxation.seconds(budget)
        return self._solved[budget]

    def _found(self, state: State, budget: int) -> Found:
        fractions = self._fractions(budget) if state.seconds > 0 else None
        bound = 0.0 if fractions is None else min(fractions.seconds, state.seconds)
        return Found(self.evaluator.choices(state.column), state.peak, state.seconds, bound, self._notes())

    def _infeasible(self) -> Infeasible:
        lowest = self._lowest
        choices = self.evaluator.choices(lowest.column)
        return Infeasible(lowest.peak, choices, self.lower_bound, self._notes())

    def _notes(self) -> tuple[str, ...]:
        switched = [one.name for one in fields(self.use) if not getattr(self.use, one.name)]
        notes = [f"switched off in the search: {', '.join(switched)}"] if switched else []
        if not self.flat.regular:
            notes.append(
                "a gradient of this step lies in memory of something else: candidates are evaluated one by one"
            )
        return tuple(notes)
