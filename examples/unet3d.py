"""MONAI's residual 3D U-Net for segmentation and one step of its training.

    memplan explain examples/unet3d.py:build --arg batch=1 --arg size=128
    python examples/unet3d.py

`build` makes model, data and optimizer and returns the step; its arguments are what `--arg` sets.
"""

from collections.abc import Callable

import torch
from monai.losses.dice import DiceCELoss
from monai.networks.nets.unet import UNet
from torch import nn


def make(channels: int = 1, classes: int = 3) -> nn.Module:
    """(N, channels, D, H, W) -> (N, classes, D, H, W); D, H and W are multiples of 16."""
    return UNet(
        spatial_dims=3,
        in_channels=channels,
        out_channels=classes,
        channels=(16, 32, 64, 128, 256),
        strides=(2, 2, 2, 2),
        num_res_units=2,
        norm="batch",
    )


def build(batch: int = 2, size: int = 96) -> Callable[[], None]:
    model = make()
    criterion = DiceCELoss(to_onehot_y=True, softmax=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    volumes = torch.randn(batch, 1, size, size, size)
    labels = torch.randint(3, (batch, 1, size, size, size))

    def step() -> None:
        optimizer.zero_grad()
        loss = criterion(model(volumes), labels)
        loss.backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    import memplan

    print(memplan.explain(build))
