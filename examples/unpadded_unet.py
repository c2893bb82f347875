"""A U-Net without padding, as it was first published (Ronneberger et al. 2015), smaller.

    memplan check examples/unpadded_unet.py:make --input 1x1x256x256

`make` makes the model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Sequential):
    """Two 3x3 convolutions without padding: two pixels less on each side."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(nn.Conv2d(inputs, outputs, 3), nn.ReLU(), nn.Conv2d(outputs, outputs, 3), nn.ReLU())


class UNet(nn.Module):
    """(N, 1, H, W) -> (N, classes, H - 16, W - 16)."""

    def __init__(self, width: int = 64, classes: int = 2) -> None:
        super().__init__()
        self.down, self.bottom = Block(1, width), Block(width, 2 * width)
        self.pool, self.up = nn.MaxPool2d(2), nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.merge, self.head = Block(2 * width, width), nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skipped = self.down(x)
        x = self.up(self.bottom(self.pool(skipped)))
        return self.head(self.merge(_beside(skipped, x)))


def _beside(skipped: Tensor, x: Tensor) -> Tensor:
    """The middle of what was skipped, as large as x, and x."""
    border = (skipped.shape[-1] - x.shape[-1]) // 2
    middle = skipped[..., border : border + x.shape[-2], border : border + x.shape[-1]]
    return torch.cat([middle, x], 1)


def make(width: int = 64, classes: int = 2) -> nn.Module:
    return UNet(width, classes)
