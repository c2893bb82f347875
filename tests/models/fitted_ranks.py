"""Fitted models trained by two real ranks of gloo, beside the same model that is not fitted."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models.sharded_steps import LOWER, VOCABULARY, WIDTH, Transformer, sharded
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from truth.cpu_allocator import allocations, peak_of

import memplan

LENGTH = 64


def loss_of(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), labels.flatten())


def fitted_whole(model: Transformer, tokens: Tensor, labels: Tensor) -> list[memplan.Fitted]:
    """Fit model and loss; each rank to another budget, as ranks need not have the same plan."""
    budget = "75%" if dist.get_rank() == 0 else "80%"
    return [memplan.fit(model, tokens, targets=labels, loss=loss_of, budget=budget, pairs=0)]


def fitted_blocks(model: Transformer, tokens: Tensor, labels: Tensor) -> list[memplan.Fitted]:
    """Fit each block alone, by one plan."""
    hidden = torch.randn(*tokens.shape, WIDTH, requires_grad=True)
    first, *others = model.blocks
    fitted = [memplan.fit(first, hidden, budget="75%", pairs=0)]
    return fitted + [memplan.fit(block, hidden, budget="75%", plan=fitted[0].plan, pairs=0) for block in others]


Fit = Callable[[Transformer, Tensor, Tensor], list[memplan.Fitted]]
WAYS: dict[str, tuple[Fit, Callable[[Transformer], Any]]] = {
    "DDP": (fitted_whole, DistributedDataParallel),
    "DDP with views": (fitted_whole, lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True)),
    "DDP of blocks": (fitted_blocks, DistributedDataParallel),
    "FSDP of the whole": (fitted_whole, lambda model: fully_shard(model)),
    "FSDP of blocks": (fitted_blocks, sharded),
    "FSDP of blocks in bfloat16": (fitted_blocks, lambda model: sharded(model, mp_policy=LOWER)),
}


def trained(rank: int, store: str, way: str, results: str) -> None:
    """Train both models for three steps, and write whether all gradients were equal, the peaks and the calls."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = Transformer()
    twin = copy.deepcopy(model)
    torch.manual_seed(rank + 1)
    tokens, labels = torch.randint(0, VOCABULARY, (2, 8, LENGTH))
    fit, wrap = WAYS[way]
    fitted = fit(model, tokens, labels)
    (peak, gradients), (unfitted, others) = (_steps(wrap(one), tokens, labels) for one in (model, twin))
    equal = all(torch.equal(a, b) for a, b in zip(gradients, others, strict=True))
    stats = [one.stats for one in fitted]
    Path(results, str(rank)).write_text(
        json.dumps([equal, peak, unfitted, sum(one.planned for one in stats), sum(one.unplanned for one in stats)])
    )
    dist.destroy_process_group()


def _steps(model: Any, tokens: Tensor, labels: Tensor) -> tuple[int, list[Tensor]]:
    """Return the peak of a third step, in bytes above what it begins with, and the gradients of all three."""
    update = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients: list[Tensor] = []
    peak = 0

    def step() -> None:
        loss_of(model(tokens), labels).backward()

    for number in range(3):
        if number < 2:
            step()
        else:
            peak = peak_of(allocations(step))
        gradients += [getattr(p.grad, "_local_tensor", p.grad).clone() for p in model.parameters()]
        update.step()
        update.zero_grad()
    return peak, gradients
