"""A training loop with a leak: the outputs of every step are kept.

python examples/watched.py
"""

import torch
from torch import nn
from torch.nn import functional as F

import memplan


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    outputs = []
    with memplan.watch(model, optimizer, quiet=True) as seen:
        for _ in range(6):
            images, labels = torch.randn(128, 256), torch.randint(0, 10, (128,))
            output = model(images)
            loss = F.cross_entropy(output, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            outputs.append(output)
    print(seen)
    print()
    for row in seen.rows:
        print(f"step {row.step}: peak {row.peak}, predicted {row.predicted}, held {row.held}")


if __name__ == "__main__":
    main()
