"""A transformer that `memplan.layouts` makes tensor parallel: its step, and its gradients on real ranks of gloo."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from models.sharded_steps import Transformer, in_tensors, mesh_of, sharded
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional as F

from memplan.studies.layouts.blocks import blocks_of
from memplan.studies.layouts.tensor_parallel import tensor_parallel

TOKENS = 4, 64


def loss_of(model: torch.nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())


def step_of(
    shards: int = 1, *, replicas: int = 1, by_hand: bool = False, loss_of_shards: bool = False
) -> Callable[[], Callable[[], None]]:
    """A step of ranks that share each layer; with ``shards`` of these, by FSDP2, and ``replicas`` of them, by HSDP.
    ``by_hand``: by torch's tutorial, which shards the sequence at the embedding and the head, too."""

    def build() -> Callable[[], None]:
        dist.init_process_group("gloo")
        sizes = replicas, shards, dist.get_world_size() // shards // replicas
        mesh = mesh_of(*sizes, names=("replicas", "shards", "tensor"))
        model = Transformer()
        if by_hand:
            in_tensors(model, mesh["tensor"])
        else:
            tensor_parallel(model, mesh["tensor"], blocks=blocks_of(model), loss_parallel=loss_of_shards)
        if shards > 1:
            sharded(model, mesh=mesh["replicas", "shards"] if replicas > 1 else mesh["shards"])
        update = torch.optim.AdamW(model.parameters())
        tokens, labels = torch.zeros(2, *TOKENS, dtype=torch.int64)

        def step() -> None:
            with loss_parallel() if loss_of_shards else nullcontext():
                loss_of(model, tokens, labels).backward()
            update.step()
            update.zero_grad()

        return step

    return build


def compared(rank: int, folder: str, loss_of_shards: bool) -> None:
    """In a process of its own: write the largest relative difference of a gradient from the module's on one rank."""
    os.environ |= {"MASTER_ADDR": "localhost"}
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Transformer())
    reference, model = models
    tensor_parallel(model, mesh_of(2, names=("tensor",)), blocks=blocks_of(model), loss_parallel=loss_of_shards)
    tokens, labels = torch.randint(500, (2, *TOKENS))
    with loss_parallel() if loss_of_shards else nullcontext():
        for each in models:
            loss_of(each, tokens, labels).backward()
    whole = dict(reference.named_parameters())
    worst = 0.0
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.full_tensor()  # type: ignore[union-attr]  # a DTensor
        worst = max(worst, float((gradient - whole[name].grad).norm() / whole[name].grad.norm()))
    dist.destroy_process_group()
    Path(folder, str(rank)).write_text(f"{len(whole)} {worst}")
