"""The batch evaluator against the plain account of schedules, on random graphs with all that a graph can have."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from planning.graphs import any_order, random_graph, residual, transformer, unet

from memplan.planning.graph.joint_graph import JointGraph
from memplan.planning.graph.resident import OutsideMemory
from memplan.planning.levers.lever import GradientUse
from memplan.planning.schedule.actions import Choices
from memplan.planning.schedule.byte_levels import levels
from memplan.planning.schedule.scheduler import schedule
from memplan.planning.search import batch_evaluator
from memplan.planning.search.batch_evaluator import Evaluator
from memplan.planning.search.batch_levels import Batch
from memplan.planning.search.candidates import Evaluated


def agrees(graph: JointGraph, draw: random.Random, count: int, *, early: bool, held: bool) -> bool:
    """Whether both say the same of some random choices; returns whether the batch did it by itself."""
    updates = {of: draw.choice([0, 100, 1000]) for of, _ in graph.gradients}
    outside_memory = OutsideMemory(
        draw.choice([0, 1000]), draw.choice([0, 2000]), updates, loss_bytes=draw.choice([0, 3000])
    )
    order = any_order(graph, draw) if draw.random() < 0.5 else ()
    evaluator = Evaluator(graph.in_order(order), outside_memory, gradients=GradientUse(early, held))
    flat = evaluator.flat
    share = np.array([draw.random() for _ in range(count)])
    columns = np.array([[draw.random() < p for p in share] for _ in range(evaluator.decision_count)], dtype=bool)
    columns = columns.reshape(evaluator.decision_count, count)
    budget = 2000
    found = evaluator.evaluate(columns, budget)
    profiles = evaluator.profiles(columns)
    for at in range(count):
        drops = frozenset(v for k, v in enumerate(flat.recomputable_values) if columns[k, at])
        some = columns[len(flat.recomputable_values) :, at]
        kept = frozenset((form.lever, form.value) for form, chosen in zip(flat.forms, some, strict=True) if chosen)
        choices = Choices(drops, kept, GradientUse(early, held), order=order)
        made = schedule(graph, choices)
        expected = levels(made, outside_memory)
        assert found.peak[at] == expected.peak
        assert found.seconds[at] == pytest.approx(made.seconds, rel=1e-9, abs=1e-12)
        assert profiles[at].update == expected.update
        assert np.array_equal(evaluator.column(choices), columns[:, at])
        again = evaluator.choices(columns[:, at])
        assert levels(schedule(graph, again), outside_memory) == expected
    return flat.supports_batches


@pytest.mark.slow
def test_random_graphs() -> None:
    draw = random.Random(0)
    regular = [
        agrees(
            random_graph(seed, draw.randint(2, 14), hooks=seed % 2 == 0, more_forms=seed % 3 == 0),
            draw,
            12,
            early=early,
            held=held,
        )
        for seed in range(120)
        for early, held in [(False, False), (True, False), (False, True), (True, True)]
    ]
    assert sum(regular) > 0.7 * len(regular)
    assert not all(regular)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("make", [residual, transformer, unet])
def test_networks(make: Callable[[], JointGraph], early: bool) -> None:
    assert agrees(make(), random.Random(1), 6, early=early, held=False)


def test_latest_results_serve_every_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, draw = transformer(), np.random.default_rng(0)
    evaluator, ran = Evaluator(graph), list[int]()
    first, second = (draw.random((evaluator.decision_count, 20)) < share for share in (0.2, 0.6))
    run = Batch.run
    monkeypatch.setattr(Batch, "run", lambda batch: ran.append(batch.candidate_count) or run(batch))
    for columns, budget, squared in [(first, 2000, 0), (second, 2000, 0), (first, 1 << 40, 0), (first, 500, 2)]:
        found, expected = evaluator.evaluate(columns, budget, squarings=squared), Evaluator(graph)
        anew = expected.evaluate(columns, budget, squarings=squared)
        assert all(np.array_equal(getattr(found, name), getattr(anew, name)) for name in Evaluated.__slots__)
    assert len(ran) == 2 + 4  # the other evaluator is new for each budget
    evaluator.forget()
    evaluator.evaluate(first)
    assert len(ran) == 7


def test_results_without_decisions_are_kept_by_their_number_of_candidates() -> None:
    """Where nothing can be recomputed or encoded, candidates are columns of no bytes."""
    evaluator = Evaluator(random_graph(17, 2))
    assert evaluator.decision_count == 0
    for candidates in (3, 1, 2):
        assert len(evaluator.profiles(np.zeros((0, candidates), dtype=bool))) == candidates


def test_latest_results_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluator, draw = Evaluator(transformer()), np.random.default_rng(0)
    columns = [draw.random((evaluator.decision_count, 20)) < 0.5 for _ in range(3)]
    evaluator.evaluate(columns[0])
    (size,) = (result.nbytes for result in evaluator._latest.values())
    monkeypatch.setattr(batch_evaluator, "LATEST_BYTES", 2 * size)
    for other in columns[1:]:
        evaluator.evaluate(other)
        assert sum(result.nbytes for result in evaluator._latest.values()) <= 2 * size
    assert len(evaluator._latest) == 2
