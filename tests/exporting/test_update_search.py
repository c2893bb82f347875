"""Which parameters a search trains: their gradients, what fits, and how near the best set it comes."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from environment import thinned
from torch import nn
from torch.nn import functional as F

import memplan
from memplan.errors import BudgetError, InputError, UsageError
from memplan.exporting.exported import Exported
from memplan.exporting.update_search import chosen_update

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
MOMENTUM = lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)  # noqa: E731
Batches = list[tuple[torch.Tensor, torch.Tensor]]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(2, 6, 3, padding=1), nn.BatchNorm1d(6), nn.ReLU(), nn.Conv1d(6, 4, 3, 2), nn.ReLU(), nn.Flatten(),
        nn.Linear(4 * 7, 5),
    )  # fmt: skip


def data() -> Batches:
    drawn = torch.Generator().manual_seed(3)
    return [(torch.randn(2, 2, 16, generator=drawn), torch.randint(5, (2,), generator=drawn)) for _ in range(3)]


def exported(folder: Path, model: nn.Module, **options: Any) -> Exported:
    step: dict[str, Any] = {"targets": "2:int64<5", "loss": F.cross_entropy, "optimizer": MOMENTUM}
    return memplan.export(model, "2x2x16", folder=folder, **step | options)


def mean_squares(model: nn.Module, batches: Batches) -> dict[str, float]:
    """The mean squared gradient norms by autograd in float64."""
    model = model.double()
    names, parameters = zip(*model.named_parameters(), strict=True)
    grads = [torch.autograd.grad(F.cross_entropy(model(x.double()), y), parameters) for x, y in batches]
    return {name: sum(float(g[at].norm()) ** 2 for g in grads) / len(grads) for at, name in enumerate(names)}


@needs_compiler
def test_what_is_trained_fits_and_is_an_ordinary_export(tmp_path: Path) -> None:
    model, whole = network(), exported(tmp_path / "whole", network(), verify=False)
    budget = (whole.smallest_budget * 4) // 5
    done = exported(tmp_path / "chosen", model, budget=budget, search_update=data())
    assert done.verdict.proven
    assert done.ram <= budget
    assert all(one.requires_grad for one in model.parameters()), "the model is as it was"
    choice = done.choice
    assert choice is not None
    squares = mean_squares(network(), data())
    for one in choice.candidates:
        assert one.gradient**2 == pytest.approx(squares[one.path], rel=1e-3, abs=1e-9)
        assert one.bytes == 2 * 4 * network().get_parameter(one.path).numel(), "the weight and its momentum"
    chosen = {one.path for one in choice.trained}
    assert 0 < len(chosen) < len(choice.candidates)
    assert choice.share == pytest.approx(sum(squares[path] for path in chosen) / sum(squares.values()), rel=1e-3)
    frozen = network()
    for path, one in frozen.named_parameters():
        one.requires_grad_(path in chosen)
    by_hand = exported(tmp_path / "by hand", frozen, budget=budget, verify=False, name=done.name)
    for file in ("sequential.c", "sequential.h", "sequential_weights.h"):
        assert (tmp_path / "by hand" / file).read_bytes() == (tmp_path / "chosen" / file).read_bytes()
    assert choice.ram == by_hand.smallest_budget
    assert choice.batches == 3
    assert done.to_dict()["choice"]["share"] == choice.share


class Worth:
    """Parameters with a gain each, and bytes of sets in which two share what they keep."""

    def __init__(self, seed: int) -> None:
        drawn = torch.Generator().manual_seed(seed)
        self.sizes = torch.randint(1, 40, (7,), generator=drawn).tolist()
        self.kept = torch.randint(1, 60, (7,), generator=drawn).tolist()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(nn.Linear(size, 1, bias=False) for size in self.sizes)
        self.gains = torch.rand(7, generator=drawn).tolist()

    def peak(self, paths: Any, levers: bool) -> int:
        chosen = [int(path.split(".")[1]) for path in paths]
        lowest = min(chosen, default=7)
        return 100 + sum(8 * self.sizes[k] for k in chosen) + 4 * sum(self.kept[lowest:])


@pytest.mark.parametrize("seed", thinned(range(20), 4))
def test_the_best_set_is_nearly_found(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside all 127 sets: training a layer asks for what all later ones keep, as a backward pass does."""
    worth = Worth(seed)
    names = [f"layers.{k}.weight" for k in range(7)]
    gains = dict(zip(names, worth.gains, strict=True))
    monkeypatch.setattr("memplan.exporting.update_search.squared_norms", lambda asked, paths, batches: (gains, 1))
    budget = (worth.peak(names, True) + worth.peak((), True)) // 2
    asked: Any = SimpleNamespace(bytes=budget, model=worth.model)
    rules: Any = SimpleNamespace(arrays_in_state=("momentum",), group_of=gains)
    choice = chosen_update(asked, rules, [], worth.peak)
    sets = itertools.chain.from_iterable(itertools.combinations(names, count) for count in range(1, 8))
    best = max(sum(gains[path] for path in one) for one in sets if worth.peak(one, True) <= budget)
    found = sum(gains[one.path] for one in choice.trained)
    assert worth.peak([one.path for one in choice.trained], True) <= budget
    print("ratio", found / best)
    assert found >= 0.9 * best


def test_what_cannot_be_chosen_is_refused(tmp_path: Path) -> None:
    def wrong(batches: Any, **options: Any) -> None:
        exported(tmp_path, network(), search_update=batches, verify=False, **options)

    with pytest.raises(InputError, match="has no batch"):
        wrong([])
    with pytest.raises(UsageError, match="search_update=a Tensor"):
        wrong(torch.zeros(2))
    with pytest.raises(InputError, match=r"batch 0 of search_update: .*Give each batch as a tuple"):
        wrong([torch.zeros(2, 2, 16)])
    with pytest.raises(InputError, match=r"the gradient of 0.weight is not finite"):
        wrong([(torch.full((2, 2, 16), torch.nan), torch.zeros(2, dtype=torch.int64))])
    with pytest.raises(BudgetError, match="training one parameter takes") as caught:
        wrong(data(), budget=200)
    assert caught.value.smallest_budget > 200
    assert exported(tmp_path, network(), search_update=data(), verify=False, budget=caught.value.smallest_budget)
