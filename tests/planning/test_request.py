"""What cannot be asked for together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import memplan
from memplan.errors import InputError, UsageError


def layers() -> Any:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def shared() -> Any:
    model = layers()
    model[2].weight = nn.Parameter(model[0].weight.data)
    return model


def shared_with_a_buffer() -> nn.Module:
    model = layers()
    model.register_buffer("first", model[0].weight.data[2:])
    return model


def shared_with_what_is_frozen() -> nn.Module:
    model = shared()
    model[0].weight.requires_grad_(False)
    return model


def slices() -> nn.Module:
    model = layers()
    vector_to_parameters(parameters_to_vector(model.parameters()).detach(), model.parameters())
    return model


def tied() -> nn.Module:
    model = layers()
    model[2].weight = model[0].weight
    return model


def planned(model: nn.Module, *, early: bool) -> None:
    memplan.plan(model, torch.randn(4, 8), budget="1 GiB", optimizer=torch.optim.SGD, early=early)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (shared, "0.weight and 2.weight"),
        (shared_with_what_is_frozen, "0.weight and 2.weight"),
        (shared_with_a_buffer, "0.weight and first"),
    ],
)
def test_early_updates_of_what_shares_memory_are_refused(make: Callable[[], nn.Module], names: str) -> None:
    with pytest.raises(UsageError, match=f"early=True, and {names} share memory"):
        planned(make(), early=True)
    planned(make(), early=False)


@pytest.mark.parametrize("make", [slices, tied])
def test_early_updates_of_parts_of_one_vector_and_of_one_parameter_are_not(make: Callable[[], nn.Module]) -> None:
    planned(make(), early=True)


class _DropPath(nn.Module):
    """As ViTs are made: weights by rejection sampling, which reads values, and a rate per layer read from a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            nn.init.trunc_normal_(layer.weight, std=0.02)
        self.scales = [1 - rate.item() for rate in torch.linspace(0, 0.5, 4)]

    def forward(self, x: Tensor) -> Tensor:
        for layer, scale in zip(self.layers, self.scales, strict=True):
            x = x + scale * layer(x).relu()
        return x.sum()


def test_a_callable_may_read_values_while_it_constructs_the_model() -> None:
    without_memory = memplan.plan(_DropPath, memplan.spec("1024x64"), budget="80%")
    real = memplan.plan(_DropPath(), torch.ones(1024, 64), budget="80%")
    assert without_memory.predicted == real.predicted
    assert without_memory.decisions == real.decisions


def test_an_error_of_the_callable_is_raised_unchanged() -> None:
    def make() -> nn.Module:
        raise LookupError("no such configuration")

    with pytest.raises(LookupError, match=r"^'?no such configuration'?$"):
        memplan.plan(make, memplan.spec("1024x64"), budget="80%")


@pytest.mark.parametrize("targets", [0, 2])
def test_a_loss_that_takes_other_targets_is_refused_before_anything_runs(targets: int) -> None:
    def loss(output: Tensor, labels: Tensor) -> Tensor:
        return (output - labels).square().mean()

    with pytest.raises(InputError, match=rf"the loss loss and {targets} target\(s\)") as caught:
        memplan.plan(layers(), torch.randn(2, 8), targets=(torch.randn(2, 8),) * targets, loss=loss, budget="1 MiB")
    assert "--target" in str(caught.value)
