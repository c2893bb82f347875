"""Linear layers with sigmoids between them, all trained or all but the last one frozen.

memplan explain examples/gates.py:make --input 256x1024
memplan compare examples/gates.py:make --b arg=frozen=True --input 256x1024
"""

from __future__ import annotations

from torch import nn


def make(frozen: bool = False) -> nn.Module:
    model = nn.Sequential(
        nn.Linear(1024, 1024),
        nn.Sigmoid(),
        nn.Linear(1024, 1024),
        nn.Sigmoid(),
        nn.Linear(1024, 10),
    )
    model[:-1].requires_grad_(not frozen)
    return model
