"""The bounds against schedules: none may be below them."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from planning.graphs import random_graph, residual, transformer, unet

from memplan.planning.bound import Relaxation, lower_bound
from memplan.planning.evaluate import Evaluator
from memplan.planning.graph import JointGraph
from memplan.planning.peaks import Surroundings


def below(graph: JointGraph, draw: random.Random, *, early: bool, held: bool, count: int = 40) -> None:
    around = Surroundings(draw.choice([0, 500]), draw.choice([0, 700]), {of: 50 for of, _ in graph.gradients})
    evaluator = Evaluator(graph, around, early=early, held=held)
    share = np.array([draw.random() for _ in range(count)])
    columns = np.array([[draw.random() < p for p in share] for _ in range(evaluator.rows)], dtype=bool)
    columns = columns.reshape(evaluator.rows, count)
    found = evaluator.evaluate(columns)
    assert lower_bound(graph, around, early=early, held=held) <= found.peak.min()
    relaxation = Relaxation(evaluator.flat)
    for at in range(0, count, 8):
        least = relaxation.seconds(int(found.peak[at]))
        assert least is not None
        assert least.seconds <= found.seconds[at] * (1 + 1e-6) + 1e-9


@pytest.mark.parametrize(("early", "held"), [(False, False), (True, False), (False, True)])
def test_no_schedule_is_below(early: bool, held: bool) -> None:
    draw = random.Random(2)
    for seed in range(100):
        below(random_graph(seed, draw.randint(1, 12), hooks=seed % 2 == 0), draw, early=early, held=held)


@pytest.mark.parametrize("make", [residual, transformer, unet])
def test_networks(make: Callable[[], JointGraph]) -> None:
    below(make(), random.Random(3), early=False, held=False, count=8)
