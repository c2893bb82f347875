"""One network, many optimizers: it is mostly weights, so that state and temporaries of the update show."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from .registry import Build, Step, training, zoo

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=1e-4, nesterov=True),
    "sgd_foreach": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, foreach=True),
    "adam": lambda p: torch.optim.Adam(p),
    "adam_amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True, weight_decay=1e-4),
    "adam_foreach": lambda p: torch.optim.Adam(p, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p),
    "adamw_fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p),
}


def build_with(make: Callable[..., torch.optim.Optimizer]) -> Step:
    """Linear layers of several shapes, a convolution and a normalization: 16 million weights."""
    model = nn.Sequential(
        nn.Conv1d(16, 32, 3, padding=1), nn.Flatten(), nn.Linear(2048, 3072), nn.LayerNorm(3072), nn.ReLU(),
        nn.Linear(3072, 2048), nn.GELU(), nn.Linear(2048, 1536), nn.Tanh(), nn.Linear(1536, 100),
    )  # fmt: skip
    inputs, targets = torch.randn(64, 16, 64), torch.randint(100, (64,))
    return training(model, make(model.parameters()), F.cross_entropy, (inputs,), (targets,))


def named(name: str, make: Callable[..., torch.optim.Optimizer]) -> Build:
    def build() -> Step:
        return build_with(make)

    build.__name__ = f"optimizer_{name}"
    return build


for _name, _make in OPTIMIZERS.items():
    zoo(named(_name, _make))
