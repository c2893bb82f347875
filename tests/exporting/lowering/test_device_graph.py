"""Results that are not contiguous in PyTorch: kernels write them contiguous, and later ops read them so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from environment import slow
from torch import nn
from torch.nn import functional as F

import memplan


class BetweenTransposes(nn.Module):
    """A layer over channels of a sequence whose channels come last, as a norm before `nn.GRU`."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first, self.middle, self.head = nn.Linear(6, 4), middle, nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.first(x).transpose(1, 2)).transpose(1, 2)).mean(1)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(4),
    "dropout": lambda: nn.Dropout(0.5),
    "batch norm, fixed": lambda: nn.BatchNorm1d(4).eval(),
    "group norm": lambda: nn.GroupNorm(2, 4),
    "layer norm": lambda: nn.LayerNorm(8),
    "max pool": lambda: nn.MaxPool1d(2),
    "softmax": lambda: nn.Softmax(1),
}


@pytest.mark.parametrize("name", ["batch norm", "dropout", *slow(*list(LAYERS)[2:])])
def test_a_layer_between_transposes_computes_what_pytorch_does(name: str, tmp_path: Path) -> None:
    """The result of a batch norm of a transposed tensor has the transposed strides in PyTorch, and views as if they
    were exist of it."""
    torch.manual_seed(0)
    done = memplan.export(
        BetweenTransposes(LAYERS[name]()), torch.randn(2, 8, 6), targets="2:int64<3", loss=F.cross_entropy,
        optimizer="sgd:lr=0.1", folder=tmp_path, name="net", verify=True,
    )  # fmt: skip
    assert done.verdict.proven
