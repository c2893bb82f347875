"""A U-Net whose encoder reaches its decoder by skip connections."""

from __future__ import annotations

import torch
from torch import nn


class Levels(nn.Module):
    """A U-Net of three levels."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(*pair, 3, padding=1) for pair in ((1, 8), (8, 8), (8, 8)))
        self.up = nn.ModuleList(nn.ConvTranspose2d(8, 8, 2, 2) for _ in range(2))
        self.join = nn.ModuleList(nn.Conv2d(16, 8, 3, padding=1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean square of the features of the first level."""
        first = nn.functional.leaky_relu(self.down[0](x).view(x.shape[0], 8, *x.shape[2:]), inplace=True)
        second = torch.sigmoid(self.down[1](nn.functional.avg_pool2d(first, 2)))
        third = self.down[2](nn.functional.avg_pool2d(second, 2))
        second = self.join[1](torch.cat((second, self.up[1](third)), 1))
        return self.join[0](torch.cat((first, self.up[0](second)), 1)).square().mean()
