"""Numpy's arrays that forked workers read, and a validation whose predictions are gathered."""

import numpy
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Volumes(Dataset):
    """Volumes that lie in one array."""

    def __init__(self, count):
        self.volumes = numpy.ones((count, 1, 48, 48, 48), dtype=numpy.float32)

    def __len__(self):
        return len(self.volumes)

    def __getitem__(self, number):
        return torch.from_numpy(self.volumes[number]).clone()


net = nn.Conv3d(1, 4, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.01)
train = DataLoader(Volumes(240), 16, shuffle=True, num_workers=2, persistent_workers=True)
val = DataLoader(Volumes(160), 16, num_workers=1)
for _ in range(2):
    for volumes in train:
        optimizer.zero_grad()
        net(volumes).square().mean().backward()
        optimizer.step()
predictions = []
with torch.no_grad():
    for volumes in val:
        predictions.append(net(volumes))
print(torch.cat(predictions).mean())
