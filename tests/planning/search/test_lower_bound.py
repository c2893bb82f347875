"""The bounds against schedules: none may be below them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from environment import slow
from planning.graphs import Tape, random_graph, residual, transformer, unet

from memplan.planning.graph.joint_graph import JointGraph, Ref
from memplan.planning.graph.resident import OutsideMemory
from memplan.planning.levers.lever import GradientUse
from memplan.planning.search.batch_evaluator import Evaluator
from memplan.planning.search.lower_bound import Relaxation, lower_bound
from memplan.planning.search.search import Search, Solution


def below(graph: JointGraph, draw: random.Random, *, early: bool, held: bool, count: int = 40) -> None:
    each, outside = {of: 50 for of, _ in graph.gradients}, draw.choice([0, 900])
    outside_memory = OutsideMemory(draw.choice([0, 500]), draw.choice([0, 700]), each, loss_bytes=outside)
    evaluator = Evaluator(graph, outside_memory, gradients=GradientUse(early, held))
    share = np.array([draw.random() for _ in range(count)])
    columns = np.array([[draw.random() < p for p in share] for _ in range(evaluator.decision_count)], dtype=bool)
    columns = columns.reshape(evaluator.decision_count, count)
    found = evaluator.evaluate(columns)
    assert lower_bound(graph, outside_memory, gradients=GradientUse(early, held)) <= found.peak.min()
    relaxation = Relaxation(evaluator.flat)
    for at in range(0, count, 8):
        least = relaxation.seconds(int(found.peak[at]))
        assert least is not None
        assert least.seconds <= found.seconds[at] * (1 + 1e-6) + 1e-9


@pytest.mark.parametrize(("early", "held"), [(True, False), *slow((False, False), (False, True))])
def test_no_schedule_is_below(early: bool, held: bool) -> None:
    draw = random.Random(2)
    for seed in range(40):
        below(
            random_graph(seed, draw.randint(1, 12), hooks=seed % 2 == 0, more_forms=seed % 3 == 0),
            draw,
            early=early,
            held=held,
        )


@pytest.mark.parametrize("make", [residual, transformer, unet])
def test_networks(make: Callable[[], JointGraph]) -> None:
    below(make(), random.Random(3), early=False, held=False, count=8)


def test_the_bound_goes_by_the_op_that_makes_a_result_again() -> None:
    """Which needs less than the one that made it, and takes less time."""
    tape = Tape()
    x, weight = tape.value("input", 100), tape.value("parameter", 100)
    big = tape.op("aten.made_up.default", [x], 1000, 1.0, parameters=[weight])
    y = tape.op("aten.made_up.default", [big], 1000, 2.0, extra=[8])
    op, statistics = tape.ops[-1], y + 1
    cheaper = replace(
        op, args=(Ref(statistics),), outputs=(y,), returns_tuple=False, reads=(statistics,), makes=(y,), seconds=0.25
    )
    tape.ops[-1] = replace(op, cheaper_recompute=cheaper)
    small = tape.op("aten.made_up.default", [y], 8, 1.0, saves="i")
    loss = tape.op("aten.made_up.default", [tape.op("aten.made_up.default", [small], 3000, 1.0)], 4, 1.0)
    graph = tape.finish(loss)
    kept = Search(graph).within(1 << 30)
    assert isinstance(kept, Solution)
    assert kept.seconds == 0
    assert 4000 <= kept.peak < 4500
    tight = Search(graph).within(kept.peak - 1000)
    assert isinstance(tight, Solution)
    assert tight.choices.recompute == {y}
    assert tight.seconds == pytest.approx(0.25)
    least = Relaxation(Evaluator(graph).flat).seconds(kept.peak - 1000)
    assert least is not None
    assert least.seconds == pytest.approx(0.25)
