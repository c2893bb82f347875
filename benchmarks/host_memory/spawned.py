"""Tensors of a data set, by two spawned workers, which import torch again."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    data = TensorDataset(torch.randn(1200, 3, 64, 64), torch.randint(0, 10, (1200,)))
    net = nn.Sequential(nn.Flatten(), nn.Linear(12288, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.Adam(net.parameters())
    for images, labels in DataLoader(data, 100, num_workers=2, multiprocessing_context="spawn"):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(images), labels).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
