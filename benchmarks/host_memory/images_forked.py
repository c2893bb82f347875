"""Images of a data set that makes them, by two forked workers, each three batches ahead."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    """Images that are made anew each time."""

    def __len__(self):
        return 640

    def __getitem__(self, number):
        return torch.full((3, 160, 160), number / 640), number % 10


net = nn.Sequential(nn.AvgPool2d(16), nn.Flatten(), nn.Linear(300, 10))
optimizer = torch.optim.SGD(net.parameters(), 0.01)
for images, labels in DataLoader(Images(), 64, shuffle=True, num_workers=2, prefetch_factor=3):
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(images), labels).backward()
    optimizer.step()
