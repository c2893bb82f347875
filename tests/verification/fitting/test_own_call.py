"""A model that was fitted with its loss, called without it."""

from __future__ import annotations

import copy
import pickle
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from truth.cpu_allocator import allocations, peak_of
from verification.fitting.quick import fit

import memplan
from memplan.planning.search.search import Search
from memplan.rewriting.calls import CallStats

TOKENS = torch.arange(256).reshape(4, 64) * 7 % 512


class Head(nn.Module):
    """Most of what a step of it takes, its loss takes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(512, 32), nn.Linear(32, 512, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(6))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


def loss(output: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), tokens.flatten())


def peak(model: nn.Module, *, held: bool) -> int:
    """Independent of memplan: the peak of two steps; ``held``: the loop holds the output through backward."""

    def run() -> None:
        for _ in range(2):
            model.zero_grad()
            if held:
                output = model(TOKENS)
                loss(output, TOKENS).backward()
                del output
            else:
                loss(model(TOKENS), TOKENS).backward()

    model.zero_grad()
    run()
    model.zero_grad()
    resident = sum(one.untyped_storage().nbytes() for one in (*model.parameters(), TOKENS))
    return resident + peak_of(allocations(run))


@pytest.fixture(scope="module")
def eager() -> tuple[int, int]:
    """Bytes of the step without a plan, where the loop holds the output and where not."""
    model = Head()
    return peak(model, held=True), peak(model, held=False)


def test_it_keeps_the_budget_by_the_same_decisions(eager: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, budget = Head(), int(0.95 * eager[1])
    twin = copy.deepcopy(model)
    searched = list[int]()
    within = Search.within
    monkeypatch.setattr(Search, "within", lambda self, target: searched.append(target) or within(self, target))
    fitted = fit(model, TOKENS, targets=TOKENS, loss=loss, budget=budget, pairs=0)
    assert fitted.changed
    assert set(searched) == {budget}  # for model and loss: not once more for the model's own call
    for one in (model, twin):
        loss(one(TOKENS), TOKENS).backward()
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    assert all(torch.equal(one.grad, other.grad) for one, other in pairs)  # pyright: ignore[reportArgumentType]
    assert fitted.stats == CallStats(planned=1)
    assert fitted.notes == [] or any("if its output is gone" in note for note in fitted.notes)
    assert peak(model, held=False) <= budget
    assert (peak(model, held=True) <= budget) == (fitted.notes == [])


def test_what_no_plan_keeps_is_said_by_fit_and_refused_by_the_call(eager: tuple[int, int]) -> None:
    model = Head()
    with pytest.raises(memplan.BudgetError) as caught:
        fit(model, TOKENS, targets=TOKENS, loss=loss, budget=1)
    least = caught.value.smallest_budget
    assert least < 0.8 * eager[1]
    fitted = fit(model, TOKENS, targets=TOKENS, loss=loss, budget=least, pairs=0)
    (note,) = fitted.notes
    assert "with its loss outside of the plan (fitted.model(...)), the step needs at least" in note
    with pytest.raises(memplan.BudgetError, match="at the loss, outside of the plan it takes"):
        fitted.model(TOKENS)
    assert fitted.loss is not None
    fitted.loss(TOKENS, TOKENS).backward()
    assert fitted.stats.planned == 1


@pytest.mark.slow
def test_copies_and_pickles_of_what_was_fitted(eager: tuple[int, int]) -> None:
    fitted = fit(Head(), TOKENS, targets=TOKENS, loss=loss, budget=int(0.95 * eager[1]), pairs=0)
    for other in (pickle.loads(pickle.dumps(fitted)), copy.deepcopy(fitted)):
        assert not other.changed
        assert other.plan == fitted.plan
        assert "a copy of a fitted model runs unplanned" in other.notes[-1]
        assert all(map(torch.equal, other.model.state_dict().values(), fitted.model.state_dict().values()))
        loss(other.model(TOKENS), TOKENS).backward()
        other.undo()
    assert fitted.changed
    assert fitted.stats.planned == 0
    assert copy.copy(fitted).changed
    loss(fitted.model(TOKENS), TOKENS).backward()
    assert fitted.stats.planned == 1
    fitted.undo()


class Fails(nn.Module):
    """Raises an exception of its own in one of its calls."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.net, self.at = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)), at

    def forward(self, x: Tensor) -> Tensor:
        COUNTED()
        if COUNTED.call_count == self.at:
            raise ZeroDivisionError("mine")
        return self.net(x)


COUNTED = Mock()
"""Counts calls. A list would be something that forward() reads and changes, which is refused."""


@pytest.mark.parametrize("at", [1, 2, 3, 4, 6, 8])
def test_the_users_own_exception_comes_out_as_it_is(at: int) -> None:
    COUNTED.reset_mock()
    model, x = Fails(at), torch.randn(64, 16)
    with pytest.raises(ZeroDivisionError, match=r"^mine$") as caught:
        fit(model, x, targets=torch.arange(64) % 4, loss=F.cross_entropy, budget="95%", pairs=0)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    assert vars(model).get("_compiled_call_impl") is None


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(nn.Conv1d(8, 12, 5, 2, 2), nn.BatchNorm1d(12), nn.GELU())
        self.lstm, self.last = nn.LSTM(12, 12, batch_first=True), nn.Sequential(nn.Linear(12, 128), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.lstm(self.front(x).transpose(1, 2))[0])


def test_gradients_of_calls_kept_as_they_are_have_the_layout_that_they_have_without_a_plan() -> None:
    torch.manual_seed(0)
    fitted = fit(Recurrent(), torch.randn(4, 8, 200), budget="97%", pairs=0)
    assert fitted.changed
    assert fitted.proof.same


def test_an_output_that_looks_into_another_one() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.GELU(), nn.Linear(64, 16))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.net(x)
            return hidden, hidden[:, 0]

    fitted = fit(Pooled(), torch.randn(16, 9, 16), budget="80%", pairs=0)
    assert fitted.changed
    assert fitted.proof.same
    hidden, pooled = fitted.model(torch.randn(16, 9, 16))
    assert torch.equal(hidden[:, 0], pooled)
    assert pooled.is_contiguous()
