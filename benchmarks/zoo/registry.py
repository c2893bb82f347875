"""The registry of the zoo, and the two loops most of its steps share."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Step = Callable[[], None]
Build = Callable[[], Step]

ZOO: dict[str, Build] = {}


def zoo(build: Build) -> Build:
    """Enter `build` under its own name; its random numbers start from the same seed every time."""

    @functools.wraps(build)
    def seeded() -> Step:
        torch.manual_seed(0)
        return build()

    ZOO[build.__name__] = seeded
    return seeded


def training(
    model: Callable[..., Any],
    optimizer: torch.optim.Optimizer,
    loss: Callable[..., Tensor],
    inputs: tuple[Any, ...],
    targets: tuple[Tensor, ...],
) -> Step:
    """The loop as most people write it: output and loss are local names, alive until the step ends."""

    def step() -> None:
        optimizer.zero_grad()
        output = model(*inputs)
        value = loss(output, *targets)
        value.backward()
        optimizer.step()

    return step


def training_with_labels(model: nn.Module, optimizer: torch.optim.Optimizer, **inputs: Tensor) -> Step:
    """The loop of a transformers model, which computes its own loss from `labels`."""

    def step() -> None:
        optimizer.zero_grad()
        output = model(**inputs)
        output.loss.backward()
        optimizer.step()

    return step
