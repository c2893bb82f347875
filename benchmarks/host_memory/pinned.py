"""Pinned batches for a card, of two forked workers; a batch of 36.75 MiB takes blocks of 64 MiB."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    """Images that are made anew each time."""

    def __len__(self):
        return 640

    def __getitem__(self, number):
        return torch.full((3, 224, 224), number / 640), number % 10


net = nn.Linear(224, 10).to("cuda")
optimizer = torch.optim.SGD(net.parameters(), 0.01)
for images, labels in DataLoader(Images(), 64, num_workers=2, pin_memory=True):
    rows = images[:, 0, 0].contiguous().to("cuda", non_blocking=True)
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(rows), labels.to("cuda", non_blocking=True)).backward()
    optimizer.step()
