"""Networks of the frontier benchmark in plain PyTorch: ResNet-50, DenseNet, ViT and GPT."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 beside a shortcut: (N, inputs, H, W) -> (N, 4 * width, H / stride, W / stride)."""

    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn3(self.conv3(self.relu(self.bn2(self.conv2(out)))))
        return self.relu(out + self.shortcut(x))


class ResNet50(nn.Sequential):
    """He et al. 2015, arXiv:1512.03385: (N, 3, H, W) -> (N, 1000). A stem, 16 blocks and a head."""

    def __init__(self) -> None:
        stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        blocks: list[nn.Module] = []
        inputs = 64
        for stage, (width, count) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
            for index in range(count):
                blocks.append(Bottleneck(inputs, width, 2 if stage and not index else 1))
                inputs = 4 * width
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))
        super().__init__(stem, *blocks, head)


class DenseLayer(nn.Module):
    """Adds `growth` channels to what it is given: (N, C, H, W) -> (N, C + growth, H, W)."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, 4 * growth, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(4 * growth), nn.Conv2d(4 * growth, growth, 3, 1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv1(F.relu(self.norm1(x), inplace=True))
        out = self.conv2(F.relu(self.norm2(out), inplace=True))
        return torch.cat((x, out), 1)


class DenseNet(nn.Sequential):
    """Huang et al. 2016, arXiv:1608.06993, with few channels: a stem, dense blocks with transitions between, a head."""

    def __init__(self, depths: tuple[int, ...], growth: int, channels: int, classes: int) -> None:
        parts: list[nn.Module] = [
            nn.Sequential(
                nn.Conv2d(3, channels, 7, 2, 3, bias=False),
                nn.BatchNorm2d(channels),
                nn.ReLU(inplace=True),
                nn.MaxPool2d(3, 2, 1),
            )
        ]
        for index, depth in enumerate(depths):
            parts.append(nn.Sequential(*[DenseLayer(channels + growth * layer, growth) for layer in range(depth)]))
            channels += growth * depth
            norm = (nn.BatchNorm2d(channels), nn.ReLU(inplace=True))
            if index < len(depths) - 1:
                half = channels // 2
                parts.append(nn.Sequential(*norm, nn.Conv2d(channels, half, 1, bias=False), nn.AvgPool2d(2)))
                channels = half
            else:
                pool = (nn.AdaptiveAvgPool2d(1), nn.Flatten())
                parts.append(nn.Sequential(*norm, *pool, nn.Linear(channels, classes)))
        super().__init__(*parts)


class Attention(nn.Module):
    """Self-attention: (N, L, width) -> the same."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.project(out.transpose(1, 2).reshape(batch, length, width))


class TransformerBlock(nn.Module):
    """Attention and a feed-forward of four times the width, norms first, dropout on both branches."""

    def __init__(self, width: int, heads: int, *, causal: bool, dropout: float) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads, causal)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Embedding(nn.Module):
    """Tokens and their positions: (N, L) -> (N, L, width)."""

    def __init__(self, vocabulary: int, length: int, width: int, dropout: float) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        return self.dropout(self.tokens(ids) + self.positions(places))


class Gpt(nn.Sequential):
    """A decoder with an output layer of its own: (N, L) -> (N, L, vocabulary)."""

    def __init__(self, layers: int, width: int, vocabulary: int, length: int, dropout: float) -> None:
        super().__init__(
            Embedding(vocabulary, length, width, dropout),
            *[TransformerBlock(width, width // 64, causal=True, dropout=dropout) for _ in range(layers)],
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)),
        )


class Patches(nn.Module):
    """Patches of 16 x 16 pixels, a class token and positions: (N, 3, size, size) -> (N, 1 + patches, width)."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, (size // 16) ** 2 + 1, width))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        return torch.cat((self.token.expand(len(x), -1, -1), x), 1) + self.position


class Classifier(nn.Module):
    """Classes from the first token: (N, L, width) -> (N, 1000)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x)[:, 0])


class VisionTransformer(nn.Sequential):
    """Dosovitskiy et al. 2020, arXiv:2010.11929; 12 layers of 384 with 6 heads are its small one."""

    def __init__(self, layers: int = 12, width: int = 384, size: int = 224) -> None:
        blocks = [TransformerBlock(width, width // 64, causal=False, dropout=0.0) for _ in range(layers)]
        super().__init__(Patches(size, width), *blocks, Classifier(width))
