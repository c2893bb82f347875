"""The outputs of the last two steps stay alive for a metric."""

from collections import deque

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
outputs = deque(maxlen=2)
for _ in range(4):
    out = model(torch.randn(512, 64))
    outputs.append(out)
    loss = F.mse_loss(out, torch.randn(512, 512))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(torch.stack([one.detach().mean() for one in outputs]).mean().item())
