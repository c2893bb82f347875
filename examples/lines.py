"""Memory line by line: a function that is decorated, and what it calls.

python examples/lines.py               what it takes here, measured
memplan run examples/lines.py          the same, before it runs
"""

from __future__ import annotations

import torch
from torch import nn

import memplan


class Block(nn.Module):
    """A layer to look into."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    @memplan.profile
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        h = nn.functional.gelu(h)
        return x + self.down(h)


@memplan.profile
def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def main() -> None:
    model = nn.Sequential(*(Block(256) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        train_step(model, optimizer, torch.randn(512, 256))


if __name__ == "__main__":
    main()
