"""A model that is called twice before one backward pass, as with pairs."""

import torch
from torch import nn
from torch.nn import functional as F


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(6)))

    def forward(self, x):
        return F.normalize(self.body(x), dim=-1)


torch.manual_seed(0)
model = Encoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(4):
    first, second = model(torch.randn(1024, 128)), model(torch.randn(1024, 128))
    loss = -(first * second).sum(-1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
