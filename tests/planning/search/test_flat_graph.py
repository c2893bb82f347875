"""What the flat form of a graph says, against the schedule of all kept."""

from __future__ import annotations

import pytest
from planning.graphs import random_graph, residual, transformer, unet

from memplan.planning.graph.joint_graph import JointGraph
from memplan.planning.graph.resident import OutsideMemory
from memplan.planning.levers.lever import GradientUse
from memplan.planning.schedule.actions import Choices
from memplan.planning.schedule.scheduler import schedule
from memplan.planning.search.flat_graph import FlatGraph


def flat(graph: JointGraph, *, early: bool = False, held: bool = False) -> FlatGraph:
    return FlatGraph(graph, OutsideMemory(), GradientUse(early, held))


@pytest.mark.parametrize("graph", [residual(4), transformer(2), unet(2)])
def test_gradients_that_go_are_given_where_the_schedule_gives_them(graph: JointGraph) -> None:
    """Those that stay change no level, whenever they are given: the schedule lets them wait for one another."""
    for early, held in ((True, False), (False, True)):
        made, slot, expected = schedule(graph, Choices(gradients=GradientUse(early, held))), 0, list[int]()
        for action in made.backward:
            slot += action.kind == "run"
            expected += [slot] if action.kind == "give" else []
        assert sorted(give.slot for give in flat(graph, early=early, held=held).gradient_returns) == expected


def test_the_ends_of_values_are_those_of_the_schedule() -> None:
    """Of those that only the forward pass reads."""
    for seed in range(60):
        graph = random_graph(seed, 9)
        one, made = flat(graph), schedule(graph, Choices(in_place=False))
        position = -1
        for action in made.forward:
            position += action.kind == "run"
            for value in action.frees:
                assert one.freed_after_op[one.row_of_value[value]] == position


def test_makers_and_readers() -> None:
    graph = transformer(2)
    one = flat(graph)
    for row, value in enumerate(one.forward_values):
        assert value in graph.forward_ops[one.op_of_row[row]].makes
        readers = [slot for slot, op in enumerate(graph.backward_ops, 1) if value in op.reads]
        direct = [slot for slot, candidates in one.form_readers if row in {other for _, other in candidates}]
        assert sorted([*one.reading_slots[row], *direct]) == readers
