"""Moves between choices: what repair, improvement and shaking promise."""

from __future__ import annotations

import numpy as np
import pytest
from planning.graphs import random_graph, transformer

from memplan.planning.schedule.byte_levels import levels
from memplan.planning.schedule.scheduler import schedule
from memplan.planning.search.batch_evaluator import Evaluator
from memplan.planning.search.local_search import LocalSearch, apply_moves


def local(share: float, layers: int = 3) -> LocalSearch:
    """On a transformer, with a budget of so much of what it needs when all is kept."""
    evaluator = Evaluator(transformer(layers))
    kept = int(evaluator.evaluate(np.zeros((evaluator.decision_count, 1), dtype=bool)).peak[0])
    return LocalSearch(evaluator, int(share * kept), small_bytes=5000)


@pytest.mark.parametrize("share", [0.95, 0.8, 0.7])
def test_repair_then_improve(share: float) -> None:
    one = local(share)
    start = one.state(np.zeros(one.evaluator.decision_count, dtype=bool))
    assert not start.fits
    repaired = one.repair(one.drop_unneeded(start))
    improved = one.improve(repaired)
    shaken = one.escape_local_optima(improved, 4)
    assert repaired.fits
    assert shaken.seconds <= improved.seconds <= repaired.seconds
    for state in (repaired, improved, shaken):
        made = schedule(one.flat.graph, one.evaluator.choices(state.column))
        assert levels(made).peak == state.peak
        assert isinstance(one.budget, int)
        assert state.peak <= one.budget
        assert made.seconds == pytest.approx(state.seconds)


def test_no_single_move_helps_after_improvement() -> None:
    one = local(0.8)
    state = one.improve(one.repair(one.state(np.zeros(one.evaluator.decision_count, dtype=bool))))
    found = one.evaluator.evaluate(apply_moves(state.column, one.moves(state)), one.budget)
    assert not ((found.excess == 0) & (found.seconds < state.seconds - 1e-6)).any()


def test_what_is_locked_stays() -> None:
    one = local(0.8)
    locked = list(range(0, one.recompute_decisions, 2))
    state = one.repair(one.state(np.zeros(one.evaluator.decision_count, dtype=bool)), locked=locked)
    needed = state.is_needed[one.flat.recomputable_rows]
    assert not (state.column[locked] & needed[locked]).any()


def test_settling_changes_nothing() -> None:
    draw = np.random.default_rng(0)
    for seed in range(40):
        evaluator = Evaluator(random_graph(seed, 9))
        one = LocalSearch(evaluator, 2000)
        state = one.state(draw.random(evaluator.decision_count) < 0.5)
        settled = one.drop_unneeded(state)
        again = one.state(settled.column)
        assert (again.peak, again.excess, again.summed_bytes) == (state.peak, state.excess, state.summed_bytes)
        assert again.seconds == pytest.approx(state.seconds)


def test_moves_change_something() -> None:
    one = local(0.8)
    state = one.drop_unneeded(one.state(np.zeros(one.evaluator.decision_count, dtype=bool)))
    for rows, bits in one.moves(state):
        assert len(set(rows)) == len(rows)
        assert all(state.column[row] != bit for row, bit in zip(rows, bits, strict=True))
