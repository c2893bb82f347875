"""Fitted models trained by two real ranks of gloo, beside the same model that is not fitted."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models.sharded_steps import LOWER, VOCABULARY, WIDTH, Transformer, in_tensors, in_two, mesh_of, sharded
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


def fitted_shards(model: Any, tokens: Tensor, labels: Tensor) -> list[memplan.Fitted]:
    """Fit a model that is sharded already."""
    return [memplan.fit(model, tokens, targets=labels, loss=loss_of, budget="78%", pairs=0)]


Fit = Callable[[Any, Tensor, Tensor], list[memplan.Fitted]]
WAYS: dict[str, tuple[Fit, Callable[[Transformer], Any]]] = {
    "DDP": (fitted_whole, DistributedDataParallel),
    "DDP with views": (fitted_whole, lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True)),
    "DDP of blocks": (fitted_blocks, DistributedDataParallel),
    "FSDP of the whole": (fitted_whole, lambda model: fully_shard(model)),
    "FSDP of blocks": (fitted_blocks, sharded),
    "FSDP of blocks in bfloat16": (fitted_blocks, lambda model: sharded(model, mp_policy=LOWER)),
    "FSDP, then fitted": (fitted_shards, sharded),
    "FSDP kept, then fitted": (fitted_shards, lambda model: sharded(model, reshard_after_forward=False)),
    "FSDP in bfloat16, then fitted": (fitted_shards, lambda model: sharded(model, mp_policy=LOWER)),
    "FSDP of the whole, then fitted": (fitted_shards, lambda model: fully_shard(model)),
    "tensor parallel, then fitted": (fitted_shards, lambda model: in_tensors(model, mesh_of(2, names=("tensor",)))),
    "tensor parallel and FSDP, then fitted": (fitted_shards, in_two),
}


def trained(rank: int, ways: tuple[str, ...], folder: str, world: int = 2) -> None:
    """Train both models of each way, and write what `_compared` returns to a file named by way and rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    for way in ways:
        Path(folder, f"{way}.{rank}").write_text(json.dumps(_compared(rank, way)))
    dist.destroy_process_group()


def _compared(rank: int, way: str) -> dict[str, Any]:
    """Train both models for three steps, and return whether all gradients were equal, the peaks, the calls and whether
    the collective operations were the same."""
    torch.manual_seed(0)
    model = Transformer()
    twin = copy.deepcopy(model)
    torch.manual_seed(1 if "tensor" in way else rank + 1)  # tensor-parallel ranks share a batch
    tokens, labels = torch.randint(0, VOCABULARY, (2, 8, LENGTH))
    fit, wrap = WAYS[way]
    later = way.endswith("then fitted")
    wrapped = wrap(model) if later else None
    fitted = fit(model, tokens, labels)
    (peak, gradients, sent), (unfitted, others, also_sent) = (
        _steps(one, tokens, labels) for one in (wrapped if later else wrap(model), wrap(twin))
    )
    resident = sum(getattr(p, "_local_tensor", p).nbytes for p in model.parameters()) + tokens.nbytes + labels.nbytes
    kept = not later or resident + peak <= (fitted[0].proof.budget or 0) < resident + unfitted
    equal = all(torch.equal(a, b) for a, b in zip(gradients, others, strict=True))
    stats = [one.stats for one in fitted]
    return {
        "equal": equal, "peak": peak, "unfitted": unfitted, "kept": kept, "sent": sent == also_sent and any(sent),
        "planned": sum(one.planned for one in stats), "unplanned": sum(one.unplanned for one in stats),
        "plans": [note for one in fitted for note in one.notes if "on all ranks" in note],
    }  # fmt: skip


def _steps(model: Any, tokens: Tensor, labels: Tensor) -> tuple[int, list[Tensor], list[str]]:
    """Return the peak of a third step, in bytes above what it begins with, the gradients of all three, and the
    collective operations of a fourth, by torch's profiler."""
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
    with torch.autograd.profiler.profile() as profile:
        step()
    names = [event.name for event in list(getattr(profile, "function_events", None) or ())]
    return peak, gradients, [name for name in names if name.startswith("c10d::")]
