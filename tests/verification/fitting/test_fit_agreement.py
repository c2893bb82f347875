"""What `plan` says that a step needs, `fit` runs in."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from truth.cpu_allocator import allocations, peak_of
from verification.fitting.quick import fit, plan

import memplan
from memplan.errors import RecordingError


@pytest.mark.slow
def test_the_smallest_budget_of_a_plan_is_enough_for_its_fit() -> None:
    """A transposed convolution whose kernel takes more than its results."""
    torch.manual_seed(0)
    model, x = nn.ConvTranspose1d(4, 5, 3), torch.randn(2, 4, 3, requires_grad=True)
    with pytest.raises(memplan.BudgetError) as caught:
        plan(model, x, loss=torch.sum, budget=1)
    least = caught.value.smallest_budget
    made = plan(model, x, loss=torch.sum, budget=least)
    for given in (made, None):
        fitted = fit(model, x, loss=torch.sum, budget=least, plan=given, pairs=1)
        assert fitted.proof.ok
        assert fitted.loss is not None

        def run(loss: nn.Module = fitted.loss) -> None:
            loss(x).backward()

        run()  # nothing is planned any more in the next call
        model.zero_grad()
        x.grad = None
        resident = sum(one.untyped_storage().nbytes() for one in (*model.parameters(), x))
        assert resident + peak_of(allocations(run)) <= least
        model.zero_grad()
        x.grad = None
        fitted.undo()


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.generator = nn.Linear(8, 64), torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(x)) * torch.rand(64, generator=self.generator)


@pytest.mark.parametrize("make", [plan, fit])
def test_a_generator_of_the_models_own_is_refused_by_name_and_stays(make: object) -> None:
    model = OwnGenerator()
    before = model.generator.get_state()
    with pytest.raises(RecordingError, match=r"draws from a torch\.Generator, and memplan plans only draws from"):
        make(model, torch.randn(64, 8), budget="90%")  # pyright: ignore[reportCallIssue]
    assert torch.equal(model.generator.get_state(), before)
