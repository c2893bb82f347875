"""Language models whose head and loss run in pieces along tokens: their logits never exist as a whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memplan
from memplan import _torch
from memplan.errors import BudgetError
from memplan.planning.search.search import Heuristics

QUICK: dict[str, Any] = {"heuristics": Heuristics(shakes=1, rounds=8), "allow": "reordered", "pairs": 0}
VOCABULARY, WIDTH, TOKENS = 4001, 32, 250
LOGITS = 4 * VOCABULARY * TOKENS


class LanguageModel(nn.Module):
    """An embedding that is the head, too, a block, and the loss of the next token.

    Args:
        returns_logits: whether forward returns them beside the loss.
    """

    def __init__(self, *, returns_logits: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.returns_logits = returns_logits

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        """Return the loss."""
        hidden = self.embed(ids)
        logits = self.head(hidden + self.mlp(hidden)).float()
        shifted, targets = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
        loss = F.cross_entropy(shifted.view(-1, VOCABULARY), targets.view(-1))
        return (loss, logits) if self.returns_logits else loss


def step(**options: bool) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a model, tokens and labels, of which some do not count."""
    torch.manual_seed(0)
    ids = torch.randint(VOCABULARY, (1, TOKENS))
    return LanguageModel(**options), ids, torch.where(ids % 7 == 0, -100, ids)


def test_logits_never_exist_as_a_whole() -> None:
    """Nor their gradient: all that the step allocates, by torch's profiler, is less than they are."""
    model, ids, labels = step()
    resident = sum(t.numel() * t.element_size() for t in (*model.parameters(), ids, labels))
    gradients = 2 * 4 * VOCABULARY * WIDTH  # of the embedding and of the head, which are added
    budget = resident + gradients + LOGITS // 2
    with pytest.raises(BudgetError):
        memplan.plan(model, ids, labels, budget=budget, costs="roofline")
    fitted = memplan.fit(model, ids, labels, budget=budget, **QUICK)
    assert fitted.proof.ok
    assert fitted.plan.tiles[-1].axis.dim == 1
    profile = _torch.memory_profile()
    with profile:
        fitted.model(ids, labels).backward()
    level = peak = 0
    for event in _torch.Profile.of(profile).events:
        level += event.bytes
        peak = max(peak, level)
    assert resident + peak <= budget
    assert resident + peak == pytest.approx(fitted.plan.peak, rel=1e-3)
    (decision,) = [decision for decision in fitted.plan.decisions if decision.lever == "tile"]
    assert "along tokens, with its gradients in the forward pass" in decision.reason


@pytest.mark.slow
def test_losses_that_are_scaled_and_added() -> None:
    """Two micro-batches with a loss of a quarter each, beside the model in float64."""
    model, ids, labels = step()
    truth = step()[0].double()
    truth.load_state_dict(model.state_dict())
    fitted = memplan.fit(model, ids, labels, budget="50%", **QUICK)
    assert fitted.plan.tiles
    for turned in (0, 9):
        for module in (fitted.model, truth):
            (module(ids.roll(turned), labels.roll(turned)) / 4).backward()
    for parameter, expected in zip(model.parameters(), truth.parameters(), strict=True):
        assert expected.grad is not None
        torch.testing.assert_close(parameter.grad, expected.grad.float(), rtol=1e-4, atol=1e-7)


@pytest.mark.slow
def test_logits_that_are_returned_exist() -> None:
    """No budget below them has a plan; they are what the model returns without one."""
    model, ids, labels = step(returns_logits=True)
    with pytest.raises(BudgetError) as caught:
        memplan.plan(model, ids, labels, budget=1, costs="roofline", allow="reordered")
    assert caught.value.smallest_budget > LOGITS
    _, expected = model(ids, labels)
    fitted = memplan.fit(model, ids, labels, budget=int(1.05 * caught.value.smallest_budget), **QUICK)
    assert fitted.proof.ok
    torch.testing.assert_close(fitted.model(ids, labels)[1], expected)
