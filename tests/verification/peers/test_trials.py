"""Peers of a user's step: peaks as the allocator says, verdicts that can be wrong, and a model that stays as it was."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from truth.cpu_allocator import allocations, peak_of

from memplan.errors import UsageError
from memplan.planning.request import Request, request
from memplan.planning.settings import PlanOptions
from memplan.trace.step import StepOptions
from memplan.verification.measurement import free_memory
from memplan.verification.peers import trials
from memplan.verification.peers.peers import EAGER, Peer
from memplan.verification.peers.trials import PeerResult, measure_peers

compiles = pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler")


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.wide, self.narrow, self.dropout = nn.Linear(16, 64), nn.Linear(64, 16), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.narrow(torch.relu(self.wide(x))))


def asked(model: nn.Module, **options: Any) -> Request:
    images, labels = torch.linspace(-1, 1, 16 * 512).reshape(512, 16), torch.arange(512) % 16
    optimizer = options.pop("optimizer", None)
    step = StepOptions((images,), targets=labels, loss=F.cross_entropy, optimizer=optimizer)
    return request(model, step, PlanOptions(budget="1 GiB", **options), fake=False)


def network(dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(dropout), Block(dropout))


def only(monkeypatch: pytest.MonkeyPatch, *chosen: Peer) -> None:
    monkeypatch.setattr(trials, "peers", lambda **_: chosen)


PER_BLOCK = Peer("checkpoint per block", checkpointed=True)


def test_peaks_are_those_of_the_allocator_and_the_model_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, EAGER, PER_BLOCK)
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    step = asked(model)
    eager, checkpointed = measure_peers(step, 1 << 20, pairs=2)
    assert torch.equal(torch.get_rng_state(), state)

    images, labels = step.call.tensors
    there = sum(one.untyped_storage().nbytes() for one in (*model.parameters(), images, labels))
    model.zero_grad()
    expected = there + peak_of(allocations(lambda: F.cross_entropy(model(images), labels).backward()))
    assert eager.peak == pytest.approx(expected, rel=0.01)
    assert checkpointed.peak < 0.9 * eager.peak
    assert checkpointed.times is not None
    assert checkpointed.times.pairs == 2
    assert (eager.wrong, checkpointed.wrong, eager.compared) == ({}, {}, True)
    model.zero_grad()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert vars(model[0]).get("forward") is None  # pyright: ignore[reportIndexIssue]


def test_an_optimizer_counts_with_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, EAGER)
    (without,) = measure_peers(asked(network()), 1 << 20, pairs=1)
    (adam,) = measure_peers(asked(network(), optimizer=torch.optim.AdamW), 1 << 20, pairs=1)
    assert adam.peak >= without.peak + 2 * sum(one.nbytes for one in network().parameters())


def test_where_lossy_plans_are_allowed_autocast_runs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    names = list[str]()
    made = trials.peers
    monkeypatch.setattr(trials, "peers", lambda **given: [p for p in made(**given) if not p.compiled])
    found = measure_peers(asked(network(0.0), allow="lossy"), 1 << 20, pairs=1, on_start=names.append)
    lower = [one for one in found if one.peer.autocast is not None]
    assert names == [
        "eager", "checkpoint per block", "bfloat16 autocast", "bfloat16 autocast, checkpoint per block",
    ]  # fmt: skip
    for one in lower:
        assert (one.gradients, one.wrong) == ("lossy", {})
        assert one.error is not None
        assert 1e-4 < one.error < 0.05  # bfloat16 rounds by up to 2 ** -8
    assert max(one.error for one in found[:2] if one.error is not None) < 1e-5
    assert lower[0].peak < found[0].peak
    assert not [one for one in measure_peers(asked(network(0.0)), 1 << 20, pairs=1) if one.peer.autocast]


def test_autocast_with_lost_gradients_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, other = Peer("bfloat16 autocast", autocast=torch.bfloat16), Peer("x", True, autocast=torch.bfloat16)
    only(monkeypatch, EAGER, plain, other)
    made = trials.as_peer

    def lost(call: Any, peer: Peer, *rest: Any) -> Any:
        run = made(call, peer, *rest)
        return run if peer != other else lambda *args, **kwargs: 3 * run(*args, **kwargs)

    monkeypatch.setattr(trials, "as_peer", lost)
    _, right, wrong = measure_peers(asked(network(0.0)), 1 << 20, pairs=1)
    assert (right.gradients, wrong.gradients) == ("lossy", "wrong")


@pytest.mark.slow
@compiles
def test_the_trap_of_memory_budgets_with_dropout_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, EAGER, trials.COMPILED, Peer("budget", compiled=True, memory_budget=0.3))
    eager, compiled, budget = measure_peers(asked(network()), 1 << 20, pairs=1)
    assert (eager.wrong, compiled.wrong) == ({}, {})
    assert eager.compared
    assert compiled.compared
    assert budget.worst is not None
    assert budget.worst > 0.1
    assert budget.to_dict()["gradients"] == "wrong"


class Scaled(nn.Module):
    """Its own code names a dtype, which no float64 step can have."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.linear.weight)


def test_a_model_that_does_not_run_in_float64_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, EAGER)
    (eager,) = measure_peers(asked(Scaled()), 1 << 20, pairs=1)
    assert not eager.compared
    assert eager.to_dict()["gradients"] == "not compared"


def test_a_peer_that_fails_says_why_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no kernels\nfor this")

    only(monkeypatch, EAGER, PER_BLOCK)
    made = trials.as_peer
    monkeypatch.setattr(trials, "as_peer", lambda c, peer, *r: broken if peer == PER_BLOCK else made(c, peer, *r))
    eager, failed = measure_peers(asked(network()), 1 << 20, pairs=1)
    assert eager.failed is None
    assert failed == PeerResult(PER_BLOCK, failed="RuntimeError: no kernels")
    assert failed.to_dict() == {"name": "checkpoint per block", "failed": "RuntimeError: no kernels"}


def test_without_memory_for_it_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_memory, "available", lambda _: 1 << 20)
    with pytest.raises(UsageError, match=r"takes about 1\.5 MiB, and 1\.0 MiB are available.*--peers"):
        measure_peers(asked(network()), 1 << 19)
