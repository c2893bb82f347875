"""Training steps of one rank whose experts are sharded: tokens go to the ranks of their experts, and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models.sharded_steps import WIDTH, Feedforward
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

EXPERTS, TOKENS = 4, 256


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, received: list[int] | None, sent: list[int] | None) -> Tensor:  # type: ignore[override]
        ctx.sizes = received, sent
        result = x.new_empty(len(x) if received is None else sum(received), *x.shape[1:])
        dist.all_to_all_single(result, x, received, sent)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        received, sent = ctx.sizes
        return _Exchange.apply(gradient.contiguous(), sent, received), None, None


def _functional(x: Tensor, received: list[int] | None, sent: list[int] | None) -> Tensor:
    group: Any = dist.group.WORLD
    return all_to_all_single_autograd(x, received, sent, group)


EXCHANGES: dict[str, Callable[..., Tensor]] = {"c10d": _Exchange.apply, "functional": _functional}


class Experts(nn.Module):
    def __init__(self, exchange: str, *, dropless: bool, received: int | None) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.own = nn.ModuleList(Feedforward() for _ in range(EXPERTS // dist.get_world_size()))
        self.exchange, self.dropless, self.received = EXCHANGES[exchange], dropless, received

    def forward(self, x: Tensor) -> Tensor:
        weight, expert = self.gate(x).softmax(-1).max(-1)
        order = expert.argsort()
        sent = received = None
        if self.dropless:
            counts = torch.bincount(expert, minlength=EXPERTS)
            others = torch.empty_like(counts)
            dist.all_to_all_single(others, counts)
            sent = counts.view(dist.get_world_size(), -1).sum(1).tolist()  # what it sends
            received = others.view(dist.get_world_size(), -1).sum(1).tolist()  # what it receives
        elif self.received is not None:
            world = dist.get_world_size()
            sent, received = [TOKENS // world] * world, [self.received] * world
        tokens = self.exchange(x[order], received, sent)
        parts = [own(part) for own, part in zip(self.own, tokens.chunk(len(self.own)), strict=True)]
        back = self.exchange(torch.cat(parts), sent, received)
        return torch.empty_like(x).index_copy(0, order, back) * weight[:, None]


def line_of(text: str) -> str:
    """Return the line of this file that ends with a comment, as ``--assume`` names it."""
    lines = Path(__file__).read_text().splitlines()
    return f"expert_steps.py:{next(number for number, line in enumerate(lines, 1) if line.endswith(f'# {text}'))}"


def step_of(exchange: str, *, dropless: bool = False, received: int | None = None) -> Callable[[], Callable[[], None]]:
    """A step of two layers; without ``dropless`` each expert gets as many tokens as the others, or those of this rank
    get ``received`` from each rank."""

    def build() -> Callable[[], None]:
        dist.init_process_group()
        model = nn.Sequential(*(Experts(exchange, dropless=dropless, received=received) for _ in range(2)))
        update, tokens = torch.optim.AdamW(model.parameters()), torch.zeros(TOKENS, WIDTH)

        def step() -> None:
            model(tokens).square().mean().backward()
            update.step()
            update.zero_grad()

        return step

    return build
