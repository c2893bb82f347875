"""Small networks of the kinds that run on microcontrollers: the four of MLPerf Tiny, and others beside them."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import nn


class Residual(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1)
        self.first_norm = nn.BatchNorm2d(after)
        self.second = nn.Conv2d(after, after, 3, 1, 1)
        self.second_norm = nn.BatchNorm2d(after)
        self.short = nn.Conv2d(before, after, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.first_norm(self.first(x)))
        return torch.relu(self.second_norm(self.second(y)) + self.short(x))


def normed(before: int, after: int, kernel: int, stride: int = 1, groups: int = 1, act: bool = True) -> nn.Sequential:
    layers = [nn.Conv2d(before, after, kernel, stride, kernel // 2, groups=groups, bias=False), nn.BatchNorm2d(after)]
    return nn.Sequential(*layers, nn.ReLU6()) if act else nn.Sequential(*layers)


class Inverted(nn.Module):
    def __init__(self, before: int, after: int, stride: int, expand: int) -> None:
        super().__init__()
        wide = before * expand
        first = [] if expand == 1 else [normed(before, wide, 1)]
        self.layers = nn.Sequential(
            *first, normed(wide, wide, 3, stride, groups=wide), normed(wide, after, 1, act=False)
        )
        self.adds = stride == 1 and before == after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x) if self.adds else self.layers(x)


class Gru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(6, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.new_zeros(x.shape[0], 16)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        return self.head(h)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, 16), nn.Embedding(12, 16)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, activation="gelu") for _ in range(2)
        )
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.words(x) + self.places(torch.arange(x.shape[1]))
        for layer in self.layers:
            h = layer(h)
        return self.head(h.mean(1))


class Segmenter(nn.Module):
    """A small U-Net: what went down is concatenated to what comes up."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = normed(1, 6, 3), normed(6, 12, 3, 2)
        self.up = nn.ConvTranspose2d(12, 6, 2, 2)
        self.last, self.head = normed(12, 6, 3), nn.Conv2d(6, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.head(self.last(torch.cat([y, self.up(self.second(y))], 1)))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def autoencoder() -> nn.Module:
    widths = [640, 128, 128, 128, 128, 8, 128, 128, 128, 128]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(128, 640))


def resnet8() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU(), Residual(16, 16, 1), Residual(16, 32, 2),
        Residual(32, 64, 2), nn.AvgPool2d(8), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def ds_cnn() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(1, 64, (10, 4), 2, (4, 1)), nn.BatchNorm2d(64), nn.ReLU(), nn.Dropout(0.2)]
    for _ in range(4):
        layers += [nn.Conv2d(64, 64, 3, 1, 1, groups=64), nn.BatchNorm2d(64), nn.ReLU()]
        layers += [nn.Conv2d(64, 64, 1), nn.BatchNorm2d(64), nn.ReLU()]
    return nn.Sequential(*layers, nn.Dropout(0.4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 12))


def mobilenet_v1() -> nn.Module:
    """MobileNetV1 0.25 of MLPerf Tiny's visual wake words."""
    plan = [(8, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2)]
    plan += [(128, 128, 1)] * 5 + [(128, 256, 2), (256, 256, 1)]
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    for before, after, stride in plan:
        layers += [nn.Conv2d(before, before, 3, stride, 1, groups=before, bias=False), nn.BatchNorm2d(before)]
        layers += [nn.ReLU(), nn.Conv2d(before, after, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 2))


def mobilenet_v2() -> nn.Module:
    """Width 0.35, for images of 96 x 96."""
    plan = [(1, 8, 1, 1), (6, 8, 2, 2), (6, 16, 3, 2), (6, 24, 4, 2), (6, 32, 3, 1), (6, 56, 3, 2), (6, 112, 1, 1)]
    layers: list[nn.Module] = [normed(3, 16, 3, 2)]
    before = 16
    for expand, after, count, stride in plan:
        for at in range(count):
            layers.append(Inverted(before, after, stride if at == 0 else 1, expand))
            before = after
    layers.append(normed(112, 1280, 1))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, 2))


def sensor_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(3, 16, 5, 2, 2), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 32, 5, 2, 2), nn.GroupNorm(4, 32),
        nn.SiLU(), nn.MaxPool1d(2), nn.Conv1d(32, 32, 3, 1, 2, dilation=2), nn.GELU(), nn.AdaptiveAvgPool1d(1),
        nn.Flatten(), nn.Linear(32, 6),
    )  # fmt: skip


def denoiser() -> nn.Module:
    """Convolutions down, and transposed ones up again."""
    return nn.Sequential(
        nn.ReflectionPad2d(1), nn.Conv2d(1, 8, 3, 2), nn.LeakyReLU(), nn.Conv2d(8, 12, 3, 2, 1), nn.ELU(),
        nn.ConvTranspose2d(12, 8, 4, 2, 1), nn.LayerNorm([8, 8, 8]), nn.Hardswish(),
        nn.ConvTranspose2d(8, 1, 2, 2), nn.Sigmoid(),
    )  # fmt: skip


Network = tuple[Callable[[], nn.Module], tuple[str, ...], tuple[str, ...], str]
"""What makes it, its inputs, its targets, its loss."""

NETWORKS: dict[str, Network] = {
    "mlp": (mlp, ("1x12",), ("1:int64<4",), "cross_entropy"),
    "lenet": (lenet, ("1x1x28x28",), ("1:int64<10",), "cross_entropy"),
    "autoencoder": (autoencoder, ("1x640",), ("1x640",), "mse_loss"),
    "resnet8": (resnet8, ("1x3x32x32",), ("1:int64<10",), "cross_entropy"),
    "ds_cnn": (ds_cnn, ("1x1x49x10",), ("1:int64<12",), "cross_entropy"),
    "mobilenet_v1": (mobilenet_v1, ("1x3x96x96",), ("1:int64<2",), "cross_entropy"),
    "mobilenet_v2": (mobilenet_v2, ("1x3x96x96",), ("1:int64<2",), "cross_entropy"),
    "sensor_cnn": (sensor_cnn, ("1x3x64",), ("1:int64<6",), "cross_entropy"),
    "gru": (Gru, ("1x8x6",), ("1:int64<4",), "cross_entropy"),
    "transformer": (Transformer, ("1x12:int64<50",), ("1:int64<5",), "cross_entropy"),
    "segmenter": (Segmenter, ("1x1x16x16",), ("1x16x16:int64<3",), "cross_entropy"),
    "denoiser": (denoiser, ("1x1x16x16",), ("1x1x16x16",), "mse_loss"),
}
