"""A transformer in four stages of a pipeline, each sharded by two ranks: `torchrun --nproc-per-node 8`.

memplan explain examples/pipeline.py:build --world 8 --rank all --device rtx4090
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

STAGES, WIDTH, LENGTH, TOKENS = 4, 1024, 512, 32000


class Stage(nn.Module):
    """Four layers; the first stage has the embedding, too, and the last one the head."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH) if index == 0 else nn.Identity()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 16, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, TOKENS) if index == STAGES - 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, or what the next stage gets."""
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of the last stage."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def build(micro_batches: int = 8, batch: int = 2) -> Callable[[], None]:
    """Return a step of this rank, with micro-batches of ``batch`` sequences."""
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (STAGES, dist.get_world_size() // STAGES), mesh_dim_names=("stage", "shard"))
    index = mesh["stage"].get_local_rank()
    model = Stage(index).cuda()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["shard"], reshard_after_forward=False)
    fully_shard(model, mesh=mesh["shard"], reshard_after_forward=False)

    def between(width: int) -> Tensor:
        return torch.zeros(batch, LENGTH, width, device="meta", requires_grad=True)

    tokens = torch.zeros(batch, LENGTH, dtype=torch.int64, device="meta")
    stage = PipelineStage(
        model, index, STAGES, torch.device("cuda", torch.cuda.current_device()), group=mesh["stage"].get_group(),
        input_args=between(WIDTH) if index else tokens, output_args=between(WIDTH if index < STAGES - 1 else TOKENS),
    )  # fmt: skip
    schedule = Schedule1F1B(stage, n_microbatches=micro_batches, loss_fn=cross_entropy)
    optimizer = torch.optim.AdamW(model.parameters())
    inputs, labels = torch.zeros(2, micro_batches * batch, LENGTH, dtype=torch.int64, device="cuda")

    def step() -> None:
        if index == 0:
            schedule.step(inputs)
        elif index == STAGES - 1:
            schedule.step(target=labels, losses=[])
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()

    return step
