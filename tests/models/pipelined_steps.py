"""Training steps of one rank of a pipeline: stages of a block each, with the shapes between them or without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from models.sharded_steps import VOCABULARY, WIDTH, Block
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.nn import functional as F

SEQUENCES, LENGTH = 2, 64
SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B, "zbv": ScheduleZBVZeroBubble,
}  # fmt: skip


class Stage(nn.Module):
    def __init__(self, index: int, stages: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if index == 0 else nn.Identity()
        self.block = Block()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False) if index == stages - 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.embedding(x)))


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _shapes(index: int, stages: int) -> dict[str, Any]:
    def between(width: int) -> Tensor:
        return torch.zeros(SEQUENCES, LENGTH, width, device="meta", requires_grad=True)

    first = torch.zeros(SEQUENCES, LENGTH, dtype=torch.int64, device="meta")
    return {
        "input_args": between(WIDTH) if index else first,
        "output_args": between(WIDTH if index < stages - 1 else VOCABULARY),
    }


def step_of(schedule: str, micro: int, *, shapes: bool = True, device: str = "cpu") -> Callable[[], Callable[[], None]]:
    """A step of ``micro`` micro-batches; with ``shapes`` the stages are told what lies between them."""

    def build() -> Callable[[], None]:
        dist.init_process_group()
        world, rank = dist.get_world_size(), dist.get_rank()
        stages = world * (1 if schedule in ("gpipe", "1f1b") else 2)
        own = [rank, stages - 1 - rank] if schedule == "zbv" else list(range(rank, stages, world))
        parts: Any = [
            PipelineStage(
                Stage(index, stages).to(device), index, stages, torch.device(device),
                **(_shapes(index, stages) if shapes else {}),
            )
            for index in own
        ]  # fmt: skip
        update = torch.optim.AdamW([weight for part in parts for weight in part.submod.parameters()])
        runs = SCHEDULES[schedule](parts if len(parts) > 1 else parts[0], n_microbatches=micro, loss_fn=_loss)
        tokens, labels = torch.zeros(2, micro * SEQUENCES, LENGTH, dtype=torch.int64, device=device)

        def step() -> None:
            runs.step(
                *([tokens] if 0 in own else []), **({"target": labels, "losses": []} if stages - 1 in own else {})
            )
            update.step()
            update.zero_grad()

        return step

    return build
