"""Ways to use `DistributedDataParallel` and `fully_shard`, right and wrong, in a fake group or among ranks of gloo."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

WIDTH = 16


class Branches(nn.Module):
    """Two layers of which ``way`` may leave the second out."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.second, self.way = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), way

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.way == "unused":
            return x
        if self.way == "dropped at random" and random.random() < 1e-9:
            return x
        if self.way == "dropped by value" and x.sum() < -1e9:
            return x
        return self.second(x)


def data_parallel(way: str) -> Callable[[], Callable[[], None]]:
    """A step that accumulates two micro-batches, or has one; ``way`` says how."""

    def build() -> Callable[[], None]:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        torch.manual_seed(0)
        model = DistributedDataParallel(Branches(way), find_unused_parameters="search" in way or way in SEARCHES)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = torch.ones(4, WIDTH) * (dist.get_rank() + 1)

        def step() -> None:
            passes = 2 if "twice" in way else 1
            for number in range(passes):
                last = number == passes - 1
                quiet: Any = model.no_sync() if "no_sync" in way and not last else contextlib.nullcontext()
                with quiet:
                    model(batch).sum().backward()
                if "zeroed between" in way and not last:
                    optimizer.zero_grad(set_to_none="to none" in way)
            if "by hand" in way:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
            if "norm" in way:
                norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
                dist.all_reduce(norm)
            optimizer.step()
            optimizer.zero_grad()

        return step

    return build


SEARCHES = ("unused", "dropped at random", "dropped by value")


def without_wrapper() -> Callable[[], None]:
    """Gradients that are reduced by hand, once."""
    dist.init_process_group("gloo")
    model = Branches("")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(4, WIDTH)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()

    return step


class Block(nn.Module):
    def __init__(self, *, view: bool) -> None:
        super().__init__()
        self.up, self.down, self.view = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), view

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.relu(self.up(x)))
        return y.view(-1, 4, 4).view(x.shape) if self.view else y


class Residual(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(view="view" in way) for _ in range(3))
        self.head, self.way = nn.Linear(WIDTH, 1), way

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y = block(x)
            if "in place" in self.way:
                y += x
                x = y
            else:
                x = y + x
        return self.head(x)


def shard(model: Residual) -> None:
    for block in model.blocks:
        fully_shard(block, reshard_after_forward="kept" not in model.way)
    fully_shard(model)


def sharded_step(way: str) -> Callable[[], Callable[[], None]]:
    def build() -> Callable[[], None]:
        dist.init_process_group("gloo")
        model = Residual(way)
        shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step() -> None:
            model(torch.ones(8, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return build
