"""Find the choices that fit a memory budget with the fewest added seconds, and the smallest budget that can be met."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import numpy as np

from memplan.planning.graph.joint_graph import JointGraph
from memplan.planning.graph.resident import OutsideMemory
from memplan.planning.levers.lever import KEPT_UNTIL_UPDATE, GradientUse
from memplan.planning.levers.registry import LEVERS
from memplan.planning.schedule.actions import Choices
from memplan.planning.search.batch_evaluator import Evaluator
from memplan.planning.search.candidates import Profile
from memplan.planning.search.local_search import Column, LocalSearch, State
from memplan.planning.search.lower_bound import Fractions, Relaxation

STEEP = 3
"""How often to square the bytes over an unreachable budget, so that the highest position of the step counts most."""
EVEN = 1
"""How often to square them so that all high positions count."""
CLOSE = 1.005
"""A result within this factor of its lower bound is not improved further."""


@dataclass(frozen=True, slots=True)
class Heuristics:
    """Switches of the search. Each makes it faster or its result better; the result is valid without any of them."""

    relaxation: bool = True
    """Start from the rounded linear relaxation (`lower_bound.Relaxation`)."""
    encodings: bool = True
    """Save values in smaller encodings. Off: values are saved unencoded or recomputed."""
    offload: bool = True
    """Offload values to host memory, in plans for a CUDA card."""
    small_values: bool = True
    """Always save values smaller than 1/4096 of the largest."""
    improve: bool = True
    """Local search on single values for fewer seconds, once the budget is met."""
    pairs: bool = True
    """Local search also on pairs: save a value that was recomputed, and free another to make room for it."""
    shakes: int = 6
    """How often the search escapes a local optimum: it saves a value beyond the budget, repairs and improves."""
    rounds: int = 60
    """Most rounds of one local search."""
    order: bool = True
    """Move backward ops where the peak falls (`memplan.planning.search.order`), with the engine ``graph``."""


@dataclass(frozen=True, slots=True)
class Solution:
    """Choices within a budget."""

    choices: Choices
    peak: int
    """Peak bytes of the whole step."""
    seconds: float
    """Seconds that recomputed values and encodings add to the step."""
    lower_bound_seconds: float
    """No schedule within the budget adds fewer seconds."""
    notes: tuple[str, ...] = ()
    """Notes for the plan."""

    @property
    def gap(self) -> float:
        """Seconds above the proven lower bound."""
        return max(0.0, self.seconds - self.lower_bound_seconds)


@dataclass(frozen=True, slots=True)
class Infeasible:
    """The search reached no schedule within the budget."""

    smallest: int
    """Smallest peak that the search reached, in bytes."""
    choices: Choices
    """Choices with that peak."""
    lower_bound: int
    """Bytes that every schedule needs: a smaller budget is proven to be impossible."""
    notes: tuple[str, ...] = ()


@dataclass
class Search:
    """Search for choices on a graph; all budgets share intermediate results.

    ``modelled_graph`` is the same graph with modelled instead of measured seconds. The floor is searched on it, so that
    another process with other measurements arrives at the same smallest budget.
    """

    graph: JointGraph
    outside_memory: OutsideMemory = field(default_factory=OutsideMemory)
    gradients: GradientUse = field(default=KEPT_UNTIL_UPDATE, kw_only=True)
    heuristics: Heuristics | None = field(default=None, kw_only=True)
    modelled_graph: JointGraph | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Leave out the encodings of levers that are off, and evaluate the step with all values saved."""
        self.switches = self.heuristics or Heuristics()
        off = {lever.name for lever in LEVERS if lever.switch and not getattr(self.switches, lever.switch)}
        if off:
            self.graph = replace(self.graph, forms=tuple(form for form in self.graph.forms if form.lever not in off))
        self.evaluator = Evaluator(self.graph, self.outside_memory, gradients=self.gradients)
        self.flat = self.evaluator.flat
        self.recompute_decisions = len(self.flat.recomputable_values)
        """Number of the first rows of a candidate, which say what is recomputed; the others say which forms are used.
        """
        negligible = int(self.flat.value_bytes.max(initial=0)) // 4096  # see Heuristics.small_values
        self.small_bytes = negligible if self.switches.small_values else 0
        """Bytes up to which values are always saved."""
        self.relaxation = Relaxation(self.flat, small_bytes=negligible)
        self.lower_bound = self.relaxation.unavoidable.peak
        self.save_all = self.local(budget=0).state(np.zeros(self.evaluator.decision_count, dtype=bool))
        self.earlier_results: list[State] = []
        """Results of earlier budgets: starts for the next search."""
        self._solved: dict[int, Fractions | None] = {}
        """Solutions of the relaxation by budget."""
        self._nearest_results: dict[tuple[int, int], Solution] = {}
        """Results of `nearest` by its arguments."""

    def within(self, budget: int) -> Solution | Infeasible:
        """Find choices within ``budget`` bytes that add as few seconds as the search can reach. The result is the same
        for the same arguments on every machine."""
        if self.save_all.peak <= budget:
            return self._result(self.save_all, budget)
        if budget < self.lower_bound:
            return self._infeasible()
        state = self._search_from(budget, earlier_results=self.earlier_results)
        if state is None and self.lowest_peak_state.peak <= budget:
            state = self._optimize(budget, [self.lowest_peak_state.column])
        return self._infeasible() if state is None else self._result(state, budget)

    def floor(self) -> Solution:
        """Find the smallest peak that the search can reach, and the fewest seconds there."""
        return self._result(self.fastest_at_floor, self.fastest_at_floor.peak)

    def nearest(self, budget: int, squarings: int = EVEN) -> Solution:
        """Find the choices with the least excess over an unreachable budget, summed over all positions of the step; of
        those that are nowhere higher, the choices with the fewest seconds.

        Where the peak of the step cannot be lowered, this lowers the other positions: all high positions (``EVEN``), or
        the highest first (``STEEP``).
        """
        if (budget, squarings) not in self._nearest_results:
            self._nearest_results[budget, squarings] = self._search_nearest(budget, squarings)
        return self._nearest_results[budget, squarings]

    def _search_nearest(self, budget: int, squarings: int) -> Solution:
        """Compute the result of `nearest`, which caches it."""
        nearest = self._best_repair(
            budget, [self.lowest_peak_state.column, self._all_recomputed, self.save_all.column], squarings
        )
        # its own levels are now the budget: fewer seconds, nowhere above them or the budget proper
        (profile,) = self.evaluator.profiles(nearest.column[:, None])
        local = self.local(profile.at_least(budget))
        state = local.state(nearest.column)
        if self.switches.improve:
            state = local.improve(state, self.switches.rounds, pairs=self.switches.pairs)
            state = local.escape_local_optima(state, self.switches.shakes, pairs=self.switches.pairs)
        return Solution(
            self.evaluator.choices(state.column), state.peak, state.seconds, lower_bound_seconds=0.0,
            notes=self._notes(),
        )  # fmt: skip

    @cached_property
    def deterministic(self) -> Search:
        """The same search on ``modelled_graph``: its result does not depend on measured times or on earlier
        searches."""
        if self.modelled_graph is None:
            return self
        return Search(self.modelled_graph, self.outside_memory, gradients=self.gradients, heuristics=self.heuristics)

    def forget(self) -> None:
        """Free the memory of the candidates' latest results."""
        self.evaluator.forget()
        if "deterministic" in vars(self):
            self.deterministic.evaluator.forget()

    def in_order(self, order: tuple[int, ...]) -> Search:
        """Return the same search with the backward ops in another order (see ``JointGraph.order``)."""
        steady = None if self.modelled_graph is None else self.modelled_graph.in_order(order)
        return replace(self, graph=self.graph.in_order(order), modelled_graph=steady)

    def frontier(self, points: int) -> list[Solution]:
        """Plan at ``points`` evenly spaced budgets, from the peak with all values saved down to the floor.

        A result that adds at least as many seconds as one of the same or a smaller peak is left out.
        """
        low, high = self.lowest_peak_state.peak, self.save_all.peak
        budgets = sorted({low + (high - low) * k // max(points - 1, 1) for k in range(points)} | {low, high})
        results, best = list[Solution](), None
        for budget in budgets:
            result = self.within(budget)
            if isinstance(result, Infeasible):
                continue
            if best is None or result.seconds < best.seconds or result.peak < best.peak:
                best = result
                results.append(result)
        return results[::-1]

    # -- a single budget

    def local(self, budget: int | Profile, squarings: int = 0) -> LocalSearch:
        """Return the local search for a budget. ``squarings``: see `Evaluator.evaluate`."""
        return LocalSearch(self.evaluator, budget, small_bytes=self.small_bytes, squarings=squarings)

    def _search_from(self, budget: int, *more: Column, earlier_results: Sequence[State] = ()) -> State | None:
        """Search from several candidates: ``more``, all values saved, the rounded relaxation, and the earlier results
        of the nearest budgets. None if no result fits the budget."""
        starts = [*more, self.save_all.column]
        if self.switches.relaxation:
            starts += self._rounded_relaxation(budget)
        nearest_two = sorted(earlier_results, key=lambda state: abs(state.peak - budget))[:2]
        return self._optimize(budget, [*starts, *(state.column for state in nearest_two)])

    def _rounded_relaxation(self, budget: int) -> list[Column]:
        """Return the solution of the linear relaxation, rounded to a candidate, in a list; empty if there is no
        solution."""
        fractions = self._fractions(budget)
        if fractions is None:
            return []
        column = np.zeros(self.evaluator.decision_count, dtype=bool)
        rows = self.flat.recomputable_rows
        # recomputed are values of which less than half is kept, used are forms of which more than half is
        column[: self.recompute_decisions] = (fractions.live_share[rows] < 0.5) & (
            self.flat.value_bytes[rows] > self.small_bytes
        )
        column[self.recompute_decisions :] = fractions.live_share_of_form > 0.5
        return [column]

    def _optimize(self, budget: int, starts: Iterable[Column]) -> State | None:
        """Repair and improve every start. Return the state within the budget that adds the fewest seconds, or None."""
        local, fitting, seen = self.local(budget), list[State](), set[bytes]()  # seen: candidates
        for start in starts:
            state = local.drop_unneeded(local.state(start))
            if state.column.tobytes() in seen:
                continue
            seen.add(state.column.tobytes())
            state = local.repair(state, self.switches.rounds)
            if state.fits and self.switches.improve:  # without pairs: only the best start is worth their time
                state = local.improve(state, self.switches.rounds, pairs=False)
            if state.fits:
                fitting.append(state)
        if not fitting:
            return None
        best = min(fitting, key=lambda state: state.seconds)
        fractions = self._fractions(budget)
        sufficient_seconds = 0.0 if fractions is None else fractions.seconds * CLOSE
        if self.switches.improve and best.seconds > sufficient_seconds:
            best = local.improve(best, self.switches.rounds, pairs=self.switches.pairs)
            best = local.escape_local_optima(
                best, self.switches.shakes, pairs=self.switches.pairs, sufficient_seconds=sufficient_seconds
            )
        self.earlier_results.append(best)
        return best

    # -- the floor

    # Searched without the states of earlier searches: an error names the floor as the smallest budget, and a later
    # search with that budget has to reach it again.

    @property
    def floor_peak(self) -> int:
        """Smallest peak that the search can reach, in bytes."""
        return self.lowest_peak_state.peak

    @cached_property
    def fastest_at_floor(self) -> State:
        """The state with the fewest seconds at the smallest peak."""
        return self._search_from(self.lowest_peak_state.peak, self.lowest_peak_state.column) or self.lowest_peak_state

    @cached_property
    def lowest_peak_state(self) -> State:
        """A state with the smallest peak, whatever seconds it adds."""
        return self.local(budget=0).state(self.deterministic._lowest_column)

    def _best_repair(self, budget: int, starts: Sequence[Column], squarings: int) -> State:
        """Repair every start and return the state with the least excess over the budget. ``squarings``: see
        `Evaluator.evaluate`."""
        local = self.local(budget, squarings)
        states = (local.repaired(start, self.switches.rounds) for start in starts)
        return min(states, key=lambda state: (state.excess, state.seconds))

    @property
    def _all_recomputed(self) -> Column:
        """The candidate that recomputes every value it can."""
        column = np.zeros(self.evaluator.decision_count, dtype=bool)
        # the first rows say which values are recomputed; small values never are
        column[: self.recompute_decisions] = self.flat.value_bytes[self.flat.recomputable_rows] > self.small_bytes
        return column

    @cached_property
    def nearest_to_bound(self) -> State:
        """The state nearest to a budget just below the lower bound, from all values saved."""
        return self._near_bound(self.save_all.column)

    def _near_bound(self, start: Column) -> State:
        """Return the state nearest to a budget just below the lower bound, repaired from a candidate."""
        # just below, so that positions exactly at the bound have an excess, too
        budget = self.lower_bound - (self.save_all.peak - self.lower_bound) // 50
        return self._best_repair(budget, [start], STEEP)

    @cached_property
    def _lowest_column(self) -> Column:
        """The candidate with the smallest peak.

        Starts from the states nearest to a budget just below the lower bound, then bisects between the lower bound and
        the lowest peak so far.
        """

        def by_peak(state: State) -> tuple[int, float]:
            """Return the key to compare states by."""
            return state.peak, state.seconds

        starts = [self.save_all.column, self._all_recomputed]
        not_reached, local = self.lower_bound, self.local(budget=0)  # no smaller budget can be reached
        near = (self.nearest_to_bound.column, self._near_bound(self._all_recomputed).column)
        best = min((local.state(column) for column in (*starts, *near)), key=by_peak)
        while best.peak - not_reached > best.peak // 400:  # each halving takes as long, even for the last bytes
            budget = not_reached + (best.peak - not_reached) // 2
            best = min(best, self._reach_budget(budget, best.column, starts), key=by_peak)
            if best.peak > budget:
                not_reached = budget + 1
        return best.column

    def _reach_budget(self, budget: int, start: Column, others: list[Column]) -> State:
        """Repair ``start``, then ``others``, until one fits the budget, and return the state with the lowest peak.

        Every tried candidate of ``others`` is replaced by its repaired state, from which the next call continues.
        """
        local = self.local(budget)
        best = local.repaired(start, self.switches.rounds)
        for k, other in enumerate(others):
            if best.fits:
                break
            state = local.repaired(other, self.switches.rounds)
            others[k] = state.column
            if state.peak < best.peak:
                best = state
        return best

    # -- results

    def _fractions(self, budget: int) -> Fractions | None:
        """Return the solution of the linear relaxation for a budget, None if it has none. It is solved once for each
        budget."""
        if budget not in self._solved:
            self._solved[budget] = self.relaxation.seconds(budget)
        return self._solved[budget]

    def _result(self, state: State, budget: int) -> Solution:
        """Return a state as a solution, with the lower bound of the seconds that any schedule within the budget
        adds."""
        fractions = self._fractions(budget) if state.seconds > 0 else None
        bound = 0.0 if fractions is None else min(fractions.seconds, state.seconds)
        return Solution(self.evaluator.choices(state.column), state.peak, state.seconds, bound, self._notes())

    def _infeasible(self) -> Infeasible:
        """Return the result for a budget that the search cannot meet: the smallest peak it can reach."""
        lowest = self.lowest_peak_state
        choices = self.evaluator.choices(lowest.column)
        return Infeasible(lowest.peak, choices, self.lower_bound, self._notes())

    def _notes(self) -> tuple[str, ...]:
        """Return the notes for the plan: heuristics that are off, and whether the search was slow."""
        off = [switch.name for switch in fields(self.switches) if not getattr(self.switches, switch.name)]
        notes = [f"switched off in the search: {', '.join(off)}"] if off else []
        if not self.flat.supports_batches:
            notes.append(
                "a gradient of this step lies in memory of something else: candidates are evaluated one by one"
            )
        return tuple(notes)
