"""Four training steps that are made of convolutions: predicted with cuDNN's own answers, and run on the dry card.

Written anew after what PyTorch users train: segmentation of volumes, the decoder of a latent diffusion model, a
classifier in half precision, and a model of raw audio.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Step = Callable[[], Any]


def _trained(model: nn.Module, data: Tensor, target: Tensor, loss: Callable[[Tensor, Tensor], Tensor]) -> Step:
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        loss(model(data), target).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _twice(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in (inputs, outputs):
        layers += [nn.Conv3d(width, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU()]
    return nn.Sequential(*layers)


class _UNet3d(nn.Module):
    """Three levels, skips joined by concatenation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second, self.third = _twice(1, width), _twice(width, 2 * width), _twice(2 * width, 4 * width)
        self.up_second = nn.ConvTranspose3d(4 * width, 2 * width, 2, 2)
        self.up_first = nn.ConvTranspose3d(2 * width, width, 2, 2)
        self.second_again, self.first_again = _twice(4 * width, 2 * width), _twice(2 * width, width)
        self.head = nn.Conv3d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (N, 1, D, H, W) -> (N, 3, D, H, W)."""
        first = self.first(x)
        second = self.second(functional.max_pool3d(first, 2))
        third = self.third(functional.max_pool3d(second, 2))
        second = self.second_again(torch.cat((self.up_second(third), second), 1))
        return self.head(self.first_again(torch.cat((self.up_first(second), first), 1)))


def unet3d() -> Step:
    """A 3D U-Net with group norms on a volume of 64 x 64 x 64."""
    data = torch.randn(1, 1, 64, 64, 64, device="cuda")
    target = torch.randint(3, (1, 64, 64, 64), device="cuda")
    return _trained(_UNet3d(16).cuda(), data, target, functional.cross_entropy)


class _Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.GroupNorm(8, inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.GroupNorm(8, outputs), nn.SiLU(), nn.Conv2d(outputs, outputs, 3, padding=1),
        )  # fmt: skip
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.skip(x) + self.body(x)


def vae_decoder() -> Step:
    """The decoder of a latent diffusion model, from 16 x 16 to 64 x 64."""
    layers: list[nn.Module] = [nn.Conv2d(4, 128, 3, padding=1)]
    for inputs, outputs in ((128, 128), (128, 64)):
        layers += [_Residual(inputs, outputs), nn.Upsample(scale_factor=2), nn.Conv2d(outputs, outputs, 3, padding=1)]
    model = nn.Sequential(*layers, nn.GroupNorm(8, 64), nn.SiLU(), nn.Conv2d(64, 3, 3, padding=1)).cuda()
    data, target = torch.randn(2, 4, 16, 16, device="cuda"), torch.randn(2, 3, 64, 64, device="cuda")
    return _trained(model, data, target, functional.mse_loss)


def half_classifier() -> Step:
    """A classifier in float16, all its weights as well."""
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((3, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride, 1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 1000)).half().cuda()
    data = torch.randn(32, 3, 224, 224, device="cuda", dtype=torch.half)
    return _trained(model, data, torch.randint(1000, (32,), device="cuda"), functional.cross_entropy)


def audio() -> Step:
    """Strided convolutions over raw audio, in one dimension."""
    layers: list[nn.Module] = []
    for inputs, outputs, kernel, stride in ((1, 64, 15, 4), (64, 128, 15, 4), (128, 256, 15, 4), (256, 256, 7, 1)):
        layers += [nn.Conv1d(inputs, outputs, kernel, stride, kernel // 2), nn.BatchNorm1d(outputs), nn.GELU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(256, 35)).cuda()
    data = torch.randn(16, 1, 65536, device="cuda")
    return _trained(model, data, torch.randint(35, (16,), device="cuda"), functional.cross_entropy)


NETWORKS: dict[str, Callable[[], Step]] = {
    step.__name__: step for step in (unet3d, vae_decoder, half_classifier, audio)
}
