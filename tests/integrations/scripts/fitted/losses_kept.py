"""A list of losses with their graphs, added up for a log."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.LayerNorm(256)) for _ in range(4)]
model = nn.Sequential(*layers, nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for _ in range(4):
    images, labels = torch.randn(1024, 256), torch.randint(0, 10, (1024,))
    loss = F.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss)
print(sum(losses) / len(losses))
