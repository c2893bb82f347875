"""What is said where nothing fits, held against a walk through the floor's schedule."""

from __future__ import annotations

import pickle
import re
from dataclasses import replace

import pytest
from environment import slow
from planning.graphs import EARLY, HELD, residual, transformer

from memplan.planning.graph.joint_graph import JointGraph
from memplan.planning.graph.resident import OutsideMemory
from memplan.planning.levers.lever import GradientUse
from memplan.planning.plan.budget_error import budget_error
from memplan.planning.schedule.actions import Choices
from memplan.planning.schedule.byte_levels import levels
from memplan.planning.schedule.scheduler import schedule
from memplan.planning.search.search import Search


@pytest.mark.parametrize("graph", [residual(3), *slow(transformer(3))], ids=["residual", "transformer"])
@pytest.mark.parametrize("early", [False, True])
def test_the_floor_and_what_holds_it_up(graph: JointGraph, early: bool) -> None:
    made = schedule(graph, Search(graph, gradients=GradientUse(updates_early=early)).floor().choices)
    outside_memory = OutsideMemory(12345)
    error = budget_error(made, outside_memory, 7)
    peak = levels(made, outside_memory).peak
    assert error.smallest_budget == peak
    assert error.timeline.peak_allocated == peak
    assert sum(holder.bytes for holder in error.held_by) == peak
    sizes = [holder.bytes for holder in error.held_by]
    assert sizes == sorted(sizes, reverse=True)
    assert str(error).startswith("The budget is 7 B. Expected at least ")
    assert str(error.held_by[0]) in str(error)
    assert "\n" not in str(error)
    assert pickle.loads(pickle.dumps(error)).smallest_budget == peak


def test_what_reads_the_same_is_told_in_bytes() -> None:
    made = schedule(transformer(2), Choices())
    peak = levels(made).peak
    error = budget_error(made, OutsideMemory(), peak - 1)
    assert f" ({peak - 1} bytes). Expected at least " in str(error)
    assert f" ({peak} bytes), the smallest" in str(error)


@pytest.mark.parametrize("budget", [0, 7, 1 << 20])
def test_what_is_to_be_given_is_enough(budget: int) -> None:
    """As text it may be rounded down."""
    error = budget_error(schedule(transformer(2), Choices()), OutsideMemory(), budget)
    told = re.search(r"Give \S+ \S+ \((\d+) bytes\)", str(error))
    assert told is not None
    assert int(told[1]) == error.smallest_budget


def test_ways_that_lower_it_are_below_it_and_early_is_offered_where_it_is_not_taken() -> None:
    graph = transformer(2)
    for choices in (Choices(), Choices(gradients=EARLY), Choices(gradients=HELD)):
        error = budget_error(schedule(graph, choices), OutsideMemory(), 0)
        assert error.lower_by
        assert all(0 < way.bytes < error.smallest_budget for way in error.lower_by)
        offered = any("early" in way.do for way in error.lower_by)
        assert offered is False or choices == Choices()


@pytest.mark.parametrize("more", [0, -200, 300])
def test_halving_the_batch_keeps_what_does_not_follow_it(more: int) -> None:
    """``more``: what fused kernels hold beside what the single ops do."""
    graph = residual(3)
    made, outside_memory = schedule(graph, Choices()), OutsideMemory(1000)
    single = budget_error(made, outside_memory, 0)
    assert single.timeline is not None
    fused = replace(single.timeline, peak_reserved=single.smallest_budget + more)
    error = budget_error(made, outside_memory, 0, fused if more else None)
    assert error.smallest_budget == single.smallest_budget + more
    way = next(way for way in error.lower_by if "batch" in way.do)
    kinds = ("weight", "buffer", "parameter_gradient", "optimizer_state")
    fixed = sum(holder.bytes for holder in error.held_by if holder.cause in kinds)
    assert 0 < fixed < error.smallest_budget
    assert way.bytes == pytest.approx(fixed + (error.smallest_budget - fixed) / 2, abs=1)


def test_what_cannot_be_done_is_no_way() -> None:
    graph = residual(3)

    def changed(**how: object) -> JointGraph:
        return replace(graph, values=(replace(graph.values[0], **how), *graph.values[1:]))

    def ways(of: JointGraph) -> str:
        return " ".join(way.do for way in budget_error(schedule(of, Choices()), OutsideMemory(), 0).lower_by)

    assert graph.values[0].kind == "input"
    assert "batch" in ways(graph)
    assert "bfloat16" in ways(graph)
    assert "batch" not in ways(changed(shape=(1, 1250000), stride=(1250000, 1)))
    assert "bfloat16" not in ways(changed(dtype="bfloat16"))


def test_what_changes_nothing_that_people_read_is_no_way() -> None:
    error = budget_error(schedule(residual(3), Choices()), OutsideMemory(1 << 40), 0)
    assert error.lower_by == ()
    assert str(error).endswith(f"Give 1.0 TiB ({error.smallest_budget} bytes).")
