"""Validation after each update, with a batch of its own, and an average of the weights."""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16),
    nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
)  # fmt: skip
average = copy.deepcopy(model).requires_grad_(False)
train = DataLoader(TensorDataset(torch.randn(96, 3, 32, 32), torch.randint(0, 10, (96,))), batch_size=32)
valid = DataLoader(TensorDataset(torch.randn(96, 3, 32, 32), torch.randint(0, 10, (96,))), batch_size=48)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for _ in range(2):
    for images, labels in train:
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        model.eval()
        with torch.no_grad():
            right = sum((model(images).argmax(1) == labels).sum() for images, labels in valid)
        model.train()
        print(loss.item(), int(right))
