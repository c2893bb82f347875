"""Which values may be made again, and what is said of the others."""

from __future__ import annotations

import pytest
from planning.graphs import random_graph

from memplan.planning.graph.joint_graph import recomputable_values
from memplan.planning.levers.lever import Situation
from memplan.planning.levers.registry import RECOMPUTE


@pytest.mark.parametrize("seed", range(60))
def test_there_is_a_reason_for_each_value_that_is_never_made_again(seed: int) -> None:
    graph = random_graph(seed, 10)
    made = [graph.values[value] for op in graph.forward_ops for value in op.makes]
    may = {value.id for value in made if not RECOMPUTE.why_not(graph, value, Situation())}
    assert may == recomputable_values(graph)
