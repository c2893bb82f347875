"""Every kind of model and call, in two budgets: the gradients are those of a plain step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from environment import slow
from rewriting.cells import BATCH, CELLS, Twice, same_state, total
from torch import Tensor, nn
from verification.fitting.quick import fit

from memplan.errors import BudgetError


def trained(model: nn.Module, step: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """The loss of one step by hand, and what is drawn after it; gradients are left in the model."""
    torch.manual_seed(5)
    model.zero_grad()
    loss = step()
    loss.backward()
    return loss.detach(), torch.rand(1)


FEW = ("batch norm and dropout",)
"""The cell of every run; `tests/rewriting/test_engine.py` runs the plans of all of them."""


@pytest.mark.parametrize("cell", [*FEW, *slow(*(name for name in CELLS if name not in FEW))])
def test_every_cell_in_two_budgets(cell: str) -> None:
    torch.manual_seed(0)
    model = Twice(CELLS[cell].make(), CELLS[cell].make())
    inputs, kwargs = CELLS[cell].arguments(BATCH)
    twin = copy.deepcopy(model)
    given: dict[str, Any] = {"kwargs": kwargs, "loss": total, "pairs": 0}
    with pytest.raises(BudgetError) as caught:
        fit(model, *inputs, budget=1, **given)
    floor, eager = caught.value.smallest_budget, 0
    for share in (0.0, 0.6):
        budget = int(floor + share * max(0, eager - floor))
        fitted = fit(model, *inputs, budget=budget, **given)
        assert fitted.changed
        assert fitted.proof.exact
        assert fitted.proof.within_budget
        assert fitted.proof.peak <= budget < fitted.proof.reference_peak
        planned, eager = fitted.loss, fitted.proof.reference_peak
        assert planned is not None
        ours = trained(model, lambda planned=planned: planned(*inputs, **kwargs))
        plain = trained(twin, lambda: total(twin(*inputs, **kwargs)))
        assert [torch.equal(*pair) for pair in zip(ours, plain, strict=True)] == [True, True]
        same_state(twin, model)
        fitted.undo()
        model.zero_grad()
