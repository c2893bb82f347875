"""How many candidates are lowered for a budget, which takes seconds each: with what comes of lowering made up."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from environment import slow
from hypothesis import given, settings
from hypothesis import strategies as st
from planning.graphs import residual, transformer
from torch import nn

from memplan.planning.capture.flat_call import call_of
from memplan.planning.cost.op_timing import step_seconds, with_costs
from memplan.planning.graph.joint_graph import JointGraph
from memplan.planning.graph.resident import OutsideMemory
from memplan.planning.inductor import candidate_search
from memplan.planning.inductor.candidate_search import FUSED_SHARE, Fusing
from memplan.planning.planner import Planner
from memplan.planning.schedule.actions import Choices
from memplan.planning.schedule.byte_levels import levels
from memplan.planning.schedule.scheduler import Schedule, schedule
from memplan.planning.search.search import Search, Solution
from memplan.planning.settings import Settings


@dataclass(frozen=True)
class Made:
    """Stands for a candidate."""

    schedule: Schedule
    peak: int


class Lowering:
    """Stands for `lower_and_predict`: the code takes what the step takes op by op, and so much more or less."""

    def __init__(self, more: Callable[[int], int]) -> None:
        self.more, self.made = more, list[Made]()

    def __call__(self, made: Schedule, outside_memory: OutsideMemory) -> Made:
        peak = levels(made, outside_memory).peak
        self.made.append(Made(made, peak + self.more(peak)))
        return self.made[-1]


def fusible(graph: JointGraph) -> JointGraph:
    """Without forms that work in another value's memory, as for fused kernels."""
    return replace(graph, ops=tuple(replace(op, overwrites=(), in_place_scratch=None) for op in graph.ops))


def fusing_of(
    monkeypatch: pytest.MonkeyPatch, graph: JointGraph, more: Callable[[int], int]
) -> tuple[Search, Fusing, Lowering]:
    lowering = Lowering(more)
    monkeypatch.setattr(candidate_search, "lower_and_predict", lowering)
    search = Search(graph)
    return search, Fusing(search), lowering


def middle(search: Search) -> int:
    return (search.floor_peak + search.save_all.peak) // 2


def room(search: Search) -> float:
    return candidate_search._CLOSE_TO_BUDGET * (search.save_all.peak - search.lower_bound)  # pyright: ignore[reportPrivateUsage]


GRAPHS = {"residual": lambda: fusible(residual(6)), "transformer": lambda: fusible(transformer(3))}


@pytest.mark.parametrize(
    ("name", "share"), [("residual", -0.3), *slow(("transformer", 0.1), *product(GRAPHS, (-0.1, -0.03, 0.03, 0.3)))]
)
def test_two_where_the_code_takes_so_much_more_or_less_everywhere(
    monkeypatch: pytest.MonkeyPatch, name: str, share: float
) -> None:
    graph = GRAPHS[name]()
    whole = Search(graph)
    off = int(share * (whole.save_all.peak - whole.floor_peak))
    search, fused, lowering = fusing_of(monkeypatch, graph, lambda _: off)
    found, known = fused.within(middle(search) + off // 2), search.within(middle(search) - off // 2)
    assert found is not None
    assert isinstance(known, Solution)
    assert found.peak <= middle(search) + off // 2
    assert len(lowering.made) <= 2
    assert found.schedule.seconds <= known.seconds + 0.01 * step_seconds(graph)


@pytest.mark.slow
def test_one_where_nothing_is_to_be_gained(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code takes a fifth less, but what is made again costs next to nothing."""
    cheap = fusible(residual(6))
    again = tuple(replace(op, seconds=op.seconds if op.phase == "backward" else 1e-6 * op.seconds) for op in cheap.ops)
    whole = Search(replace(cheap, ops=again))
    off = (whole.save_all.peak - whole.floor_peak) // 5
    search, fused, lowering = fusing_of(monkeypatch, whole.graph, lambda _: -off)
    found = fused.within(middle(search))
    assert found is not None
    assert len(lowering.made) == 1
    assert middle(search) - found.peak > room(search)


def test_what_another_budget_came_to_is_where_the_next_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Search(fusible(transformer(3)))
    off = (whole.save_all.peak - whole.floor_peak) // 5
    search, fused, lowering = fusing_of(monkeypatch, whole.graph, lambda _: off)
    assert fused.within(middle(search) + off) is not None
    before = len(lowering.made)
    budget = middle(search) + off - 4 * int(room(search))
    found = fused.within(budget)
    assert found is not None
    assert found.peak <= budget
    assert len(lowering.made) == before + 1


def test_what_keeps_everything_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    search, fused, lowering = fusing_of(monkeypatch, fusible(residual(6)), lambda _: 0)
    found = fused.within(2 * search.save_all.peak)
    assert found is not None
    assert not found.schedule.choices.recompute
    assert len(lowering.made) == 1


@pytest.mark.slow
def test_under_what_the_floor_comes_to_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    search, fused, _ = fusing_of(monkeypatch, fusible(residual(6)), lambda _: 1000)
    assert fused.within(search.floor_peak + 999) is None
    found = fused.within(search.floor_peak + 1000)
    assert found is not None
    assert found.peak == search.floor_peak + 1000


def test_room_above_a_floor_that_takes_less_than_it_says_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Op by op nothing keeps the budget; the code of the floor takes half of it."""
    whole = Search(fusible(transformer(3)))
    half = whole.floor_peak // 2
    search, fused, _ = fusing_of(monkeypatch, whole.graph, lambda _: -half)
    budget = whole.floor_peak - 1000
    found, known = fused.within(budget), search.within(budget + half)
    assert found is not None
    assert isinstance(known, Solution)
    assert found.peak <= budget
    assert found.schedule.seconds <= known.seconds + 0.01 * step_seconds(whole.graph)


def hidden_by_one(graph: JointGraph) -> tuple[Search, Search, Callable[[Schedule, OutsideMemory], Made]]:
    """Op by op no step takes less than one op does by itself, and in the code that takes nothing beyond its results.

    Without that op's bytes, and with them; and what the code takes."""
    plain = Search(graph)
    low, across = plain.floor_peak, plain.save_all.peak - plain.floor_peak
    last = max(graph.backward_ops, key=lambda op: op.index)
    wide = replace(last, scratch=low + int(0.6 * across))

    def judged(made: Schedule, outside_memory: OutsideMemory) -> Made:
        return Made(made, levels(schedule(graph, made.choices), outside_memory).peak)

    return plain, Search(replace(graph, ops=tuple(wide if op is last else op for op in graph.ops))), judged


@pytest.mark.parametrize(
    "graph", [fusible(transformer(3)), *slow(fusible(residual(6)))], ids=["transformer", "residual"]
)
def test_where_one_op_hides_what_the_others_take_these_are_lowered(
    monkeypatch: pytest.MonkeyPatch, graph: JointGraph
) -> None:
    plain, hidden, judged = hidden_by_one(graph)
    low, across = plain.floor_peak, plain.save_all.peak - plain.floor_peak
    assert hidden.floor_peak > low + int(0.6 * across)
    monkeypatch.setattr(candidate_search, "lower_and_predict", judged)
    assert Fusing(hidden).lowest.peak < low + 0.1 * across
    for share in (0.2, 0.5):
        budget = low + int(share * across)
        found, known = Fusing(hidden).within(budget), plain.within(budget)
        assert found is not None
        assert found.peak <= budget
        assert isinstance(known, Solution)
        assert found.schedule.seconds <= known.seconds + 0.01 * step_seconds(graph)


@pytest.mark.parametrize("seed", [0, *slow(1, 3)])  # in these, there is one that takes no more
def test_where_code_takes_more_here_and_there_the_highest_are_lowered(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """A tenth more than op by op, in a fifth of the ops: no step can take less than the floor, and one takes that."""

    def judged(made: Schedule, outside_memory: OutsideMemory) -> Made:
        found = levels(made, outside_memory)
        every = zip((*made.forward, *made.backward), (*found.forward, *found.backward), strict=True)
        more = (int(1.1 * level) for action, level in every if random.Random(f"{seed} {action.op}").random() > 0.8)
        return Made(made, max(found.peak, *more))

    monkeypatch.setattr(candidate_search, "lower_and_predict", judged)
    search = Search(fusible(residual(6)))
    floor = judged(schedule(search.graph, search.floor().choices), search.outside_memory)
    assert Fusing(search).lowest.peak == search.floor_peak < floor.peak


def test_the_frontier_goes_from_all_kept_to_the_least_and_has_only_what_nothing_beats(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, hidden, judged = hidden_by_one(fusible(transformer(3)))
    monkeypatch.setattr(candidate_search, "lower_and_predict", judged)
    fused = Fusing(hidden)
    found, least = fused.frontier(5), Fusing(hidden).lowest
    assert found[0].seconds == 0
    assert (
        found[-1].peak
        == least.peak
        < judged(schedule(hidden.graph, hidden.floor().choices), hidden.outside_memory).peak
    )
    for one in found:
        made = schedule(plain.graph, one.choices)
        assert (one.peak, one.seconds) == (levels(made).peak, pytest.approx(made.seconds))
        better = (k for k in fused.candidates if k.peak <= one.peak and k.schedule.seconds <= one.seconds)
        assert all((k.peak, k.schedule.seconds) == (one.peak, one.seconds) for k in better)


def test_what_is_known_to_keep_a_budget_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    _, fused, lowering = fusing_of(monkeypatch, fusible(transformer(3)), lambda peak: peak % 977)
    found = fused.within(middle(Search(fusible(transformer(3)))))
    assert found is not None
    before = len(lowering.made)
    assert fused.within(found.peak) is found
    assert len(lowering.made) <= before + 1


def test_the_floor_is_sought_by_seconds_of_fused_kernels_that_are_the_same_everywhere() -> None:
    model, inputs = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)), torch.randn(4, 8)
    call = call_of((inputs,), {})
    study = Planner(model).study(call, Settings(engine="inductor"))
    steady = study.search(Settings(engine="inductor")).modelled_graph
    assert steady is not None
    plain = with_costs(study.captured.graph, how="roofline")
    share = {op.target: fused.seconds / op.seconds for op, fused in zip(plain.ops, steady.ops, strict=True) if op.makes}
    assert share["aten.relu.default"] == pytest.approx(FUSED_SHARE)
    assert share["aten.addmm.default"] == 1


def _looked_at_for_the_least(one: Fusing) -> list[Choices]:
    return [low.schedule.choices for low in one._lowest_candidates()]  # pyright: ignore[reportPrivateUsage]


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.1, 0.5))
def test_what_a_budget_is_refused_with_is_enough(seed: int, far: float) -> None:
    """Also where kernels take other times, as in another process: and whatever the code of each candidate comes to."""
    graph = fusible(transformer(2))
    search, seconds = Search(graph), random.Random(seed)

    def judged(made: Schedule, outside_memory: OutsideMemory) -> Made:
        peak = levels(made, outside_memory).peak
        return Made(made, peak + int(far * random.Random(str(sorted(made.choices.recompute))).random() * peak))

    def measured(graph: JointGraph) -> Fusing:
        ops = tuple(replace(op, seconds=op.seconds * (0.5 + seconds.random())) for op in graph.ops)
        return Fusing(Search(replace(graph, ops=ops), modelled_graph=graph))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidate_search, "lower_and_predict", judged)
        one, other = measured(graph), measured(graph)
        for share in (0.7, 0.4):
            one.within(int(search.floor_peak + share * (search.save_all.peak - search.floor_peak)))
        assert one.within(1) is None
        assert _looked_at_for_the_least(one) == _looked_at_for_the_least(other)
        smallest = one.lowest.peak
        found = other.within(smallest)
        assert found is not None
        assert found.peak <= smallest
