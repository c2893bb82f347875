"""Steps that `torch.compile` compiles, in the ways that scripts do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import torch
from models.decoders import Decoder
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Build = Callable[[], Callable[[], None]]
Compile = Callable[[Any], Any]


class Feedforward(nn.Module):
    """Fused between its two products: `(batch, 64)` to `(batch, 64)`."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(64, 128), nn.LayerNorm(128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.norm(self.up(x)))).relu()


class Checkpointed(Decoder):
    """Its layer runs again in the backward pass, dropout with it."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(checkpoint(self.layer, self.embedding(tokens), use_reentrant=False))


class Broken(Feedforward):
    """Dynamo ends its graph in the middle."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.up(x))
        torch._dynamo.graph_break()  # pyright: ignore[reportAttributeAccessIssue]
        return self.down(F.gelu(y))


def loss_of(output: Tensor) -> Tensor:
    return output.float().square().mean()


def batches(*lengths: int) -> Iterator[Tensor]:
    return (torch.zeros(4, length, dtype=torch.int64) for length in cycle(lengths))


def vectors() -> Iterator[Tensor]:
    while True:
        yield torch.randn(256, 64)


def step_of(
    make: Callable[[], nn.Module],
    inputs: Callable[[], Iterator[Tensor]],
    compiled: Compile = torch.compile,
) -> Build:
    """A training step of a compiled model."""

    def build() -> Callable[[], None]:
        model = make()
        call, update, data = compiled(model), torch.optim.AdamW(model.parameters()), inputs()

        def step() -> None:
            update.zero_grad()
            loss_of(call(next(data))).backward()
            update.step()

        return step

    return build


def with_the_loss() -> Callable[[], None]:
    """A compiled function of model and loss, and a compiled update."""
    model, data = Decoder(), batches(32)
    update = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss, updated = torch.compile(lambda tokens: loss_of(model(tokens))), torch.compile(update.step)

    def step() -> None:
        update.zero_grad()
        loss(next(data)).backward()
        updated()

    return step


def under_autocast() -> Callable[[], None]:
    """A compiled model under autocast, from outside of it."""
    model, data = Decoder(), batches(32)
    call, update = torch.compile(model), torch.optim.AdamW(model.parameters())

    def step() -> None:
        update.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(call(next(data)))
        loss.backward()
        update.step()

    return step


def by_method(model: nn.Module) -> nn.Module:
    """`nn.Module.compile`, which leaves the module what it is."""
    model.compile()
    return model


STEPS: dict[str, Build] = {
    "model": step_of(Feedforward, vectors),
    "decoder": step_of(Decoder, lambda: batches(32)),
    "lengths": step_of(Decoder, lambda: batches(32, 48, 16)),
    "checkpointed": step_of(Checkpointed, lambda: batches(32)),
    "graph break": step_of(Broken, vectors),
    "method": step_of(Feedforward, vectors, by_method),
    "with the loss": with_the_loss,
    "autocast": under_autocast,
}
