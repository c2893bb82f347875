"""Steps whose segments run piece by piece: within the budget, and the same but for rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from environment import slow
from torch import nn
from torch.nn import functional as F
from truth.cpu_allocator import allocations, peak_of

import memplan
from memplan import _torch
from memplan.errors import BudgetError, UsageError, VerificationError
from memplan.planning.planner import Planner
from memplan.planning.search.search import Heuristics, Search
from memplan.planning.tiles import tiled

QUICK_PLAN: dict[str, Any] = {"heuristics": Heuristics(shakes=1, rounds=8), "loss": F.cross_entropy}
QUICK: dict[str, Any] = {**QUICK_PLAN, "pairs": 0}


class Classifier(nn.Module):
    """A stem of large tensors before small ones, with running statistics and a change in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(inplace=True), nn.MaxPool2d(4)
        )
        self.rest = nn.Sequential(
            nn.Conv2d(24, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return self.rest(self.stem(x))


def step(samples: int = 8, size: int = 48) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return a model and a batch."""
    torch.manual_seed(0)
    return Classifier(), torch.randn(samples, 3, size, size), torch.arange(samples) % 5


def floor_of(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, **options: Any) -> int:
    """Return the smallest budget with a plan."""
    with pytest.raises(BudgetError) as caught:
        memplan.plan(model, images, targets=labels, loss=F.cross_entropy, budget=1, costs="roofline", **options)
    return caught.value.smallest_budget


@pytest.mark.parametrize(("samples", "size"), [(8, 48), *slow((1, 128))])
def test_a_step_fits_below_the_floor_of_exact_plans(samples: int, size: int) -> None:
    """Along samples, and along rows for a batch of one. The peak is measured by torch's profiler."""
    model, images, labels = step(samples, size)
    budget = int(0.7 * floor_of(model, images, labels))
    fitted = memplan.fit(model, images, targets=labels, budget=budget, allow="reordered", **QUICK)
    proof, plan = fitted.proof, fitted.plan
    assert proof.ok
    assert proof.grade == plan.grade == "reordered"
    assert memplan.Plan.from_json(plan.to_json()) == plan
    assert {tile.axis.dim for tile in plan.tiles} == {0 if samples > 1 else 2}
    profile = _torch.memory_profile()
    loss = fitted.loss
    assert loss is not None
    with profile:
        loss(images, labels).backward()
    level = peak = 0
    for event in _torch.Profile.of(profile).events:
        level += event.bytes
        peak = max(peak, level)
    resident = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers(), images, labels))
    assert resident + peak <= budget * 1.001
    assert resident + peak == pytest.approx(plan.peak, rel=0.01)


@pytest.mark.slow
def test_training_goes_on_as_without_a_plan() -> None:
    """Three updates: parameters and running statistics, beside the model itself in float64."""
    model, images, labels = step()
    truth, torch_state = step()[0].double(), model.state_dict()
    truth.load_state_dict(torch_state)
    budget = int(0.75 * floor_of(model, images, labels))
    fitted = memplan.fit(model, images, targets=labels, budget=budget, allow="reordered", **QUICK)
    assert fitted.plan.tiles
    plain = step()[0]
    for network, loss in ((truth, None), (plain, None), (model, fitted.loss)):
        optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
        for _ in range(3):
            optimizer.zero_grad()
            x = images.double() if network is truth else images
            (loss(x, labels) if loss else F.cross_entropy(network(x), labels)).backward()
            optimizer.step()
    for name, value in truth.state_dict().items():
        error = (model.state_dict()[name] - value).double().norm()
        own = (plain.state_dict()[name] - value).double().norm()
        assert error <= 2 * own + 1e-6 * value.double().norm(), name
    assert model.state_dict()["stem.1.num_batches_tracked"] == 3


def test_early_updates_of_a_step_in_pieces_are_those_of_the_optimizer() -> None:
    """Of a bias before a batch norm the gradient is zero but for rounding, whose signs are Adam's first update."""
    model, images, labels = step()
    options: dict[str, Any] = {"optimizer": torch.optim.AdamW, "early": True}
    budget = int(0.75 * floor_of(model, images, labels, **options))
    fitted = memplan.fit(model, images, targets=labels, budget=budget, allow="reordered", **options, **QUICK)
    proof = fitted.proof
    assert fitted.plan.tiles
    assert proof.ok
    assert proof.grade == "reordered"
    assert any(error.name == "model.stem.0.bias" and error.error > 0 for error in proof.rounded)
    trained = len(list(model.parameters()))
    assert proof.gradients.tensors == proof.parameters.tensors == proof.steps * trained
    assert proof.state.tensors == 3 * proof.parameters.tensors  # two moments and a number of updates


def test_the_models_own_call_runs_in_the_segments_of_the_plan_with_its_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not searched again, keeps the budget, and its gradients are those of the plan with the loss. A dropout
    keeps the segment from reaching as far as the loss."""
    model, images, labels = step()
    assert isinstance(model, Classifier)
    model.rest[3] = nn.Sequential(nn.Flatten(), nn.Dropout(0.2))
    budget = int(0.75 * floor_of(model, images, labels))
    searched, within = list[int](), Search.within
    monkeypatch.setattr(Search, "within", lambda self, target: searched.append(1) or within(self, target))
    made = memplan.plan(model, images, targets=labels, budget=budget, allow="reordered", **QUICK_PLAN)
    alone = len(searched)
    fitted = memplan.fit(model, images, targets=labels, budget=budget, allow="reordered", **QUICK)
    assert made.tiles == fitted.plan.tiles
    assert len(searched) == 2 * alone  # by plan, and by fit for model and loss: not once more
    loss = fitted.loss
    assert loss is not None
    gradients = list[list[torch.Tensor]]()
    for run in (lambda: loss(images, labels), lambda: F.cross_entropy(model(images), labels)):
        model.zero_grad()

        def backward(run: Any = run) -> None:
            torch.manual_seed(0)
            run().backward()

        backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])  # pyright: ignore[reportOptionalMemberAccess]
        model.zero_grad()
        resident = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers(), images, labels))
        assert resident + peak_of(allocations(backward)) <= budget
    assert all(map(torch.equal, *gradients))
    assert fitted.stats.unplanned == 0


@pytest.mark.parametrize(("broken", "samples", "size"), [("term", 8, 48), *slow(("halo", 1, 128))])
def test_a_wrong_tile_is_refused(monkeypatch: pytest.MonkeyPatch, broken: str, samples: int, size: int) -> None:
    """In the backward pass of the third piece a border is off by 1 %, or the gradients of its sums by a thousandth:
    about a ten-thousandth of all."""
    run, derivative = tiled._Run.__init__, tiled.Tiled._derivative

    def begin(self: Any, whole: Any, *args: Any, **options: Any) -> None:
        run(self, whole, *args, **options)
        if self.piece == 2 and options.get("differentiates"):
            for value in set(whole.placements).intersection(self.values):
                self.values[value] = self.values[value].clone()
                self.values[value].narrow(whole.placements[value].dim, 0, 1).mul_(0.99)

    def differentiate(self: Any, run: Any, piece: int, *args: Any) -> Any:
        computed = derivative(self, run, piece, *args)
        return [g if g is None or piece != 2 else g * (1 - 1e-3) for g in computed]

    if broken == "halo":
        monkeypatch.setattr(tiled._Run, "__init__", begin)
    else:
        monkeypatch.setattr(tiled.Tiled, "_derivative", differentiate)
    model, images, labels = step(samples, size)
    budget = int(0.7 * floor_of(model, images, labels))
    with pytest.raises(VerificationError, match="in float64 is"):
        memplan.fit(model, images, targets=labels, budget=budget, allow="reordered", **QUICK)


@pytest.mark.slow
def test_frozen_batch_norms_run_in_pieces() -> None:
    """In evaluation, as in fine-tuning. Whole, the norm's operand and result alone would be above the budget."""
    model, images, labels = step()
    assert isinstance(model, Classifier)
    norm = model.stem[1].eval()
    assert isinstance(norm, nn.BatchNorm2d)
    assert norm.running_var is not None
    norm.running_var.uniform_(0.5, 2.0)
    budget = 2 * images.shape[0] * 24 * images.shape[2] * images.shape[3] * images.element_size()
    fitted = memplan.fit(model, images, targets=labels, budget=budget, allow="reordered", **QUICK)
    assert fitted.proof.ok


@pytest.mark.slow
def test_a_plan_with_tiles_is_saved_and_used_again(tmp_path: Path) -> None:
    """The same plan, byte for byte, and it runs."""
    model, images, labels = step()
    budget = int(0.7 * floor_of(model, images, labels))
    made = memplan.plan(
        model, images, targets=labels, loss=F.cross_entropy, budget=budget, allow="reordered", costs="roofline"
    )
    made.save(tmp_path / "plan.json")
    loaded = memplan.Plan.load(tmp_path / "plan.json")
    assert loaded == made
    assert loaded.tiles
    fitted = memplan.fit(model, images, targets=labels, budget=budget, allow="reordered", plan=loaded, **QUICK)
    assert fitted.proof.ok
    assert fitted.plan.tiles == made.tiles
    with pytest.raises(UsageError, match="allow='reordered'"):
        memplan.fit(model, images, targets=labels, budget=budget, plan=loaded, **QUICK)
    for samples in (12, 16):  # one that does not divide into the plan's samples, and one that does
        model, images, labels = step(samples)
        with pytest.raises(UsageError, match="other inputs"):
            memplan.fit(model, images, targets=labels, budget=2 * budget, allow="reordered", plan=loaded, **QUICK)


class Gates(nn.Module):
    """Group norms, and layers with two views of a tensor: its second half is the gate of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.norm, self.head = nn.GroupNorm(4, 16), nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value, gate = self.norm(self.first(x)).chunk(2, 1)
        value, gate = self.second(value * torch.sigmoid(gate)).split(8, 1)
        return self.head(value * torch.sigmoid(gate)).mean((2, 3))


@pytest.mark.parametrize("samples", [1, 4])
def test_gates_and_group_norms_run_in_pieces(samples: int) -> None:
    """Along rows and along samples. The peak is measured by torch's profiler."""
    torch.manual_seed(0)
    model, images, labels = Gates(), torch.randn(samples, 3, 64, 64), torch.arange(samples)
    budget = int(0.5 * floor_of(model, images, labels))
    fitted = memplan.fit(model, images, targets=labels, budget=budget, allow="reordered", **QUICK)
    assert fitted.proof.ok
    assert fitted.proof.peak <= budget
    norm, gate = 1, 4  # calls of the group norm, and of the product with its halves
    assert any(tile.first <= norm < gate <= tile.last for tile in fitted.plan.tiles)


def test_an_exact_plan_that_does_not_fit_says_what_would() -> None:
    """The message of a budget names the option, where segments can run piece by piece, and only there."""
    model, images, labels = step()
    budget = int(0.8 * floor_of(model, images, labels))
    with pytest.raises(BudgetError, match="allow='reordered'"):
        memplan.plan(model, images, targets=labels, loss=F.cross_entropy, budget=budget, costs="roofline")
    with pytest.raises(BudgetError, match="allow='reordered'"):
        memplan.fit(model, images, targets=labels, budget=budget, **QUICK)
    linear = nn.Linear(4000, 10)
    with pytest.raises(BudgetError) as caught:
        memplan.plan(linear, torch.randn(2, 4000), targets=labels[:2], loss=F.cross_entropy, budget=1)
    assert "reordered" not in str(caught.value)


def test_a_step_that_does_not_fit_in_pieces_says_what_stays_whole() -> None:
    """``fit`` has measured the least plan, and keeps the reason that the search gave."""
    model, images, labels = nn.Sequential(nn.Linear(4, 4000), nn.Softmax(0)), torch.randn(64, 4), torch.arange(64)
    budget = int(0.9 * floor_of(model, images, labels))
    with pytest.raises(BudgetError, match=r"what does not run piece by piece: .*softmax"):
        memplan.fit(model, images, targets=labels, budget=budget, allow="reordered", **QUICK)


def test_a_least_budget_is_one_that_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search for less can reach a peak that a search for that peak does not: then the error has neither that peak,
    nor that budget for the user's."""
    model, images, labels = nn.Sequential(nn.Linear(4, 400), nn.Softmax(0)), torch.randn(64, 4), torch.arange(64)
    floor = floor_of(model, images, labels)
    planned = Planner.planned

    def reaches_less(*args: Any, **options: Any) -> Any:
        try:
            return planned(*args, **options)
        except BudgetError as error:
            raise error.but(smallest_budget=floor - 2000 if args[3] < floor - 2000 else floor) from None

    monkeypatch.setattr(Planner, "planned", reaches_less)
    with pytest.raises(BudgetError, match=r"The budget is 50\.0 KiB") as caught:
        memplan.fit(model, images, targets=labels, budget=50 * 1024, allow="reordered", **QUICK)
    assert caught.value.smallest_budget >= floor


def test_what_draws_random_numbers_stays_whole() -> None:
    """A dropout in the stem: its masks would be others."""
    model, images, labels = step()
    model.stem.insert(3, nn.Dropout(0.5))  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    budget = int(0.9 * floor_of(model, images, labels))
    try:
        plan = memplan.plan(
            model, images, targets=labels, loss=F.cross_entropy, budget=budget, allow="reordered", costs="roofline"
        )
    except BudgetError:
        return
    layers = [decision.layer for decision in plan.decisions if decision.lever == "tile"]
    assert layers
    assert all("stem.3" not in layer for layer in layers)
