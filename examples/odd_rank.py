"""Four ranks, of which the last one keeps the outputs of its evaluation: the snapshots of all, compared.

    python examples/odd_rank.py

Each rank's allocator is predicted for an H100, without the others, and written as torch writes snapshots.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def build(width: int = 1024) -> Callable[[], None]:
    dist.init_process_group("nccl")
    net = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)).cuda()
    model, data = DistributedDataParallel(net), torch.randn(4096, width, device="cuda")
    optimizer, outputs = torch.optim.AdamW(model.parameters()), list[Tensor]()

    def step() -> None:
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == dist.get_world_size() - 1:
            with torch.no_grad():
                outputs.append(net(data))

    return step


def main(ranks: int = 4) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(ranks):
            of_rank = "--world", str(ranks), "--rank", str(rank), "--snapshot", f"rank{rank}.pickle"
            memplan(folder, "explain", f"{Path(__file__).resolve()}:build", "--device", "h100", *of_rank)
        print(memplan(folder, "replay", ".", "--top", "4"))


def memplan(folder: str, *arguments: str) -> str:
    command = [sys.executable, "-m", "memplan.cli", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, encoding="utf-8", check=False).stdout


if __name__ == "__main__":
    main()
