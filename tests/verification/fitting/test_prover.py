"""Proofs on a machine with too little memory for the step as it is."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from environment import slow
from torch import Tensor, nn
from torch.nn import functional as F
from truth.module_state import everything
from verification.fitting.quick import fit, plan

from memplan.errors import UsageError
from memplan.verification.fitting import prover
from memplan.verification.measurement import free_memory
from memplan.verification.proof.proof import Cut, Proof

X, Y = torch.linspace(-1, 1, 512 * 16).reshape(512, 16), torch.arange(512) % 8
CALL: dict[str, Any] = {"targets": Y, "loss": F.cross_entropy}


def net() -> nn.Module:
    torch.manual_seed(0)
    hidden = (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), *hidden, nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))


def budget_of(model: nn.Module, share: float = 0.3, **options: Any) -> tuple[int, int]:
    """A budget between the floor and what the step takes as it is, and the latter."""
    found = plan(model, X, budget="1 GiB", **CALL, **options)
    return int(found.floor + share * (found.eager_peak - found.floor)), found.eager_peak


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """How many samples each side ran with."""
    seen: dict[str, list[int]] = {}

    class Trial(prover.Trial):
        def prepare(self) -> None:
            super().prepare()
            seen.setdefault(self.name, []).append(self._arguments[0][0].shape[0])

    monkeypatch.setattr(prover, "Trial", Trial)
    return seen


def machine(monkeypatch: pytest.MonkeyPatch, free: int | None) -> None:
    monkeypatch.setattr(free_memory, "available", lambda _: free)


@pytest.mark.slow
@pytest.mark.parametrize("free", [1 << 40, None])
def test_with_enough_memory_all_is_compared(free: int | None, monkeypatch: Any, sizes: dict[str, list[int]]) -> None:
    machine(monkeypatch, free)
    model = net()
    fitted = fit(model, X, **CALL, budget=budget_of(model)[0], pairs=0)
    assert fitted.proof.cut is None
    assert set(sizes["reference"]) == {512}


@pytest.mark.parametrize("options", [{"optimizer": torch.optim.AdamW}, *slow({}, {"accumulate": 2})], ids=str)
def test_with_too_little_fewer_samples_are_compared_and_the_plan_is_measured(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, sizes: dict[str, list[int]]
) -> None:
    model = net()
    twin = copy.deepcopy(model)
    chosen = {name: value for name, value in options.items() if name in ("optimizer", "accumulate")}
    budget, eager = budget_of(model, **chosen)
    machine(monkeypatch, eager)
    before = everything(model, X)
    fitted = fit(model, X, **CALL, **options, budget=budget, pairs=1)
    assert fitted.changed
    proof = fitted.proof
    assert proof.ok
    assert proof.cut is not None
    samples = proof.cut.samples
    assert samples < 512
    assert set(sizes["reference"]) == {samples}
    assert set(sizes["alone"]) == {512}
    assert proof.cut == Cut(samples, 512, proof.cut.needed, eager, True)
    assert proof.cut.needed > eager
    assert proof.reference_peak == eager
    assert proof.peak <= budget
    assert proof.peak == pytest.approx(proof.predicted, rel=0.02)
    said = str(proof)
    assert f"compared with {samples} of the 512 samples" in said
    assert "the planned step was measured with all" in said
    assert "predicted before" in said
    assert Proof.from_json(proof.to_json()) == proof

    assert fitted.loss is not None
    for call in (lambda: fitted.loss(X, Y), lambda: F.cross_entropy(twin(X), Y)):  # pyright: ignore[reportOptionalCall]
        torch.manual_seed(2)
        call().backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # pyright: ignore[reportArgumentType]  # both trained
    fitted.undo()
    model.zero_grad()
    after = everything(model, X)
    assert {key for key, value in after.items() if value != before[key]} == {"streams"}  # of the calls above


@pytest.mark.slow
def test_what_is_compared_does_recompute(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    budget, eager = budget_of(model, 0.1)
    machine(monkeypatch, eager)
    right, texts = prover.install, list[str]()

    def watched(step: nn.Module, planner: Any) -> Any:
        made = right(step, planner)
        if not hasattr(planner, "made"):  # the one for fewer samples
            undo = made.undo
            made.undo = lambda: (texts.extend(engine.text for engine in made.engines), undo())[1]
        return made

    monkeypatch.setattr(prover, "install", watched)
    fitted = fit(model, X, **CALL, budget=budget, pairs=0)
    assert fitted.proof.cut is not None
    again = [re.findall(r"ops run again: (\d+)", text) for text in (*texts, fitted.plan.program)]
    assert again[0] == again[1] != ["0"]


@pytest.mark.slow
def test_the_plan_alone_runs_on_the_parameters_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 8))
    weights = sum(p.numel() * 4 for p in model.parameters())
    x = torch.randn(2048, 512)
    made = plan(model, x, budget="1 GiB")
    budget = (made.floor + made.eager_peak) // 2
    machine(monkeypatch, budget - weights)
    fitted = fit(model, x, budget=budget, pairs=0)
    assert fitted.proof.cut is not None
    assert fitted.proof.cut.measured
    assert fitted.proof.resident == pytest.approx(weights + x.numel() * 4, rel=0.001)


def test_where_not_even_the_plan_can_run_its_peak_is_the_predicted_one_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, sizes: dict[str, list[int]]
) -> None:
    model = net()
    budget, eager = budget_of(model)
    machine(monkeypatch, eager // 4)
    fitted = fit(model, X, **CALL, budget=budget, pairs=0)
    assert fitted.proof.cut is not None
    assert not fitted.proof.cut.measured
    assert fitted.proof.peak == fitted.plan.peak
    assert fitted.proof.ok
    assert "alone" not in sizes
    assert "peak not measured" in str(fitted.proof)


def test_a_step_that_fits_as_it_is_is_not_run_where_there_is_no_room(
    monkeypatch: pytest.MonkeyPatch, sizes: dict[str, list[int]]
) -> None:
    model = net()
    _, eager = budget_of(model)
    machine(monkeypatch, eager)
    fitted = fit(model, X, **CALL, budget="1 GiB")
    assert not fitted.changed
    assert fitted.proof.ok
    assert fitted.proof.cut is not None
    assert 512 not in sizes["reference"]


class Rows(nn.Module):
    """Takes eight samples and no other number."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(24, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8))

    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(self.net(x.view(8, 100, 24)).sum(1), -1).log().sum()


def test_what_cannot_be_cut_is_refused_with_the_bytes_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Rows(), torch.randn(8, 100, 24)
    made = plan(model, x, budget="1 GiB")
    machine(monkeypatch, made.eager_peak)
    before = everything(model, x)
    with pytest.raises(
        UsageError, match=r"The proof runs the unplanned step beside the planned one, which takes .* avail"
    ):
        fit(model, x, budget=(made.floor + made.eager_peak) // 2)
    assert everything(model, x) == before


def test_a_comparison_of_moments_needs_room_for_two_more_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """As below, without torchao: an exact plan is proven as if its moments were to be compared."""
    compared = list[Any]()
    monkeypatch.setattr(prover, "_has_moments", lambda planned: planned is not None)
    monkeypatch.setattr(prover, "moments_error", lambda trial, optimizer: compared.append(trial))
    model, options = net(), {**CALL, "optimizer": torch.optim.AdamW}
    budget, eager = budget_of(model, optimizer=torch.optim.AdamW)
    weights, steps = sum(parameter.nbytes for parameter in model.parameters()), 4 * len(list(model.parameters()))
    needed = eager + 2 * (X.nbytes + Y.nbytes + weights + (2 * weights + steps) + weights)
    for spare in (-16, 16):
        machine(monkeypatch, needed + spare)
        fitted = fit(model, X, **options, budget=budget, pairs=0)
        assert (fitted.proof.cut is None) == (spare > 0)
        assert len(compared) == 1, "of all samples, or of fewer"
        compared.clear()
        fitted.undo()


def test_a_proof_of_early_updates_needs_room_for_copies_of_their_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the planned step: another trial's weights, gradients, state and inputs. Weights outweigh all else here, so
    that the planned step with copies of its gradients takes more than the step as it is, which updates in ``step()``.
    """
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(4))), torch.randn(4, 128)
    options: dict[str, Any] = {"loss": torch.sum, "optimizer": torch.optim.SGD, "early": True, "budget": "1 GiB"}
    made = plan(model, x, **options)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    needed = max(made.eager_peak, made.peak + weights) + weights + weights + x.nbytes
    for spare in (-16, 16):
        machine(monkeypatch, needed + spare)
        fitted = fit(model, x, **options, pairs=0)
        assert (fitted.proof.cut is None) == (spare > 0)
        fitted.undo()


def test_fewer_samples_with_early_updates_need_room_for_the_copies_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 of 256 samples take what they take unplanned, at most, and the copies of gradients, beside another trial."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(4))), torch.randn(256, 128)
    options: dict[str, Any] = {"loss": torch.sum, "optimizer": torch.optim.SGD, "early": True, "budget": "1 GiB"}
    made, fewer = (plan(model, inputs, **options) for inputs in (x, x[:64]))
    weights = sum(parameter.nbytes for parameter in model.parameters())
    needed = fewer.eager_peak + weights + (weights + weights + x.nbytes)
    assert fewer.eager_peak < made.peak, "else the plan's peak is the bound"
    for spare in (-16, 16):
        machine(monkeypatch, needed + spare)
        fitted = fit(model, x, **options, pairs=0)
        assert fitted.proof.cut is not None
        assert (fitted.proof.cut.samples == 64) == (spare > 0)
        assert fitted.proof.cut.samples <= 64
        fitted.undo()


@pytest.mark.slow
def test_moments_in_8_bits_need_room_for_two_more_copies(
    monkeypatch: pytest.MonkeyPatch, sizes: dict[str, list[int]]
) -> None:
    """Beside the unplanned step there are weights, gradients, and moments in float32 of another trial, and a second
    copy while moments are compared. Without that room fewer samples are compared from the beginning."""
    pytest.importorskip("torchao.optim")
    torch.manual_seed(0)
    model, x, y = (
        nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)),
        torch.randn(16, 256),
        Y[:16].clone(),
    )
    options: dict[str, Any] = {"targets": y, "loss": F.cross_entropy, "optimizer": torch.optim.AdamW}
    exact = plan(model, x, budget="1 GiB", **options)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    steps = 4 * len(list(model.parameters()))  # the optimizer counts them
    inputs = x.nbytes + y.nbytes
    idle = weights + inputs + (2 * weights + steps) + weights  # with moments and gradients
    budget = exact.floor - weights
    needed = exact.eager_peak + 2 * idle
    machine(monkeypatch, needed - 16)
    fitted = fit(model, x, **options, budget=budget, allow="lossy", pairs=0)
    assert fitted.proof.cut is not None
    assert fitted.proof.moments is not None
    assert max(sizes["reference"]) < 16
    fitted.undo()
    machine(monkeypatch, needed + 16)  # scalars, such as a rate that is a tensor
    fitted = fit(model, x, **options, budget=budget, allow="lossy", pairs=1)
    assert fitted.proof.cut is None
    assert fitted.proof.times is not None
    assert fitted.proof.moments is not None
    fitted.undo()
