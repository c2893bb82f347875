"""A training script as people write them: arguments, loaders, mixed precision, a schedule, logs and checkpoints.

memplan run examples/train.py --batch-size 64
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    """Noisy images of 0 to 9 bright squares, made when they are asked for."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image, label = torch.randn(3, 64, 64) * 0.1, index % 10
        for number in range(label):
            image[:, 6 * number : 6 * number + 4, 30:34] += 1
        return image, label


def network(width: int) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, width), (width, 2 * width), (2 * width, 4 * width)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))


@torch.no_grad()
def accuracy(model: nn.Module, loader: DataLoader, device: torch.device) -> float:
    model.eval()
    right = sum((model(x.to(device)).argmax(1) == y.to(device)).sum().item() for x, y in loader)
    model.train()
    return right / len(loader.dataset)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path("runs/squares"))
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    given.out.mkdir(parents=True, exist_ok=True)
    train = DataLoader(Squares(10_000), given.batch_size, shuffle=True, num_workers=4)
    held_out = DataLoader(Squares(1_000), given.batch_size)
    model = network(given.width).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, given.epochs * len(train))
    best = 0.0
    for epoch in range(given.epochs):
        for x, y in train:
            with torch.autocast(device.type, torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        found = accuracy(model, held_out, device)
        print(f"epoch {epoch}: loss {loss.item():.3f}, accuracy {found:.3f}")
        with open(given.out / "log.jsonl", "a", encoding="utf-8") as log:
            log.write(json.dumps({"epoch": epoch, "accuracy": found}) + "\n")
        if found > best:
            best = found
            torch.save(model.state_dict(), given.out / "best.pt")


if __name__ == "__main__":
    main()
