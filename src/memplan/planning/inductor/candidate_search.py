"""A budget -> a step of fused kernels within it: planned op by op, judged by the code that is generated for it.

The search counts every op's results, and knows nothing of fusion. What it finds is traced and lowered, and the bytes of
the generated code decide: over the budget, the search aims lower by as much; with room left, higher.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from memplan._torch import inductor
from memplan.planning.cost.op_timing import step_seconds
from memplan.planning.graph import op_schema
from memplan.planning.graph.joint_graph import GraphOp, JointGraph
from memplan.planning.graph.resident import Surroundings
from memplan.planning.inductor.code_memory import fused_timeline
from memplan.planning.inductor.partition import Fused, Part, as_fused, fused, lowering
from memplan.planning.schedule.actions import Choices
from memplan.planning.schedule.byte_levels import base_level, levels
from memplan.planning.schedule.scheduler import Schedule
from memplan.planning.search.search import STEEP, Found, Infeasible, Search
from memplan.simulation.timeline import Timeline

FUSED_SHARE = 0.1
"""Cost of recomputing a pointwise op inside of another's kernel, as a share of its cost by itself: it reads and writes
nothing of its own."""
_AIMS = 4
"""Candidates at most: each is lowered, which takes seconds. Halving between two targets instead of aiming by the last
peak gave the same plans for three models at nine budgets, and needs more candidates where code takes otherwise."""
_SEARCHES = 8
"""Budgets that are searched for at most: what was a candidate before costs nothing again."""
_CLOSE = 0.02
"""Room that is left alone: its share of what can be saved."""
_UNDER, _BELOW = 0.1, 0.3
"""Steps by which the smallest peak is sought below the search's floor, too: shares of the bytes beyond those that are
always there. The second is repeated, while the code keeps what was aimed at."""
_RUNGS = 3
"""So many times at most."""
_WORTH = 0.005
"""Share of a step's seconds that another candidate is to save, op by op: for less, none is lowered."""


@dataclass(frozen=True)
class Candidate:
    """Choices, the code generated for them, and its bytes over time."""

    fused: Fused
    codes: Mapping[str, inductor.Code]
    """Code that Inductor writes for each part."""
    timeline: Timeline

    @property
    def schedule(self) -> Schedule:
        """Schedule of the choices."""
        return self.fused.schedule

    @property
    def peak(self) -> int:
        """Predicted, in bytes."""
        return self.timeline.peak_reserved


class Fusing:
    """Steps of fused kernels for one graph, for any number of budgets.

    Args:
        search: on a graph with the costs of `as_fusible`.
    """

    def __init__(self, search: Search) -> None:
        self._search = search
        self._known: dict[Choices, Candidate] = {}
        self._aims: dict[Choices, int] = {}
        """Bytes that were searched for when each candidate was found."""
        self._results: dict[int, Found | Infeasible] = {}
        """Results of the search, by the bytes that were searched for."""
        self._seconds = step_seconds(search.graph)

    @property
    def known(self) -> tuple[Candidate, ...]:
        """Evaluated candidates, in order."""
        return tuple(self._known.values())

    def candidate(self, choices: Choices) -> Candidate:
        """Lower choices, unless that was done before."""
        made = as_fused(self._search.graph, choices)
        if made.choices not in self._known:
            self._known[made.choices] = judged(made, self._search.around)
        return self._known[made.choices]

    def within(self, budget: int) -> Candidate | None:
        """Return the fastest candidate found that keeps the budget; None where not even the lowest keeps it."""
        known = self._fastest_known(budget) is not None
        if not known and isinstance(self._within(budget), Infeasible) and not self._can_keep(budget):
            return None
        found = self._sought(budget)
        if found is None and self._can_keep(budget):
            found = self._fastest_known(budget)
        return found

    def frontier(self, points: int) -> list[Found]:
        """Return plans from all kept to the floor, with the peaks of their code: of the evaluated candidates, those
        that no other beats in both bytes and seconds."""
        made = [self.candidate(replace(one.choices, joined=True)) for one in self._search.frontier(points)]
        made += [self.lowest, *self.known]  # in this order: finding the lowest evaluates others
        fastest, found = float("inf"), list[Found]()
        for one in sorted(made, key=lambda one: (one.peak, one.schedule.seconds)):
            if one.schedule.seconds < fastest:
                fastest = one.schedule.seconds
                found.append(Found(one.schedule.choices, one.peak, fastest, 0.0))
        return found[::-1]

    @cached_property
    def lowest(self) -> Candidate:
        """Candidate with the smallest peak."""
        return min(self._low(), key=lambda one: one.peak)

    def _low(self) -> Iterator[Candidate]:
        """Yield candidates for the smallest peak: which of them has it, their code says. They are the same whatever
        seconds were measured, and whatever was evaluated before, so that a budget that is refused with their smallest
        peak is kept once it is given."""
        search = self._search.same_everywhere
        found = search.floor()
        aim, there = found.peak, base_level(search.graph, found.choices, search.around)
        floor = self._looked_at(found, aim)
        yield floor
        if floor.peak > found.peak:  # lower levels leave room for what the code takes beyond them
            under = aim - int(_UNDER * (aim - there))
            yield self.candidate(replace(search.nearest(under, STEEP).choices, joined=True))
        for _ in range(_RUNGS):  # the code of an op that takes most op by op may take less
            aim -= int(_BELOW * (aim - there))
            one = self._looked_at(search.nearest(aim), aim)
            yield one
            if one.peak > aim:
                break

    def _can_keep(self, budget: int) -> bool:
        return any(one.peak <= budget for one in self._low())

    def _sought(self, budget: int) -> Candidate | None:
        """Return the fastest candidate that keeps the budget, by aiming the search at bytes whose code may come to
        it."""
        aims, best, known = Aims(budget, self._room), self._fastest_known(budget), len(self._known)
        aim = aims.first(self._nearest(budget))
        for _ in range(_SEARCHES):
            found = self._found(aim)
            if best is not None and not self._is_worth(found, best):
                break
            before = len(self._known)
            one = self._looked_at(found, aim)
            if found.peak > aim and one.peak > budget and len(self._known) == before:
                break  # lower targets find the same candidate
            if one.peak <= budget:
                best = one if best is None or one.schedule.seconds < best.schedule.seconds else best
                if _keeps_all(one) or budget - one.peak <= self._room:
                    break
            if len(self._known) - known >= _AIMS:
                break
            reached = self._reached(one)
            aims = aims.seen(aim, reached, one.peak)
            later = aims.next(aim, reached, one.peak)
            if later is None:
                break
            aim = later
        return best

    def _found(self, aim: int) -> Found:
        """Return what the search finds within a number of bytes, op by op, or what comes nearest to them: its code may
        take less."""
        found = self._within(aim)
        return self._search.nearest(aim) if isinstance(found, Infeasible) else found

    def _within(self, aim: int) -> Found | Infeasible:
        if aim not in self._results:
            self._results[aim] = self._search.within(aim)
        return self._results[aim]

    def _looked_at(self, found: Found, aim: int) -> Candidate:
        one = self.candidate(replace(found.choices, joined=True))
        self._aims.setdefault(one.schedule.choices, aim)
        return one

    def _reached(self, one: Candidate) -> int:
        """Return a candidate's peak as the search counts it; where that is above what was searched for, the latter."""
        peak = levels(one.schedule, self._search.around).peak
        return min(peak, self._aims.get(one.schedule.choices, peak))

    def _fastest_known(self, budget: int) -> Candidate | None:
        fit = (one for one in self.known if one.peak <= budget)
        return min(fit, key=lambda one: one.schedule.seconds, default=None)

    def _is_worth(self, found: Found, best: Candidate) -> bool:
        """Return whether a plan of the search is enough faster to be worth lowering."""
        return best.schedule.seconds - found.seconds > _WORTH * self._seconds

    def _nearest(self, budget: int) -> tuple[int, int] | None:
        """Return, of the candidates for other budgets, the one nearest to this budget: the bytes it reached in the
        search, and the peak of its code."""
        nearest = min(self.known, key=lambda one: abs(one.peak - budget), default=None)
        return None if nearest is None else (self._reached(nearest), nearest.peak)

    @property
    def _room(self) -> int:
        return int(_CLOSE * self._range)

    @property
    def _range(self) -> int:
        return self._search.kept.peak - self._search.lower_bound


def _keeps_all(one: Candidate) -> bool:
    return not one.schedule.choices.recompute and not one.schedule.choices.kept_as


def judged(made: Schedule, around: Surroundings) -> Candidate:
    """Lower a schedule of `as_fused`, which takes seconds, and predict its bytes."""
    of = fused(made)
    codes = {part.name: _code_of(part) for part in of.parts}
    return Candidate(of, codes, fused_timeline(of, codes, around))


def _code_of(part: Part) -> inductor.Code:
    with lowering(part.name):
        return inductor.code_of(part.lowerable)


def as_fusible(graph: JointGraph) -> JointGraph:
    """Return the graph for a search of steps of fused kernels: what its ops cost there when they run again, and without
    the forms that work in another value's memory, since a compiler has its own."""
    return replace(graph, ops=tuple(_fusible(op) for op in graph.ops))


def _fusible(op: GraphOp) -> GraphOp:
    seconds = op.seconds
    if torch.Tag.pointwise in getattr(op_schema.overload(op.target), "tags", ()):
        seconds *= FUSED_SHARE
    # A norm from its statistics is pointwise, too.
    again = op.again and replace(op.again, seconds=op.again.seconds * FUSED_SHARE, overwrites=(), scratch_into=None)
    return replace(op, seconds=seconds, again=again, overwrites=(), scratch_into=None)


@dataclass(frozen=True, slots=True)
class Aims:
    """Search targets so far, and the peaks that came of them."""

    budget: int
    room: int
    """Bytes under the budget that may be left."""
    fits: int | None = None
    """Largest target whose candidate kept the budget."""
    over: int | None = None
    """Smallest target whose candidate exceeded the budget."""

    def first(self, known: tuple[int, int] | None = None) -> int:
        """Return the first target. ``known``: search bytes and peak of a candidate for a budget near this one."""
        return self.budget if known is None else self._beside(*known)

    def seen(self, aim: int, found: int, peak: int) -> Aims:
        """Return the aims with one more target: its search bytes, and the peak of its code."""
        if peak <= self.budget:
            most = max(aim, found)
            return replace(self, fits=most if self.fits is None else max(self.fits, most))
        least = min(aim, found)  # targets between find the same candidate
        return replace(self, over=least if self.over is None else min(self.over, least))

    def next(self, aim: int, found: int, peak: int) -> int | None:
        """Return the next target; None where it would find nothing new.

        Args:
            aim, found, peak: of the last search, as for `seen`.
        """
        wanted = self._beside(max(aim, found) if peak <= self.budget else min(aim, found), peak)
        if self.fits is None or self.over is None:
            return wanted
        if self.over - self.fits <= self.room:
            return None
        return wanted if self.fits < wanted < self.over else (self.fits + self.over) // 2

    def _beside(self, found: int, peak: int) -> int:
        """Return a target as far from the budget as a candidate's search bytes are from its peak, less half of the
        room, so that a little more than expected is not over the budget."""
        return self.budget + found - peak - self.room // 2
