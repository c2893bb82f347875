"""Small models that take batches of any length."""

from __future__ import annotations

import torch
from torch import nn


class Decoder(nn.Module):
    """A transformer's layer between an embedding and a head: tokens `(batch, length)` in, 257 scores of each out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(257, 64)
        self.layer = nn.TransformerEncoderLayer(64, 4, 192, dropout=0.1, batch_first=True)
        self.head = nn.Linear(64, 257)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embedding(tokens)))
