import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Fly(IterableDataset):
    def __iter__(self):
        while True:
            t = torch.linspace(0, 6.28, 256)
            f = torch.rand(4)
            yield torch.stack([torch.sin(f[i] * t) for i in range(4)]).sum(0, keepdim=True), f


net = nn.Sequential(
    nn.Conv1d(1, 32, 9, padding=4),
    nn.ReLU(),
    nn.Conv1d(32, 64, 9, stride=4),
    nn.ReLU(),
    nn.AdaptiveAvgPool1d(1),
    nn.Flatten(),
    nn.Linear(64, 4),
)
opt = torch.optim.RMSprop(net.parameters(), 1e-3)
best = float("inf")
for i, (x, y) in enumerate(DataLoader(Fly(), batch_size=32, num_workers=2)):
    loss = ((net(x) - y) ** 2).mean()
    if loss.item() < best:
        best = loss.item()
    loss.backward()
    opt.step()
    opt.zero_grad()
    if i == 2000:
        break
