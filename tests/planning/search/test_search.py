"""The search against the optimum: a mixed-integer program's on plain graphs, the best of all choices on small ones."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from environment import slow
from planning.graphs import EARLY, random_graph, residual, transformer, unet
from planning.milp import Rules, plain_graph

from memplan.planning.graph.joint_graph import JointGraph, recomputable_values
from memplan.planning.graph.resident import OutsideMemory
from memplan.planning.levers.lever import GradientUse
from memplan.planning.schedule.actions import Choices
from memplan.planning.schedule.byte_levels import levels
from memplan.planning.schedule.scheduler import schedule
from memplan.planning.search.search import STEEP, Heuristics, Infeasible, Search, Solution

NEAR = 1e-4
"""Seconds; the ops of random graphs take 1e-3 and more."""
more_seeds = pytest.mark.parametrize("seeds", [range(30), *slow(range(30, 130))], ids=str)


def checked(graph: JointGraph, found: Solution, budget: int, outside_memory: OutsideMemory | None = None) -> Solution:
    """Whether the result is what the plain account says it is."""
    made = schedule(graph, found.choices)
    assert levels(made, outside_memory).peak == found.peak <= budget
    assert made.seconds == pytest.approx(found.seconds, abs=1e-9)
    assert found.lower_bound_seconds <= found.seconds
    assert found.gap == pytest.approx(found.seconds - found.lower_bound_seconds)
    return found


def plain_graphs(count: int) -> list[JointGraph]:
    """Random graphs with something to decide."""
    graphs = (plain_graph(seed, 10) for seed in range(1000))
    some = (graph for graph in graphs if len(graph.backward_ops) >= 8)
    return [graph for _, graph in zip(range(count), some, strict=False)]


def test_within_five_percent_of_the_optimum() -> None:
    compared, reached = 0, 0.0
    for graph in plain_graphs(8):
        kept, smallest = levels(schedule(graph, Choices())).peak, Rules(graph).smallest_peak()
        one = Search(graph)
        assert 0.85 * smallest <= one.lower_bound <= smallest
        assert one.floor().peak == smallest
        below = one.within(smallest - 1)
        assert isinstance(below, Infeasible)
        assert below.smallest == smallest
        assert Rules(graph).least_seconds(smallest - 1) is None
        for budget in (smallest, smallest + (kept - smallest) // 3):
            optimum, found = Rules(graph).least_seconds(budget), Search(graph).within(budget)
            assert optimum is not None
            assert isinstance(found, Solution)
            checked(graph, found, budget)
            assert found.seconds <= 1.05 * optimum + NEAR
            assert found.lower_bound_seconds <= optimum + 1e-6
            if optimum > NEAR:
                compared, reached = compared + 1, reached + found.lower_bound_seconds / optimum
    assert compared >= 5
    assert reached / compared > 0.6  # a bound of 0 would be none


@more_seeds
@pytest.mark.parametrize(("early", "held"), [(True, False), *slow((False, False), (False, True))])
def test_against_every_choice(early: bool, held: bool, seeds: range) -> None:
    """With encodings, memory taken over, writes, early updates."""
    seen = 0
    for seed in seeds:
        graph = random_graph(seed, 7)
        outside_memory = OutsideMemory(100, 300, {of: 200 for of, _ in graph.gradients})
        one = Search(graph, outside_memory, gradients=GradientUse(early, held))
        rows = one.evaluator.decision_count
        if rows > (12 if one.flat.supports_batches else 6):
            continue
        columns = (np.arange(2**rows)[None, :] >> np.arange(rows)[:, None]) & 1
        every = one.evaluator.evaluate(columns.astype(bool))
        low, high = int(every.peak.min()), one.save_all.peak
        assert one.lower_bound <= low
        assert one.floor().peak == low
        for budget in {low, low + (high - low) // 3, low + (high - low) * 2 // 3}:
            best = float(every.seconds[every.peak <= budget].min())
            found = Search(graph, outside_memory=outside_memory, gradients=GradientUse(early, held)).within(budget)
            assert isinstance(found, Solution)
            checked(graph, found, budget, outside_memory)
            assert found.lower_bound_seconds <= best + 1e-9
            assert found.seconds <= 1.05 * best + NEAR
            seen += high > low
        assert isinstance(one.within(low - 1), Infeasible)
    assert seen > 10


def test_what_fits_is_left_alone() -> None:
    graph = unet()
    kept = levels(schedule(graph, Choices())).peak
    found = Search(graph).within(kept)
    assert isinstance(found, Solution)
    assert found.choices == Choices()
    assert (found.peak, found.seconds) == (kept, 0.0)


@pytest.mark.parametrize("make", [transformer, unet])
def test_ahead_of_checkpoints_per_block(make: Callable[[], JointGraph]) -> None:
    """At the peak of making all again but what is added to or handed on between blocks: at most half of its time."""
    graph = make()
    crossing = {v for op in graph.forward_ops if "add" in op.target or "pool" in op.target for v in op.makes}
    checkpoints = schedule(graph, Choices(recompute=recomputable_values(graph) - crossing))
    budget = levels(checkpoints).peak
    found = Search(graph).within(budget)
    assert isinstance(found, Solution)
    checked(graph, found, budget)
    assert found.seconds <= checkpoints.seconds / 2


@pytest.mark.parametrize(("make", "limit"), [(residual, 5.0), *slow((lambda: transformer(48), 30.0))])
def test_time(make: Callable[[], JointGraph], limit: float) -> None:
    graph = make()
    kept = levels(schedule(graph, Choices())).peak
    began = time.process_time()
    found = Search(graph).within(kept * 6 // 10)
    assert time.process_time() - began < limit
    assert isinstance(found, Solution)
    checked(graph, found, kept * 6 // 10)


def test_the_same_again() -> None:
    graph = transformer(4)
    budget = levels(schedule(graph, Choices())).peak * 8 // 10
    assert Search(graph).within(budget) == Search(graph).within(budget)


@pytest.mark.parametrize("name", [one.name for one in fields(Heuristics)])
def test_every_heuristic_can_be_turned_off(name: str) -> None:
    graph = transformer(3)
    kept = levels(schedule(graph, Choices())).peak
    budget = kept * 85 // 100
    without = replace(Heuristics(), **{name: 2 if name == "rounds" else 0})
    found = Search(graph, heuristics=without).within(budget)
    assert isinstance(found, Solution)
    checked(graph, found, budget)
    assert any(name in note for note in found.notes) == (name != "rounds")
    if name == "encodings":
        assert not found.choices.saved_by("encode")


def test_frontier() -> None:
    graph = unet()
    plans = Search(graph).frontier(4)
    kept = levels(schedule(graph, Choices())).peak
    assert plans[0].peak == kept
    assert plans[0].seconds == 0
    assert plans[-1].peak == Search(graph).floor().peak
    assert len(plans) == 4
    for one, other in pairwise(plans):
        assert one.peak > other.peak
        assert one.seconds <= other.seconds


def test_early_updates_lower_the_floor() -> None:
    graph = transformer(4)
    assert Search(graph, gradients=EARLY).floor().peak < Search(graph).floor().peak


def test_the_floor_is_the_same_whatever_was_measured_and_whatever_was_searched_for() -> None:
    graph = transformer(2)
    found = set[tuple[int, Choices]]()
    for seed in range(3):
        draw = random.Random(seed)
        ops = tuple(replace(op, seconds=op.seconds * (0.5 + draw.random())) for op in graph.ops)
        search = Search(replace(graph, ops=ops), modelled_graph=graph)
        for share in (0.7, 0.3)[:seed]:
            search.within(int(search.lower_bound + share * (search.save_all.peak - search.lower_bound)))
        refused = search.within(1)
        assert isinstance(refused, Infeasible)
        assert search.floor_peak == refused.smallest
        found.add((refused.smallest, search.deterministic.floor().choices))
    assert len(found) == 1


def _squares_over(one: Search, columns: npt.NDArray[np.bool_], budget: int) -> npt.NDArray[np.float64]:
    """Over all positions of each candidate, the sum of the squares of its bytes over a budget."""
    profiles = one.evaluator.profiles(columns)
    every = [np.concatenate([p.forward, p.slots, [p.update]]).astype(np.float64) - budget for p in profiles]
    return np.array([np.square(np.maximum(over, 0.0)).sum() for over in every])


@pytest.mark.slow
@more_seeds
def test_nearest_to_what_nothing_keeps_against_every_choice(seeds: range) -> None:
    """By squares of bytes over it: of all choices few come nearer, and what comes as near takes no less time."""
    seen = 0
    for seed in seeds:
        graph = random_graph(seed, 7)
        one = Search(graph)
        rows = one.evaluator.decision_count
        if not 4 <= rows <= 12 or not one.flat.supports_batches:
            continue
        columns = ((np.arange(2**rows)[None, :] >> np.arange(rows)[:, None]) & 1).astype(bool)
        for share in (0.1, 0.5):
            budget = int(one.lower_bound - share * (one.save_all.peak - one.lower_bound)) - 1
            found = one.nearest(budget)
            every = _squares_over(one, columns, budget)
            (mine,) = _squares_over(one, one.evaluator.column(found.choices)[:, None], budget)
            assert mine <= 1.02 * every.min()
            made = schedule(graph, found.choices)
            assert levels(made).peak == found.peak
            assert made.seconds == pytest.approx(found.seconds, abs=1e-9)
            seconds = one.evaluator.evaluate(columns).seconds
            assert found.seconds <= seconds[every <= every.min()].min() * 1.05 + NEAR
            seen += 1
    assert seen > 25


@pytest.mark.parametrize("seed", [8, *slow(18, 28)])
def test_nothing_that_comes_near_a_budget_is_lower_than_the_floor(seed: int) -> None:
    one = Search(random_graph(seed, 30))
    across = one.save_all.peak - one.lower_bound
    for share in (0.0, 0.05, 0.1, 0.2, 0.5):
        assert one.floor_peak <= one.nearest(int(one.lower_bound - share * across)).peak


def test_steep_lowers_the_highest_first() -> None:
    lower = 0
    for seed in range(2):
        one = Search(random_graph(seed, 30))
        budget = int(one.lower_bound - 0.3 * (one.save_all.peak - one.lower_bound))
        steep, even = one.nearest(budget, STEEP), one.nearest(budget)
        assert steep.peak <= 1.01 * even.peak
        lower += steep.peak < even.peak
    assert lower
