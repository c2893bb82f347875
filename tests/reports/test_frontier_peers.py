"""Peers beside the frontier: a row and a place for each, those whose gradients are wrong marked."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from reports.outcomes import FRONTIER, MIB

from memplan._json import to_plain
from memplan.reports import frontier
from memplan.reports.document import document
from memplan.reports.terminal import text_of
from memplan.verification.measurement.peak_and_time import Times
from memplan.verification.peers.peers import COMPILED, EAGER, Peer
from memplan.verification.peers.trials import PeerResult


def times(ratio: float) -> Times:
    return Times(3, 0.2, 0.2 * ratio, ratio, (ratio, ratio))


BUDGET = Peer("torch.compile, memory budget 0.5", compiled=True, memory_budget=0.5)
PEERS = (
    PeerResult(EAGER, 610 * MIB, times(1.0), error=1e-7),
    PeerResult(COMPILED, 500 * MIB, times(0.5)),
    PeerResult(BUDGET, 400 * MIB, times(1.5), {"a": 0.39, "b": 0.1}, 0.2),
    PeerResult(Peer("bfloat16 autocast", autocast=torch.bfloat16), 300 * MIB, times(0.8), error=0.0123),
    PeerResult(Peer("other"), failed="RuntimeError: no \x1b[1m kernels"),
)
BESIDE = replace(FRONTIER, peers=PEERS)


def test_the_table_says_which_gradients_are_wrong_and_what_did_not_run() -> None:
    text = text_of(document(None, *frontier.parts(BESIDE)[1:]))
    _, _, *rows = [" ".join(line.split()) for line in text.splitlines()]
    assert rows[:3] == [
        "eager 610.0 MiB 100 % +0 % right",
        "torch.compile 500.0 MiB 82 % -50 % not compared",
        "torch.compile, memory budget 0.5 400.0 MiB 66 % +50 % WRONG by 39%",
    ]
    assert rows[3] == "bfloat16 autocast 300.0 MiB 49 % -20 % off by 1.23%"
    assert rows[4] == "other did not run"
    assert rows[5] == "other did not run: RuntimeError: no ?[1m kernels"


def test_the_picture_has_them_beside_the_plans() -> None:
    pytest.importorskip("matplotlib")
    axes = frontier.draw(BESIDE).axes[0]
    places = {str(one.get_label()): np.asarray(one.get_offsets()).tolist() for one in axes.collections}
    # eager mode is predicted to take 0.3 s; what others add to it is measured
    assert places["measured: eager"] == [[610, pytest.approx(0.3)]]
    assert places["measured: compiled"] == [[500, pytest.approx(0.15)]]
    assert places["measured: lossy"] == [[300, pytest.approx(0.24)]]
    assert places["measured: wrong gradients"] == [[400, pytest.approx(0.45)]]
    assert axes.get_xlabel() == "peak (MiB)"
    lines = [str(one.get_label()) for one in axes.get_lines()]
    assert lines[:2] == ["predicted: planned", "predicted: without a plan"]
    assert frontier.draw(FRONTIER).axes[0].get_xlabel() == "predicted peak (MiB)"


def test_they_are_in_the_json() -> None:
    assert to_plain(FRONTIER)["peers"] == []
    eager, compiled, budget, autocast, other = to_plain(BESIDE)["peers"]
    assert eager == {
        "name": "eager", "peak": 610 * MIB, "seconds": 0.2, "ratio": 1.0, "quartiles": [1.0, 1.0],
        "gradients": "right", "error": 1e-7, "wrong": {},
    }  # fmt: skip
    assert compiled["gradients"] == "not compared"
    assert (autocast["gradients"], autocast["error"], autocast["wrong"]) == ("lossy", 0.0123, {})
    assert (budget["gradients"], budget["wrong"]) == ("wrong", {"a": 0.39, "b": 0.1})
    assert other["failed"].startswith("RuntimeError")
