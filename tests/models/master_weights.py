"""A training of bfloat16 weights by float32 master weights, as people write it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Held:
    """Master weights as people write them: float32 copies in the optimizer, and copied back."""

    def __init__(self, model: nn.Module, kind: type[torch.optim.Optimizer], **options: Any) -> None:
        self.model = list(model.parameters())
        self.masters = [p if p.dtype == torch.float32 else nn.Parameter(p.detach().float()) for p in self.model]
        self.optimizer = kind(self.masters, **options)

    def step(self) -> None:
        for parameter, master in zip(self.model, self.masters, strict=True):
            if master is not parameter:
                master.grad = None if parameter.grad is None else parameter.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(self.model, self.masters, strict=True):
                parameter.copy_(master)
