"""Small networks that have what makes a plan hard: norms, dropout, attention, tied weights, in-place ReLUs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Residual(nn.Module):
    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.short = nn.Identity() if stride == 1 and width == out else nn.Conv2d(width, out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        return self.relu(self.norm2(self.conv2(y)) + self.short(x))


class SmallResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.blocks = nn.Sequential(Residual(8, 8, 1), Residual(8, 16, 2), Residual(16, 16, 1))
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.blocks(self.pool(self.stem(x).relu())).mean((2, 3))))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, p: float) -> None:
        super().__init__()
        self.heads, self.p = heads, p
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(p))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.p if self.training else 0.0)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class SmallGPT(nn.Module):
    def __init__(self, layers: int = 3, width: int = 32, p: float = 0.1) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(40, width), nn.Embedding(64, width)
        self.drop = nn.Dropout(p)
        self.layers = nn.ModuleList(Layer(width, 4, p) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.embed(tokens) + self.place(torch.arange(tokens.shape[1])))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def conv_norms(dims: int, *norms: nn.Module, channels: int = 4) -> nn.Sequential:
    """Convolution, norm and tanh, for each of the norms."""
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    layers = [part for one in norms for part in (conv(channels, channels, 3, padding=1), one, nn.Tanh())]
    return nn.Sequential(*layers)


class SharedNorm(nn.Module):
    """One norm, twice in a step: its running statistics are updated twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(torch.tanh(self.norm(x)))))


NORMED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "images": (lambda: conv_norms(2, nn.BatchNorm2d(4), nn.BatchNorm2d(4)), (3, 4, 9, 9)),
    "sequences": (lambda: conv_norms(1, nn.BatchNorm1d(4), nn.BatchNorm1d(4)), (9, 4, 17)),
    "volumes": (lambda: conv_norms(3, nn.BatchNorm3d(4), nn.BatchNorm3d(4)), (2, 4, 5, 6, 7)),
    "rows": (lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)), (200, 4)),
    "no running statistics": (lambda: conv_norms(2, nn.BatchNorm2d(4, track_running_stats=False)), (3, 4, 9, 9)),
    "no weight": (lambda: conv_norms(2, nn.BatchNorm2d(4, affine=False)), (3, 4, 9, 9)),
    "instances": (lambda: conv_norms(2, nn.InstanceNorm2d(4, affine=True), nn.InstanceNorm2d(4)), (3, 4, 9, 9)),
    "one norm twice": (SharedNorm, (3, 4, 9, 9)),
    "a frozen weight": (lambda: conv_norms(2, nn.BatchNorm2d(4).requires_grad_(False)), (3, 4, 9, 9)),
}
"""Models with training batch norms of every kind, and the shapes of their inputs."""
