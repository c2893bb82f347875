"""Means over whole planes, which are computed for a few channels at a time."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from environment import slow
from torch import nn

import memplan

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


class Means(nn.Module):
    """The mean of each channel, with its dimensions kept or not."""

    def __init__(self, keepdim: bool) -> None:
        super().__init__()
        self.first, self.last, self.head = nn.Conv2d(2, 4, 1), nn.Conv2d(4, 128, 1), nn.Linear(128, 3)
        self.keepdim = keepdim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.last(self.first(x)))
        return self.head(y.mean((2, 3), keepdim=self.keepdim).reshape(1, 128))


@needs_compiler
@pytest.mark.parametrize("keepdim", [False, *slow(True)])
def test_what_a_mean_reads_is_never_whole(keepdim: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, whole = Means(keepdim), 4 * 128 * 8 * 8
    others = 4 * (2 * 4 + 4 + 4 * 128 + 128 + 128 * 3 + 3) + 4 * 2 * 8 * 8 + 4  # the weights, the input, the label
    done = memplan.export(
        model, "1x2x8x8", targets="1:int64<3", loss="cross_entropy", optimizer="sgd:lr=0.05",
        budget=whole // 2 + others, folder=tmp_path, name="net",
    )  # fmt: skip
    assert done.verdict.proven
    assert done.arena < whole / 2
