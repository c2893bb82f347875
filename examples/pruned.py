"""A network as it is, pruned to half by zeros, and with half of its channels.

memplan compare examples/pruned.py:make examples/pruned.py:zeros --input 32x3x64x64
memplan compare examples/pruned.py:make examples/pruned.py:narrow --input 32x3x64x64
"""

from __future__ import annotations

from torch import nn
from torch.nn.utils import prune


def make(width: int = 64) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, 10),
    )


def zeros() -> nn.Module:
    model = make()
    prune.l1_unstructured(model[2], "weight", amount=0.5)
    return model


def narrow() -> nn.Module:
    return make(32)
