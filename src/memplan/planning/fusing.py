"""A budget -> a step of fused kernels within it: planned op by op, judged by the code that is generated for it.

The search counts every op's results, and knows nothing of fusion. What it finds is traced and lowered, and the bytes of
the generated code decide: over the budget, the search aims lower by as much; with room left, higher.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from memplan._torch import inductor
from memplan.planning import forms
from memplan.planning.aims import Aims
from memplan.planning.costs import step_seconds
from memplan.planning.fused import Fused, Part, as_fused, fused, lowering
from memplan.planning.fused_bytes import fused_timeline
from memplan.planning.graph import GraphOp, JointGraph
from memplan.planning.peaks import Surroundings, levels
from memplan.planning.schedule import Choices, Schedule
from memplan.planning.search import Found, Infeasible, Search
from memplan.simulation.model import Timeline

FUSED_SHARE = 0.1
"""What running a pointwise op again costs beside another in one kernel, of what it costs by itself: it reads and writes
nothing of its own."""
_AIMS = 4
"""Candidates at most: each is lowered, which takes seconds."""
_SEARCHES = 8
"""Budgets that are searched for at most: what was a candidate before costs nothing again."""
_CLOSE = 0.02
"""Room that is left alone: its share of what can be saved."""
_FAR = 0.1
"""The same share. Where the code of the floor takes so much more than its ops say, these say little about it."""
_WORTH = 0.005
"""Share of a step's seconds that another candidate is to save, op by op: for less, none is lowered."""


@dataclass(frozen=True)
class Candidate:
    """Choices, and what comes of them."""

    fused: Fused
    codes: Mapping[str, inductor.Code]
    """By part of it, the code that Inductor writes."""
    timeline: Timeline

    @property
    def schedule(self) -> Schedule:
        """What runs when."""
        return self.fused.schedule

    @property
    def peak(self) -> int:
        """Predicted, in bytes."""
        return self.timeline.peak_allocated


class Fusing:
    """Steps of fused kernels for one graph, for any number of budgets.

    Args:
        search: on a graph with the costs of `as_fusible`.
    """

    def __init__(self, search: Search) -> None:
        self._search = search
        self._known: dict[Choices, Candidate] = {}
        self._seconds = step_seconds(search.graph)

    @property
    def known(self) -> tuple[Candidate, ...]:
        """All that were looked at, in their order."""
        return tuple(self._known.values())

    def candidate(self, choices: Choices) -> Candidate:
        """What comes of some choices."""
        made = as_fused(self._search.graph, choices)
        if made.choices not in self._known:
            self._known[made.choices] = judged(made, self._search.around)
        return self._known[made.choices]

    def within(self, budget: int) -> Candidate | None:
        """The fastest that keeps the budget, of a few that are looked at; None: not even the floor keeps it."""
        aims, best, known = Aims(budget, self._room), self._fastest_known(budget), len(self._known)
        aim = aims.first(self._nearest(budget))
        for _ in range(_SEARCHES):
            found = self._search.within(aim)
            if best is not None and (isinstance(found, Infeasible) or not self._is_worth(found, best)):
                break
            one = self._candidate_of(found, budget)
            reached = self._op_by_op(one)
            if one.peak <= budget:
                best = one if best is None or one.schedule.seconds < best.schedule.seconds else best
                if _keeps_all(one) or budget - one.peak <= self._room:
                    break
            if len(self._known) - known >= _AIMS or (isinstance(found, Infeasible) and best is None):
                break
            aims = aims.seen(aim, reached, one.peak)
            later = aims.next(aim, reached, one.peak)
            if later is None:
                break
            aim = later
        if best is None and self.lowest.peak <= budget:
            best = self._floor(budget)
        return best

    @cached_property
    def lowest(self) -> Candidate:
        """The least that there is: the floor of the search. Where its code takes much more than its ops say, others do
        with less, and one of them is looked at, too."""
        floor = self.candidate(replace(self._search.lowest(), joined=True))
        more = floor.peak - self._op_by_op(floor)
        if more <= _FAR * self._range:
            return floor
        other = self.candidate(replace(self._search.lowest(more // 2), joined=True))
        return min((floor, other), key=lambda one: one.peak)

    def _floor(self, budget: int) -> Candidate:
        """The floor; one that is faster by the seconds of this machine where that keeps the budget, too."""
        lowest = self.lowest
        if lowest.peak > budget:
            return lowest
        found = self._search.floor()
        if not self._is_worth(found, lowest):
            return lowest
        other = self.candidate(replace(found.choices, joined=True))
        return other if other.peak <= budget else lowest

    def _candidate_of(self, found: Found | Infeasible, budget: int) -> Candidate:
        if isinstance(found, Infeasible):
            return self._floor(budget)
        return self.candidate(replace(found.choices, joined=True))

    def _fastest_known(self, budget: int) -> Candidate | None:
        fit = (one for one in self.known if one.peak <= budget)
        return min(fit, key=lambda one: one.schedule.seconds, default=None)

    def _op_by_op(self, one: Candidate) -> int:
        """Its peak as the search counts."""
        return levels(one.schedule, self._search.around).peak

    def _is_worth(self, found: Found, best: Candidate) -> bool:
        """Whether what a search found is so much faster that it is worth a look."""
        return best.schedule.seconds - found.seconds > _WORTH * self._seconds

    def _nearest(self, budget: int) -> tuple[int, int] | None:
        """Of what was looked at for other budgets, the nearest to this one: its peak op by op, and that of its code."""
        nearest = min(self.known, key=lambda one: abs(one.peak - budget), default=None)
        return None if nearest is None else (self._op_by_op(nearest), nearest.peak)

    @property
    def _room(self) -> int:
        return int(_CLOSE * self._range)

    @property
    def _range(self) -> int:
        return self._search.kept.peak - self._search.lower_bound


def _keeps_all(one: Candidate) -> bool:
    return not one.schedule.choices.recompute | one.schedule.choices.encode


def judged(made: Schedule, around: Surroundings) -> Candidate:
    """What comes of a schedule of `as_fused`: lowering it takes seconds."""
    of = fused(made)
    codes = {part.name: _code_of(part) for part in of.parts}
    return Candidate(of, codes, fused_timeline(of, codes, around))


def _code_of(part: Part) -> inductor.Code:
    with lowering(part.name):
        return inductor.code_of(part.lowerable)


def as_fusible(graph: JointGraph) -> JointGraph:
    """The graph for a search of steps of fused kernels: what its ops cost there when they run again, and without the
    forms that work in another value's memory, since a compiler has its own."""
    return replace(graph, ops=tuple(_fusible(op) for op in graph.ops))


def _fusible(op: GraphOp) -> GraphOp:
    seconds = op.seconds
    if torch.Tag.pointwise in getattr(forms.overload(op.target), "tags", ()):
        seconds *= FUSED_SHARE
    # A norm from its statistics is pointwise, too.
    again = op.again and replace(op.again, seconds=op.again.seconds * FUSED_SHARE, overwrites=(), scratch_into=None)
    return replace(op, seconds=seconds, again=again, overwrites=(), scratch_into=None)
