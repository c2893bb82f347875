"""A transformer cut into three stages, as for a pipeline of three GPUs: the step of each rank.

    memplan explain examples/stages.py:build --arg rank=0 --device rtx4090 --json rank0.json
    memplan report rank0.json rank1.json rank2.json --html ranks.html

The first rank holds the embedding, the last one the logits of every word; gradients between ranks are given, as a
pipeline would receive them. One micro-batch is in flight.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WORDS, WIDTH, LENGTH, RANKS = 32000, 768, 512, 3


class Stage(nn.Module):
    """(N, length) words or (N, length, width) from the rank before -> the same for the rank after, or logits."""

    def __init__(self, rank: int, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH) if rank == 0 else None
        layers = (nn.TransformerEncoderLayer(WIDTH, 12, 4 * WIDTH, 0.0, batch_first=True) for _ in range(blocks))
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(WIDTH, WORDS) if rank == RANKS - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(x if self.embed is None else self.embed(x))
        return x if self.head is None else self.head(x)


def build(rank: int = 0, batch: int = 8) -> Callable[[], None]:
    model = Stage(rank)
    optimizer = torch.optim.AdamW(model.parameters())
    words = torch.randint(WORDS, (batch, LENGTH))

    def step() -> None:
        received = words if rank == 0 else torch.randn(batch, LENGTH, WIDTH, requires_grad=True)
        out = model(received)
        if rank == RANKS - 1:
            F.cross_entropy(out.flatten(0, 1), words.flatten()).backward()
        else:
            out.backward(torch.randn_like(out))  # the gradient that the next rank sends
        optimizer.step()
        optimizer.zero_grad()

    return step
