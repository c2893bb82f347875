"""Inference within a budget: peak and result beside the model as it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import memplan
from memplan import _torch
from memplan.errors import BudgetError, InputError, UsageError


def network() -> nn.Module:
    """Two levels of convolutions."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(), nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(8, 2, 3, padding=1),
    ).eval()  # fmt: skip


def peak_of(model: nn.Module, x: torch.Tensor) -> tuple[int, torch.Tensor]:
    """Return the peak of a call without grad, by torch's profiler, and its result."""
    profile = _torch.memory_profile()
    with torch.no_grad(), profile:
        result = model(x)
    level = peak = 0
    for event in _torch.Profile.of(profile).events:
        level += event.bytes
        peak = max(peak, level)
    return peak + sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers(), x)), result


def test_inference_fits_in_parts_and_is_the_same() -> None:
    """Half of the bytes, measured; the result of the whole but for rounding; undone, as before."""
    model, x = network(), torch.randn(1, 3, 256, 256)
    before, whole = peak_of(model, x)
    fitted = memplan.fit(model, x, budget=before // 2, train=False)
    peak, result = peak_of(fitted.model, x)
    assert fitted.changed
    assert len(fitted.parts) > 1
    assert peak <= before // 2
    assert peak == pytest.approx(fitted.measured, rel=0.01)
    assert peak == pytest.approx(fitted.predicted, rel=0.001)
    assert fitted.before == pytest.approx(before, rel=0.01)
    torch.testing.assert_close(result, whole, rtol=1e-5, atol=1e-5)
    assert fitted.difference < 1e-5
    assert f"{len(fitted.parts)} parts" in str(fitted)
    fitted.undo()
    assert peak_of(model, x)[0] == before


def test_other_calls_run_as_before() -> None:
    """With grad, in training mode, with another shape; a state_dict has the same names."""
    model, x = network(), torch.randn(1, 3, 128, 128)
    names, before = list(model.state_dict()), peak_of(model, x)[0]
    fitted = memplan.fit(model, x, budget="60%", train=False)
    assert fitted.budget == int(0.6 * fitted.before)
    assert list(model.state_dict()) == names
    model(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with torch.no_grad():
        assert model(x[..., :64]).shape == (1, 2, 128, 64)
    model.train()
    assert peak_of(model, x)[0] == pytest.approx(before, rel=0.01)


def test_what_fits_is_not_changed() -> None:
    """The whole's peak is within the budget."""
    model, x = network(), torch.randn(1, 3, 64, 64)
    fitted = memplan.fit(model, x, budget="1 GiB", train=False)
    assert not fitted.changed
    assert fitted.parts == ()
    assert "as it is" in str(fitted)


def test_a_budget_below_all_parts_says_what_would_do() -> None:
    """Input and result are always there; what needs the whole has a reason."""
    model, x = network(), torch.randn(1, 3, 32, 32)
    with pytest.raises(BudgetError, match="input and result alone") as caught:
        memplan.fit(model, x, budget=x.numel() * 4, train=False)
    assert memplan.fit(model, x, budget=caught.value.smallest_budget, train=False).changed
    pooled = nn.Sequential(network(), nn.AdaptiveAvgPool2d(1)).eval()
    with pytest.raises(BudgetError, match="does not run in parts: a sum over"):
        memplan.fit(pooled, x, budget="30%", train=False)


class Between(nn.Module):
    """A function between two convolutions."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 1, 3, padding=1)
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.between(self.first(x)))


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (lambda h: h + 1e-6 * torch.arange(h.shape[-1]), "arange makes a tensor"),
        (lambda h: h + 1e-9 * float(h.shape[-1]), "with other numbers"),
        (lambda h: h * 2 if h.shape[-1] > 150 else h, "other ops"),
        (lambda h: h * 2 if bool(h.mean() > 0) else h, "without values"),
    ],
)
def test_what_depends_on_the_size_or_on_values_is_refused(between: Callable[..., torch.Tensor], reason: str) -> None:
    """Also where it changes the result by less than rounding, which no comparison of values sees."""
    with pytest.raises(BudgetError, match=reason):
        memplan.fit(Between(between).eval(), torch.randn(1, 1, 192, 192), budget="40%", train=False)


def test_bad_use() -> None:
    """A model in training mode, and more than an input."""
    with pytest.raises(UsageError, match=r"Call model.eval\(\) first"):
        memplan.fit(network().train(), torch.randn(1, 3, 64, 64), budget="1 GiB", train=False)
    with pytest.raises(InputError, match="a single tensor"):
        memplan.fit(network(), torch.randn(1, 3, 8, 8), torch.randn(1), budget="1 GiB", train=False)
