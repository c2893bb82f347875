"""Where backward starts, in a plan and in a recording."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from memplan.errors import InputError
from memplan.planning.capture.loss_module import default_loss, differentiable, with_loss
from memplan.trace.step import StepOptions, build_of

x = torch.tensor([1.0, 2.0], requires_grad=True)


@pytest.mark.parametrize(
    ("output", "total"),
    [
        (x.sum(), 3.0),
        (x * 2, 6.0),
        ({"a": x, "b": [x * 3, torch.ones(2), torch.ones(2, dtype=torch.int64)]}, 12.0),
        (SimpleNamespace(loss=x.sum(), logits=x), 3.0),
        ((x.sum(), x), 6.0),
    ],
)
def test_the_default_loss(output: Any, total: float) -> None:
    assert default_loss(output).item() == total
    assert sum(one.sum().item() for one in differentiable(output)) == total


def test_nothing_to_start_from_is_refused() -> None:
    with pytest.raises(InputError, match="no floating-point tensor needs a gradient"):
        default_loss({"a": torch.ones(2)})


def test_a_recorded_step_starts_from_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> Any:
            h = self.linear(x)
            outputs.append({"a": h, "b": (h * 2, x)})
            return outputs[-1]

    outputs: list[Any] = []
    losses: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "backward", lambda loss: losses.append(loss))
    build_of(Model(), StepOptions(inputs=(torch.randn(3, 2),)))()()
    assert torch.equal(losses[0], default_loss(outputs[0]))


def test_a_model_with_its_loss_is_a_module() -> None:
    model = nn.Linear(2, 2)
    step = with_loss(model, nn.functional.mse_loss)
    y = torch.randn(3, 2)
    assert torch.equal(step(y, y), nn.functional.mse_loss(model(y), y))
    assert [name for name, _ in step.named_parameters()] == ["model.weight", "model.bias"]
    with pytest.raises(InputError, match="the inputs and then 1 targets"):
        step()
    with pytest.raises(InputError, match="targets=-1"):
        with_loss(model, nn.functional.mse_loss, targets=-1)
