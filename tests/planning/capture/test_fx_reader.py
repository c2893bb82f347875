"""What a traced graph holds that no plan can be made of."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memplan
from memplan.errors import InputError, RecordingError


class DrawsByItself(nn.Module):
    """A layer with a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.own = nn.Linear(8, 8), torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * torch.rand(8, generator=self.own)


def test_a_generator_of_the_models_own_is_refused_by_name() -> None:
    model = DrawsByItself()
    before = model.own.get_state()
    with pytest.raises(RecordingError, match=r"torch\.Generator") as caught:
        memplan.plan(model, torch.randn(4, 8), budget="1 GiB")
    assert caught.value.where is not None
    assert "test_fx_reader.py" in caught.value.where
    assert torch.equal(model.own.get_state(), before)


def test_a_lazy_layer_is_to_be_called_before() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.LazyLinear(8), nn.LazyLinear(4))

    for what in (make, make()):
        with pytest.raises(InputError, match=r"a lazy layer makes it in its first call.*Call the model once before"):
            memplan.plan(what, torch.randn(4, 8), budget="1 GiB")
