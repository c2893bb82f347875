"""Self-attention twice: products and softmax written out, and torch's fused operator.

    memplan compare examples/attention.py:written_out examples/attention.py:fused --input 4x2048x512 --device h100

Both map (N, length, width) to the same shape.
"""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Attention of 8 heads."""

    def __init__(self, width: int = 512, fused: bool = True) -> None:
        super().__init__()
        self.fused = fused
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 8, -1).permute(2, 0, 3, 1, 4)
        if self.fused:
            x = F.scaled_dot_product_attention(q, k, v)
        else:
            x = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(-1) @ v
        return self.out(x.transpose(1, 2).reshape(batch, length, width))


def written_out(width: int = 512) -> nn.Module:
    return Attention(width, fused=False)


def fused(width: int = 512) -> nn.Module:
    return Attention(width)
