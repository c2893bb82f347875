"""A stack of equal blocks, recomputed in the backward pass in pieces of a chosen size.

    memplan sweep examples/checkpointed.py:build --vary pieces=0,1,2,4,8,16
    memplan check examples/checkpointed.py:make --arg blocks=8 --input 4x32x64x64

`build` returns the step, `make` the model; with `pieces=0` nothing is checkpointed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential


def make(blocks: int = 16, channels: int = 32) -> nn.Sequential:
    """(N, channels, H, W) -> the same."""
    return nn.Sequential(*[block(channels) for _ in range(blocks)])


def block(channels: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.GELU())


def build(pieces: int = 0, blocks: int = 16, batch: int = 16) -> Callable[[], None]:
    model = make(blocks)
    images = torch.randn(batch, 32, 64, 64, requires_grad=True)

    def step() -> None:
        out = checkpoint_sequential(model, pieces, images, use_reentrant=True) if pieces else model(images)
        out.sum().backward()

    return step
