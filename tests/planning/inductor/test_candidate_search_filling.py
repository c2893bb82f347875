"""What is kept where room is left, held against every set of values that the room has a place for."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning.graphs import residual, transformer

from memplan.planning.graph.joint_graph import JointGraph, recomputable
from memplan.planning.inductor.candidate_search import with_more_kept
from memplan.planning.schedule.actions import Choices
from memplan.planning.schedule.scheduler import schedule

GRAPHS = [residual(4), transformer(2)]


@pytest.mark.parametrize("graph", GRAPHS, ids=["residual", "transformer"])
@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_what_is_kept_fits_the_room_and_nothing_more_would(graph: JointGraph, data: st.DataObject) -> None:
    again = sorted(recomputable(graph))
    choices = Choices(recompute=frozenset(data.draw(st.sets(st.sampled_from(again), min_size=1))))
    room = data.draw(st.integers(0, sum(graph.values[value].bytes for value in choices.recompute)))
    found = with_more_kept(schedule(graph, choices), room)
    kept = choices.recompute - found.recompute
    assert found.recompute <= choices.recompute
    sizes = {value: graph.values[value].bytes for value in choices.recompute}
    assert sum(sizes[value] for value in kept) <= room
    assert all(sizes[value] > room - sum(sizes[one] for one in kept) for value in found.recompute)


@pytest.mark.parametrize("graph", GRAPHS, ids=["residual", "transformer"])
def test_with_room_for_one_it_is_the_dearest_by_the_byte(graph: JointGraph) -> None:
    again = sorted(recomputable(graph))
    made = schedule(graph, Choices(recompute=frozenset(again)))
    size = max(graph.values[value].bytes for value in again)
    kept = made.choices.recompute - with_more_kept(made, size).recompute

    def worth(value: int) -> float:
        op = graph.values[value].op
        assert op is not None
        return graph.ops[op].rerun.seconds / graph.values[value].bytes

    assert max(map(worth, kept)) == max(map(worth, again))
    assert all(worth(one) >= worth(other) for one, other in itertools.product(kept, set(again) - kept)
               if graph.values[one].bytes >= graph.values[other].bytes)  # fmt: skip
